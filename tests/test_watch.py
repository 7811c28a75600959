"""The fingerprint of the weights, in torch and in the kernel: nothing moves unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels import ThreadPool
from lightning_cpu_offload.offload.bits import words
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import Engine, InlineEngine
from lightning_cpu_offload.offload.watch import Watch, fingerprint
from tests.engines import DeferredEngine

Fingerprint = Callable[[Tensor], int]

CPU = torch.device("cpu")
THREADS = ThreadPool(2)
SIZES = (1, 2, 3, 4, 5, 31, 1024, 4096, 4099, 20_000)
"""Fewer than one word of eight bytes, one row of the table, several rows, and remainders of each."""


def by_torch(weights: Tensor) -> int:
    return int(fingerprint(words(weights)))


def by_kernel(weights: Tensor) -> int:
    return kernels.fingerprint(words(weights).numpy().view(np.uint8), threads=THREADS)


def sum_of_words(weights: Tensor) -> int:
    """A checksum that does not depend on places, to show that the tests below notice one."""
    return int(words(weights).sum(dtype=torch.int64))


both = pytest.mark.parametrize("number_of", [by_torch, by_kernel])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def make_weights(size: int, dtype: torch.dtype, signs: bool) -> Tensor:
    """Random values, or random signs: among these, exchanged elements differ in one bit only."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return (values.sign() if signs else values).to(dtype)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(words(first), words(second))


@both
@dtypes
@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(SIZES), st.booleans())
def test_a_changed_bit_shows(
    number_of: Fingerprint, dtype: torch.dtype, data: st.DataObject, size: int, signs: bool
) -> None:
    before = make_weights(size, dtype, signs)
    after = before.clone()
    place, bit = data.draw(st.integers(0, after.nbytes - 1)), data.draw(st.integers(0, 7))
    after.view(torch.uint8)[place] ^= 1 << bit
    assert not same_bits(before, after)
    assert number_of(before) != number_of(after)


def exchanged(weights: Tensor, first: int, second: int) -> Tensor:
    result = weights.clone()
    result[[first, second]] = weights[[second, first]]
    return result


@both
@dtypes
@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(SIZES[1:]), st.booleans())
def test_two_exchanged_elements_show(
    number_of: Fingerprint, dtype: torch.dtype, data: st.DataObject, size: int, signs: bool
) -> None:
    before = make_weights(size, dtype, signs)
    first, second = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    after = exchanged(before, first, second)
    assert same_bits(before, after) or number_of(before) != number_of(after)


@both
@dtypes
def test_elements_exchanged_over_any_power_of_two_or_prime_row_show(number_of: Fingerprint, dtype: torch.dtype) -> None:
    before = make_weights(20_000, dtype, signs=False)
    for distance in (1, 2, 4, 1021, 1024, 2042, 2048, 4084, 4096, 8192):
        assert number_of(before) != number_of(exchanged(before, 7, 7 + distance)), distance


@both
@dtypes
@pytest.mark.parametrize("width", [1, 16, 64, 1021, 1024, 4096])
def test_permuted_rows_show(number_of: Fingerprint, dtype: torch.dtype, width: int) -> None:
    rows = 3000 if width <= 16 else 12
    before = make_weights(rows * width, dtype, signs=False).view(rows, width)
    for order in (torch.arange(rows).flip(0), torch.arange(rows).roll(1), exchanged(torch.arange(rows), 0, rows - 1)):
        assert number_of(before.flatten()) != number_of(before[order].flatten())
    if rows > 1021:
        order = exchanged(torch.arange(rows), 0, 1021)
        assert number_of(before.flatten()) != number_of(before[order].flatten())


@both
@dtypes
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_shift_by_one_shows(number_of: Fingerprint, dtype: torch.dtype, size: int) -> None:
    before = make_weights(size, dtype, signs=False)
    assert number_of(before) != number_of(before.roll(1))


@both
@dtypes
def test_mirrored_values_show(number_of: Fingerprint, dtype: torch.dtype) -> None:
    before, after = torch.tensor([1.0, 2, 2, 1], dtype=dtype), torch.tensor([2.0, 1, 1, 2], dtype=dtype)
    assert number_of(before) != number_of(after)
    assert number_of(before.repeat(300)) != number_of(after.repeat(300))


@both
@dtypes
@pytest.mark.parametrize("size", [0, *SIZES])
def test_same_weights_same_number_wherever_they_lie(number_of: Fingerprint, dtype: torch.dtype, size: int) -> None:
    weights = make_weights(size, dtype, signs=False)
    for offset in (0, 1, 2, 3, 4):
        elsewhere = torch.cat([torch.zeros(offset, dtype=dtype), weights])[offset:]
        assert number_of(elsewhere) == number_of(weights)


def test_the_checks_above_notice_a_checksum_without_places() -> None:
    with pytest.raises(AssertionError):
        test_a_shift_by_one_shows(sum_of_words, torch.float32, 31)
    with pytest.raises(AssertionError):
        test_mirrored_values_show(sum_of_words, torch.bfloat16)
    with pytest.raises(AssertionError):
        test_permuted_rows_show(sum_of_words, torch.bfloat16, 16)
    with pytest.raises(AssertionError):
        test_elements_exchanged_over_any_power_of_two_or_prime_row_show(sum_of_words, torch.float32)


def make_watch(sizes: tuple[int, ...], dtype: torch.dtype, engine: Engine) -> tuple[Region, Watch]:
    """A region of ten elements a chunk, and what remembers it."""
    masters = [Master(str(size), nn.Parameter(torch.randn(size))) for size in sizes]
    region = Region(masters, dtype, CPU, HostMemory(), slot_bytes=10 * dtype.itemsize)
    watch = Watch(THREADS, engine)
    watch.remember(region)
    return region, watch


def changed(region: Region, watch: Watch) -> list[int]:
    """Numbers of the chunks that were written to."""
    flags = watch.changed(region)
    assert (flags.dtype, flags.shape) == (torch.uint8, (len(region.chunks),))
    return flags.nonzero().flatten().tolist()


@pytest.mark.parametrize("kernel", [True, False])
@dtypes
def test_watch_names_the_chunks_that_were_written(
    kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: kernel)
    region, watch = make_watch((5, 0, 37, 1), dtype, InlineEngine(CPU))
    assert changed(region, watch) == []
    region.masters[0].tensor.data[4] += 1
    region.masters[3].tensor.data[0] += 1
    assert changed(region, watch) == [0, len(region.chunks) - 1]
    watch.remember(region)
    assert changed(region, watch) == []


@pytest.mark.parametrize("kernel", [True, False])
@dtypes
def test_weights_that_arrive_are_remembered_when_they_have(
    kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: kernel)
    engine = DeferredEngine()
    region, watch = make_watch((5, 0, 37, 1), dtype, engine)
    chunk = region.chunks[2]
    engine.copy("h2d", region.weights[chunk.start : chunk.stop], staged := torch.ones(10, dtype=dtype))
    watch.pushed(region, chunk)
    engine.synchronize()
    assert changed(region, watch) == []
    assert region.weights[chunk.start : chunk.stop].equal(staged)
    region.weights[chunk.start] = 2
    assert changed(region, watch) == [2]


@pytest.mark.parametrize("kernel", [True, False])
@dtypes
def test_a_write_right_behind_an_arrival_shows(
    kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: kernel)
    engine = DeferredEngine(prompt=True)
    region, watch = make_watch((64,), dtype, engine)
    arrived = engine.event()
    engine.copy("h2d", region.weights[:10], staged := torch.ones(10, dtype=dtype))
    watch.pushed(region, region.chunks[0])
    engine.record(arrived, "h2d")
    engine.wait("compute", arrived)
    region.masters[0].tensor.data.clamp_(max=0.5)
    assert 0 in changed(region, watch)
    assert staged.eq(1).all()


@pytest.mark.parametrize("kernel", [True, False])
def test_watch_bears_a_region_without_elements(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: kernel)
    region, watch = make_watch((0,), torch.bfloat16, InlineEngine(CPU))
    assert changed(region, watch) == []
