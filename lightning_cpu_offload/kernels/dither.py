"""Rounding up or down by turns, so that what is lost at each step is not lost always in the same direction.

A moment moves by less than the distance of two BF16 or 8-bit numbers in most steps; rounded to the nearest it
would stand still. Here a fraction in [0, 1), the dither, is added below the last digit kept before the rest is
cut off, which is right in the mean over dithers.

The dither of an element is a Weyl sequence over the steps (Weyl 1916): each step adds the golden ratio modulo 1.
Such a sequence fills the interval more evenly than random numbers do, so that after N equal moves the error is of
the order of one distance, and not of the root of N. It is a function of seed, step and place alone: neither
threads nor cuts nor a resumed run change it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .intrinsics import float_to_bits
from .jit import inlined

__all__ = ["dither", "origin", "to_bfloat16"]

# numba's integers become 64 bits wide in any operation; `np.uint32` around each keeps them, and the loops, narrow.

_STEP_FACTOR = 0x9E39E377
"""The golden ratio as a fraction of 2**32, and its lower 20 bits as a fraction of 2**20: two sequences in one."""

_SEED_FACTOR = 0x85EBCA6B
_PLACE_FACTOR = np.uint32(0xC13FA9A9)
_SHIFT = np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint16(0x7FC0)


def origin(seed: int, step: int) -> np.uint32:
    """Return where the dithers of a step begin."""
    return np.uint32((seed * _SEED_FACTOR + step * _STEP_FACTOR) % 2**32)


@inlined
def dither(place: Any, start: Any) -> Any:
    """Return 32 bits for the element at `place`: the upper 20 are one dither, the lower 20 nearly another."""
    return np.uint32(np.uint32(np.uint32(place) * _PLACE_FACTOR) + start)


@inlined
def to_bfloat16(value: Any, fraction: Any) -> Any:
    """Return one of the two BF16 numbers around the float32 `value`; `fraction` is 16 bits of dither."""
    bits = float_to_bits(value)
    rounded = np.uint32(bits + fraction)
    rounded = bits if np.uint32(bits & _MAGNITUDE) == _INFINITY else rounded
    return np.uint16(rounded >> _SHIFT) if value == value else _NAN
