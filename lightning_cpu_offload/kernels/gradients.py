"""Gradients on the host: summed up in FP32, and measured.

A sum of squares is taken in double precision, in which the square of every float32 is exact and no sum of them
overflows: it is finite if and only if every element is. Blocks of fixed size are summed in a fixed order, so the
number of threads does not change a bit of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import check_array
from .bfloat16 import read, write
from .intrinsics import fetch_add
from .jit import kernel
from .threads import ThreadPool

__all__ = ["accumulate"]

SHARE = 1 << 16
"""Elements a thread takes at a time, and those with a sum of their own."""

LANES = 64
"""Sums that run beside each other within a share, so that the loop can be vectorized and keeps its order."""


@kernel
def _accumulate_shares(total: Any, gradient: Any, store: Any, factor: Any, sums: Any, next_share: Any) -> None:
    """Add shares of `gradient` to `total`, and put the sum of squares of each at its place in `sums`."""
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
                value = read(gradient, i) * factor
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
    next_share = np.zeros(1, np.int64)
    sums = np.zeros(math.ceil(gradient.size / SHARE))

    def work(_: int) -> None:
        _accumulate_shares(total, gradient, store, np.float32(scale), sums, next_share)

    threads.map(work, range(min(sums.size, threads.num_threads)))
    return math.fsum(sums)
