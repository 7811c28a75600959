"""The fingerprint: the documented number, on any number of threads, and a different one after any edit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cpu_offload.kernels import ThreadPool, fingerprint

ONE = ThreadPool(1)


def hash_in_plain_python(array: np.ndarray) -> int:
    """The fingerprint as its docstring has it, in Python's integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ (x >> 33)

    data = array.tobytes()
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i : i + 8], sys.byteorder) for i in range(0, whole, 8)]
    words += [int.from_bytes(data[whole:].ljust(8, b"\0"), sys.byteorder), len(data)]
    return sum(mix((word + i * 0x9E3779B97F4A7C15) % 2**64) for i, word in enumerate(words)) % 2**64


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 100_003])
def test_fingerprint_is_the_documented_hash_at_any_address(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3).astype(np.uint8)
    for start in (0, 1, 2):
        part = data[start : start + size]
        assert fingerprint(part, threads=ONE) == hash_in_plain_python(part)


def test_fingerprint_does_not_depend_on_thread_count() -> None:
    words = np.random.default_rng(0).standard_normal(500_001)
    assert len({fingerprint(words, threads=ThreadPool(n)) for n in (1, 2, 3, 5)}) == 1


def assert_noticed(before: np.ndarray, after: np.ndarray, number_of: Any = fingerprint) -> None:
    assert number_of(before, threads=ONE) != number_of(after, threads=ONE)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([np.uint8, np.uint16, np.float32]), st.integers(2, 300))
def test_fingerprint_notices_any_edit(data: st.DataObject, dtype: Any, size: int) -> None:
    before = np.random.default_rng(size).integers(0, 4, size).astype(dtype)
    after = before.copy()
    first, second = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    if data.draw(st.booleans()):
        after[[first, second]] = after[[second, first]]
    else:
        after[first] = data.draw(st.integers(0, 255))
    if before.tobytes() == after.tobytes():
        assert fingerprint(before, threads=ONE) == fingerprint(after, threads=ONE)
    else:
        assert_noticed(before, after)


STRUCTURED_EDITS = {
    "all signs": np.negative,
    "two signs": lambda x: np.concatenate([-x[:2], x[2:]]),
    "rows reversed": lambda x: x.reshape(-1, 64)[::-1].ravel(),
    "rows rolled": lambda x: np.roll(x, 64),
    "neighbours swapped": lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    "transposed": lambda x: x.reshape(-1, 64).T.ravel(),
    "zeroed": np.zeros_like,
    "longer by a zero": lambda x: np.append(x, np.float32(0)),
    "one bit": lambda x: np.nextafter(x, np.where(np.arange(x.size) == 77, np.inf, x).astype(np.float32)),
}


@pytest.mark.parametrize("edit", STRUCTURED_EDITS.values(), ids=STRUCTURED_EDITS.keys())
def test_fingerprint_notices_structured_edits(edit: Any) -> None:
    before = np.random.default_rng(0).standard_normal(64 * 64).astype(np.float32)
    after = np.ascontiguousarray(edit(before))
    assert after.dtype == before.dtype
    assert_noticed(before, after)


def test_edits_are_missed_by_a_sum_that_knows_no_positions() -> None:
    def plain_sum(array: np.ndarray, *, threads: ThreadPool) -> int:
        return int(array.view(np.uint32).astype(np.uint64).sum())

    before = np.random.default_rng(0).standard_normal(64 * 64).astype(np.float32)
    with pytest.raises(AssertionError):
        assert_noticed(before, STRUCTURED_EDITS["rows reversed"](before).copy(), plain_sum)
    with pytest.raises(AssertionError):
        assert_noticed(before, STRUCTURED_EDITS["neighbours swapped"](before).copy(), plain_sum)


@pytest.mark.parametrize("array", [np.zeros((2, 2)), np.zeros(4)[::2]], ids=["2-D", "strided"])
def test_fingerprint_refuses_what_it_cannot_view_as_bytes(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must be one-dimensional and contiguous"):
        fingerprint(array, threads=ONE)
