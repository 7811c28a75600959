"""Tensors that are mapped from a file: what was read of them need not stay in memory.

A mapped tensor is read page by page, and every page read counts as memory of the process until it is given back. Pages
that still hold what the file holds can be given back at any time: they are read again if they are asked for again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SLICE_BYTES = 16 << 20
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)


@torch.no_grad()
def take(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, for a source that may be mapped from a file: 16 MiB of it are in memory at a time."""
    if target.shape != source.shape or source.nbytes <= _SLICE_BYTES or source.ndim == 0:
        target.copy_(source)
        give_back(source)
        return
    rows = max(1, _SLICE_BYTES * len(source) // source.nbytes)
    for part, read in zip(target.split(rows), source.split(rows), strict=True):
        if len(source) > 1:
            part.copy_(read)
            give_back(read)
        else:
            take(part[0], read[0])


def give_back(value: Any) -> None:
    """Let go of the memory behind mapped tensors, but for what was written to it since; others are left alone.

    Args:
        value: A tensor, or a mapping of them to any depth.
    """
    if isinstance(value, Mapping):
        for item in value.values():
            give_back(item)
    elif isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        first, last = _pages(value)
        if last > first and sys.platform == "linux":
            for start, stop in _unwritten(first, last):
                _madvise()(start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _pages(tensor: Tensor) -> tuple[int, int]:
    """Numbers of the first page that holds a part of a tensor, and of the one behind the last."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    end = begin + extent * tensor.element_size()
    return begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)


def _unwritten(first: int, last: int) -> list[tuple[int, int]]:
    """Runs of pages that are in memory and are the file's own: writing to a private mapping makes a page of no file."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * 8)
            entries = np.frombuffer(file.read((last - first) * 8), dtype=np.uint64)
    except OSError:  # a kernel or a sandbox without it: the pages stay until the mapping goes
        return []
    kept = (entries & _PRESENT != 0) & (entries & _OF_A_FILE != 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    return [(first + int(start), first + int(stop)) for start, stop in edges.reshape(-1, 2)]


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
