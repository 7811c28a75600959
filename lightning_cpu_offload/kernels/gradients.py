"""Gradients on the host: summed up in FP32, measured, scaled and clamped.

A sum of squares is taken in double precision, in which the square of every float32 is exact and no sum of them
overflows: it is finite if and only if every element is. Blocks of fixed size are summed in a fixed order, so the
number of threads does not change a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import check_array
from .bfloat16 import read, write
from .intrinsics import fetch_add
from .jit import kernel
from .threads import ThreadPool

__all__ = ["accumulate", "clamp", "scale", "square_sum"]

SHARE = 1 << 16
"""Elements a thread takes at a time, and those with a sum of their own."""

LANES = 64
"""Sums that run beside each other within a share, so that the loop can be vectorized and keeps its order."""


@kernel
def _accumulate_shares(total: Any, gradient: Any, store: Any, factor: Any, sums: Any, next_share: Any) -> None:
    """Add shares of `gradient`, and put the sum of squares of each at its place in `sums`.

    Without `total` (None) nothing is written and the squares are those of the gradient.
    """
    lanes = np.zeros(LANES, np.float64)
    while True:
        start = fetch_add(next_share, SHARE)
        if start >= gradient.size:
            return
        lanes[:] = 0
        stop = min(start + SHARE, gradient.size)
        for row in range(start, stop, LANES):
            for lane in range(np.uint64(0), np.uint64(min(LANES, stop - row))):
                i = np.uint64(row) + lane
                value = read(gradient, i)
                if total is not None:
                    value *= factor
                    if not store:
                        value += read(total, i)
                    write(total, i, value)
                lanes[lane] += np.float64(value) * np.float64(value)
        share_sum = 0.0
        for lane in range(LANES):
            share_sum += lanes[lane]
        sums[start // SHARE] = share_sum


def accumulate(
    total: NDArray[np.float32] | NDArray[np.uint16],
    gradient: NDArray[np.uint16] | NDArray[np.float32],
    *,
    store: bool,
    scale: float = 1.0,
    threads: ThreadPool,
) -> float:
    """Add a gradient to a total, or begin a total with it; return the sum of squares of the new total.

    Args:
        total: The total, [n]; `total + scale * gradient` afterwards, each operation rounded to float32, and the sum
            to nearest even where `total` is BF16 numbers in uint16. A BF16 gradient that is stored there is exact.
        gradient: BF16 numbers in uint16, or float32, [n]; does not overlap `total`.
        store: Begin anew: `total` becomes `scale * gradient`, whatever was in it.
        scale: Factor of the gradient.
        threads: Who does the work.

    Returns:
        The sum over all elements of `total**2`, before a BF16 total is rounded; infinite or NaN if and only if an
        element is.

    Raises:
        ValueError: If an array is not as described.
    """
    check_array("total", total, total.size, np.float32, np.uint16)
    check_array("gradient", gradient, total.size, np.uint16, np.float32)
    return _sum_of_shares(total, gradient, store, scale, threads)


def square_sum(values: NDArray[np.uint16] | NDArray[np.float32], *, threads: ThreadPool) -> float:
    """Return the sum of the squares of BF16 numbers in uint16, or of float32, [n].

    Infinite or NaN if and only if an element is.

    Raises:
        ValueError: If `values` is not as described.
    """
    check_array("values", values, values.size, np.uint16, np.float32)
    return _sum_of_shares(None, values, False, 1.0, threads)


def _sum_of_shares(total: Any, gradient: Any, store: bool, scale: float, threads: ThreadPool) -> float:
    next_share = np.zeros(1, np.int64)
    sums = np.zeros(math.ceil(gradient.size / SHARE))

    def work(_: int) -> None:
        _accumulate_shares(total, gradient, store, np.float32(scale), sums, next_share)

    threads.map(work, range(min(sums.size, threads.num_threads)))
    return math.fsum(sums)


def scale(values: NDArray[np.float32], factor: float, *, threads: ThreadPool) -> None:
    """Multiply float32[n] by `factor`, rounded to float32, in place.

    Raises:
        ValueError: If `values` is not as described.
    """
    check_array("values", values, values.size, np.float32)
    _each_share(values, lambda part: np.multiply(part, np.float32(factor), out=part), threads)


def clamp(values: NDArray[np.float32], limit: float, *, threads: ThreadPool) -> None:
    """Clamp float32[n] to `[-limit, limit]` in place; NaN stays.

    Raises:
        ValueError: If `values` is not as described.
    """
    check_array("values", values, values.size, np.float32)
    bound = np.float32(limit)
    _each_share(values, lambda part: np.clip(part, -bound, bound, out=part), threads)


def _each_share(values: Any, change: Callable[[Any], Any], threads: ThreadPool) -> None:
    starts = range(0, values.size, SHARE)
    threads.map(lambda start: change(values[start : start + SHARE]), starts)
