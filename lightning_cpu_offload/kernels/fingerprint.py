"""A 64-bit number that tells whether an array's bytes have changed.

The sum, modulo 2**64, over the 8-byte words of the array, of a hash of each word together with its position.
The hash is the finalizer of MurmurHash3 (Appleby 2011), a bijection in which every input bit changes every
output bit with a chance of about one half; a sum of such values does not depend on the order in which threads
add them. Made for accidents, not for adversaries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .intrinsics import fetch_add
from .jit import kernel
from .threads import ThreadPool

__all__ = ["fingerprint"]

WORD_BYTES = 8

SHARE = 1 << 15
"""Words a thread takes at a time: 256 KiB."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR1 = np.uint64(0xFF51AFD7ED558CCD)
_FACTOR2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


@kernel
def _sum_shares(words: Any, first_position: Any, next_share: Any) -> Any:
    """Return the sum of the hashes of those shares of `words` that this thread drew from `next_share`."""
    total = np.uint64(0)
    while True:
        start = fetch_add(next_share, SHARE)
        if start >= words.size:
            return total
        for i in range(np.uint64(start), np.uint64(min(start + SHARE, words.size))):
            x = words[i] + (i + first_position) * _GOLDEN
            x = (x ^ (x >> _SHIFT)) * _FACTOR1
            x = (x ^ (x >> _SHIFT)) * _FACTOR2
            total += x ^ (x >> _SHIFT)


def fingerprint(array: NDArray[Any], *, threads: ThreadPool) -> int:
    """Return a number below 2**64 that depends on every byte of `array`, its place and the array's length.

    Two arrays that differ have the same number with a chance of about 2**-64; two that differ in one word of
    eight bytes never have. The number of threads does not change it.

    Args:
        array: Any contiguous array of shape `(n,)`, at any address.
        threads: Who does the work.

    Raises:
        ValueError: If `array` is not one-dimensional and contiguous.
    """
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"array.shape={array.shape}: must be one-dimensional and contiguous. Flatten it first.")
    data = array.view(np.uint8)
    num_words, num_left = divmod(data.size, WORD_BYTES)
    words = data[: num_words * WORD_BYTES].view(np.uint64)
    end = np.zeros(2, np.uint64)
    end.view(np.uint8)[:num_left] = data[data.size - num_left :]
    end[1] = data.size
    next_share = np.zeros(1, np.int64)

    def work(_: int) -> int:
        return int(_sum_shares(words, np.uint64(0), next_share))

    shares = math.ceil(num_words / SHARE)
    sums = threads.map(work, range(min(shares, threads.num_threads)))
    return (sum(sums) + int(_sum_shares(end, np.uint64(num_words), np.zeros(1, np.int64)))) % 2**64
