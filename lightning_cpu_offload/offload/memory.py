"""Host memory: exact sizes, one owner, counted.

Masters and moments are allocated once as a few large anonymous mappings. A parameter's tensor is a view with a
storage of its own, so it is saved, copied and compared like any ordinary tensor. The pages are not inherited by
forked children: dataloader workers forked in the middle of training would otherwise keep a copy of every page the
next optimizer step writes. What is to stay on the device is a vector there, with views of the same kind.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.spread import FLOATS, Layout, Span, Spread

_FLOAT_BYTES = 4

HUGE_BYTES = 2 << 20
"""The largest page that the system may choose."""

BLOCK_DEPTH = 4
"""Staging buffers in one allocation."""


class HostArena:
    """`numel` FP32 zeros in one mapping of exactly that size.

    Where the arena is spread over ranks, each maps all of it and uses the pages of what it owns; the rest is undefined,
    but for the time in which it is whole.

    Args:
        numel: Number of elements.
        threads: Who touches the pages first, which decides on what memory node they are: the threads that will step
            them; None: the calling one.
        spread: What of the region is whose; None: everything is here.
        layout: Where the region's elements lie in the arena.

    Attributes:
        numel: Number of elements.
        nbytes: Size of what is kept here.
        array: All elements, float32[numel].
        spread: As given.
        whole: Whether all of it is here.
    """

    def __init__(
        self, numel: int, threads: ThreadPool | None = None, spread: Spread | None = None, layout: Layout = FLOATS
    ) -> None:
        self.numel = numel
        self.spread = spread
        self.whole = spread is None
        self._layout = layout
        self._map = _map(numel * _FLOAT_BYTES, huge=self.whole)
        self.array: np.ndarray = np.frombuffer(self._map, dtype=np.float32, count=numel)
        self._bytes = self.array.view(np.uint8)
        owned = list(self._owned())
        self.nbytes = sum(stop - start for start, stop in owned)
        for span in owned:
            self._allow_huge(span)
        # Every page is touched now: memory that is not there must show before training begins.
        (threads or ThreadPool(1)).map(self._touch, [part for span in owned for part in _cut(span)])

    def tensor(self, start: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A view of the elements from `start`, with its own storage of exactly its own size."""
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        flat = torch.frombuffer(self._map, dtype=torch.float32, offset=start * _FLOAT_BYTES, count=numel)
        return flat.as_strided(tuple(shape), tuple(stride))

    def flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` as one vector."""
        return self.tensor(start, (stop - start,), (1,))

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """The bytes of the region's elements `start` to `stop`, a vector for each place where they are."""
        assert self.spread is not None
        spans = self._layout.spans(start, stop, self.spread.numel)
        return [torch.from_numpy(self._bytes[low:high]) for low, high in spans if low < high]

    def release(self, start: int, stop: int) -> None:
        """Give back the pages of what other ranks own among the region's elements `start` to `stop`."""
        if self.whole or self.spread is None:
            return
        numel = self.spread.numel
        for first, last in self.spread.gaps():
            low, high = max(first, start), min(last, stop)
            if low < high:
                for part, gap in zip(
                    self._layout.spans(low, high, numel), self._layout.spans(first, last, numel), strict=True
                ):
                    self._give_back(part, gap)

    def dismiss(self) -> None:
        """The arena is whole no longer; what other ranks own is given back."""
        if self.spread is not None:
            self.whole = False
            self.release(0, self.spread.numel)

    def inherit_on_fork(self) -> None:
        """Let children inherit the pages again, once the views are ordinary weights after training."""
        _advise(self._map, "MADV_DOFORK")

    def _owned(self) -> Iterator[Span]:
        if self.spread is None:
            yield 0, self.numel * _FLOAT_BYTES
            return
        for start, stop in self.spread.owned():
            yield from self._layout.spans(start, stop, self.spread.numel)

    def _allow_huge(self, span: Span) -> None:
        first, last = -(-span[0] // mmap.PAGESIZE) * mmap.PAGESIZE, span[1] // mmap.PAGESIZE * mmap.PAGESIZE
        if not self.whole and last - first >= HUGE_BYTES:
            _advise(self._map, "MADV_HUGEPAGE", first, last - first)

    def _touch(self, span: Span) -> None:
        self._bytes[span[0] : span[1]].fill(0)

    def _give_back(self, part: Span, gap: Span) -> None:
        """All pages that hold something of `part` and lie in `gap`."""
        first = max(part[0] // mmap.PAGESIZE, -(-gap[0] // mmap.PAGESIZE)) * mmap.PAGESIZE
        last = min(-(-part[1] // mmap.PAGESIZE), gap[1] // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < last:
            _advise(self._map, "MADV_DONTNEED", first, last - first)


class DeviceArena:
    """`numel` FP32 zeros on a device, in place of a `HostArena`.

    Attributes:
        numel: Number of elements.
        nbytes: Their size.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel = numel
        self.nbytes = numel * _FLOAT_BYTES
        self._flat = torch.zeros(numel, dtype=torch.float32, device=device)

    def tensor(self, start: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A view of the elements from `start`, with its own storage of exactly its own size."""
        return own_storage(self._flat, start, torch.Size(shape), tuple(stride))

    def flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` as one vector."""
        return self._flat[start:stop]

    def inherit_on_fork(self) -> None:
        """Nothing to do: forked children have no use for a device."""


Arena = HostArena | DeviceArena


class HostMemory:
    """Allocates what the offload keeps on the host and knows how much that is.

    Args:
        threads: The pool that will step it, as for `HostArena`.

    Attributes:
        bytes_by_name: Bytes held on the host, by purpose.
        device_bytes: Bytes of arenas on the device instead.
    """

    def __init__(self, threads: ThreadPool | None = None) -> None:
        self._threads = threads
        self.bytes_by_name: dict[str, int] = {}
        self.device_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held on the host in total."""
        return sum(self.bytes_by_name.values())

    def arena(self, name: str, numel: int, spread: Spread | None = None, layout: Layout = FLOATS) -> HostArena:
        """An FP32 arena, counted under `name` as far as it is kept here."""
        arena = HostArena(numel, self._threads, spread, layout)
        self._count(name, arena.nbytes)
        return arena

    def device_arena(self, numel: int, device: torch.device) -> DeviceArena:
        """An FP32 arena on a device."""
        arena = DeviceArena(numel, device)
        self.device_bytes += arena.nbytes
        return arena

    def staging(self, nbytes: int, pin: bool, name: str = "ring") -> Tensor:
        """Staging memory, uint8[nbytes], page-locked if `pin`; RuntimeError where the machine refuses."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self._count(name, nbytes)
        return buffer

    def _count(self, name: str, nbytes: int) -> None:
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0) + nbytes


def allocate_ring(memory: HostMemory, depth: int, nbytes: int, pin: bool | str) -> tuple[list[Tensor], bool]:
    """`depth` staging buffers of `nbytes`, and whether they are page-locked.

    Args:
        memory: Where they are counted.
        depth: Number of buffers.
        nbytes: Size of each.
        pin: True, False, or `"auto"`: pinned, or pageable with a warning where the machine refuses.

    Raises:
        RuntimeError: `pin` is True and the machine refuses.
    """
    if pin:
        try:
            return _buffers(memory, depth, nbytes, pin=True), True
        except RuntimeError as error:
            if pin != "auto":
                raise RuntimeError(
                    f"pin_memory=True: page-locking {depth * nbytes} bytes was refused ({error}). "
                    'Use pin_memory="auto" or False, or raise the limit of locked memory.'
                ) from error
            warnings.warn(
                f"page-locking {depth * nbytes} bytes of staging memory was refused; transfers use pageable memory, "
                "so copies no longer overlap with the optimizer step. Raise the limit of locked memory to mend it.",
                stacklevel=2,
            )
    return _buffers(memory, depth, nbytes, pin=False), False


def own_storage(flat: Tensor, start: int, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A part of a vector whose storage is that part alone, so that pickling it does not write the whole vector."""
    begin, end = (element * flat.element_size() for element in (start, start + shape.numel()))
    part = flat.untyped_storage()[begin:end]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(part, 0, shape, stride)


@torch.no_grad()
def end_to_end(tensors: Sequence[Tensor], target: Tensor) -> None:
    """Copy dense tensors, one behind the other, into a vector of their dtype and device, without memory between."""
    torch.cat([tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors], out=target)


def _buffers(memory: HostMemory, depth: int, nbytes: int, pin: bool) -> list[Tensor]:
    # In blocks of a ring's size: torch rounds page-locked blocks up to a power of two, which this one is.
    blocks = [min(BLOCK_DEPTH, depth - first) for first in range(0, depth, BLOCK_DEPTH)]
    return [buffer for block in blocks for buffer in memory.staging(block * nbytes, pin).split(nbytes)]


def _cut(span: Span) -> list[Span]:
    """What threads touch at a time."""
    start, stop = span
    return [(first, min(first + HUGE_BYTES, stop)) for first in range(start, stop, HUGE_BYTES)]


def _map(nbytes: int, huge: bool) -> mmap.mmap:
    size = max(nbytes, 1)  # an empty mapping is an error; an empty region is not
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows has neither fork nor these flags
        return mmap.mmap(-1, size)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(mapping, "MADV_DONTFORK")
    # The step streams through all of it: fewer page-table walks. In a spread arena they would hold parts of others.
    _advise(mapping, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE")
    return mapping


def _advise(mapping: Any, advice: str, *where: int) -> None:
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel built without it: only speed, or memory of a fork, is lost
            mapping.madvise(getattr(mmap, advice), *where)
