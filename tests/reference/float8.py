"""The 8-bit block format and the dithered rounding, by tables and exact arithmetic instead of bit tricks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

BLOCK = 128


def values_of(exponent: int, signed: bool) -> np.ndarray:
    """What the codes 0 to 126 (signed, without the sign) or 0 to 254 mean under a largest exponent, in float64."""
    octaves = 15 if signed else 31
    codes = np.arange(127 if signed else 255)
    values = (1 + codes % 8 / 8) * 2.0 ** (exponent - octaves + codes // 8)
    if signed:
        values[0] = 0
    return values


def exponent_of(block: np.ndarray) -> int:
    """The least exponent, from -95 on, with which 1.75 * 2**exponent reaches every finite number of the block."""
    largest = max((abs(float(x)) for x in block if np.isfinite(x)), default=0.0)
    exponent = -95
    while largest > 1.75 * 2.0**exponent:
        exponent += 1
    return exponent


def dithers(count: int, first: int, seed: int, step: int) -> tuple[list[Fraction], list[Fraction]]:
    """The fractions added to the first and the second moment of `count` elements, in units of 2**-20."""
    words = [(0x85EBCA6B * seed + 0x9E39E377 * step + 0xC13FA9A9 * i) % 2**32 for i in range(first, first + count)]
    return [Fraction(w >> 12, 2**20) for w in words], [Fraction(w % 2**20, 2**20) for w in words]


def round_block(block: np.ndarray, fractions: list[Fraction], signed: bool) -> np.ndarray:
    """What a block is after a round trip: each number goes to a neighbour in the table, by its fraction."""
    table = [Fraction(float(x)) for x in values_of(exponent_of(block), signed)]
    lowest = table[1] / Fraction(9, 8) if signed else table[0]
    steps = [lowest, *table[1:], 2 * table[-7]]
    return np.array([_round(float(x), steps, table, f) for x, f in zip(block, fractions, strict=True)], np.float32)


def _round(x: float, steps: list[Fraction], table: list[Fraction], fraction: Fraction) -> float:
    if not np.isfinite(x):
        return np.nan
    magnitude = Fraction(abs(x))
    below = max((i for i, step in enumerate(steps) if step <= magnitude), default=0)
    distance = steps[below + 1] - steps[below]
    up = magnitude + fraction * distance >= steps[below + 1]
    return float(np.copysign(float(table[below + up]), x))
