"""Mapped tensors: copied piece by piece, their memory given back, and what was written to them kept."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from lightning_cpu_offload.offload import mapped
from lightning_cpu_offload.offload.mapped import give_back, take

MIB = 1 << 20
LARGE = 64 * MIB

needs_pagemap = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/proc/self/pagemap").exists(), reason="memory is given back on Linux only"
)


def map_file(tmp_path: Path, value: Tensor) -> Tensor:
    torch.save({"value": value}, tmp_path / "x")
    return torch.load(tmp_path / "x", mmap=True, weights_only=True)["value"]


def resident() -> int:
    """Bytes of files that are in this process's memory."""
    return psutil.Process().memory_full_info().rss - private()


def private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@needs_pagemap
def test_taking_a_large_tensor_needs_little_memory(tmp_path: Path) -> None:
    value = torch.arange(LARGE // 4, dtype=torch.float32).view(1, 64, -1)  # its first dimension cannot be split
    source, target = map_file(tmp_path, value), torch.zeros_like(value)
    before, most = resident(), []
    original = mapped.give_back
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "give_back", lambda tensor: (most.append(resident() - before), original(tensor)))
        take(target, source)
    assert torch.equal(target, value)
    assert max(most) < 24 * MIB
    assert resident() - before < 8 * MIB  # the kernel maps some pages around those that are read
    target.copy_(source)
    assert resident() - before > LARGE * 0.9  # what it takes otherwise


@needs_pagemap
def test_what_was_written_is_kept(tmp_path: Path) -> None:
    value = torch.arange(MIB, dtype=torch.float32)
    source = map_file(tmp_path, value)
    source[1000:1100] = -1.0
    source.numpy()[500_000] = -2.0  # a write that leaves no trace in the tensor
    expected = source.clone()
    before = resident()
    give_back({"a": {"b": source}, "c": 1})
    assert before - resident() > 3 * MIB
    assert torch.equal(source, expected)


def test_ordinary_tensors_are_left_alone() -> None:
    values = [torch.randn(MIB), torch.randn(100, 100).t(), torch.empty(0), torch.tensor(3.0), torch.ones(2, 2)[:, ::2]]
    values.extend([torch.randn(8).share_memory_(), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()])
    copies = [value.clone() for value in values]
    for value in values:
        give_back(value)
    for value, copy in zip(values, copies, strict=True):
        if not value.is_meta:
            assert torch.equal(value.to_dense(), copy.to_dense())


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (1, 7, 2)])
def test_take_is_copy(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_SLICE_BYTES", 8)
    source = torch.randn(shape)
    target = torch.full(shape, 9.0)
    take(target, source)
    assert torch.equal(target, source)


def test_take_casts_and_broadcasts_as_copy_does() -> None:
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    take(target, torch.ones(3))
    assert torch.equal(target, torch.ones(2, 3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        take(target, torch.ones(4))


def test_without_the_kernels_map_nothing_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = map_file(tmp_path, torch.ones(MIB))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    give_back(source)
    monkeypatch.undo()
    assert torch.equal(source, torch.ones(MIB))
