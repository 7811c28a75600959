"""Floating point numbers of 8 bits, in blocks of 128 that share an exponent.

    exp_avg      a sign, 4 bits of exponent, 3 of mantissa: from 1 down to 2**-15 of the largest, and zero
    exp_avg_sq   5 bits of exponent, 3 of mantissa: from 1 down to 2**-31 of the largest; nothing becomes zero

No second moment becomes zero because one divides by its root. A block's exponent is the smallest with which its
largest number can be written. Its bit `MARRED` says that it holds numbers that are not finite: there the last
code, which no finite number is given, means NaN.

Decoding is exact, and numbers that were decoded are encoded to what they were, whatever the dither: so a state
goes through a float32 checkpoint unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dither import dither
from .intrinsics import float_from_bits, float_to_bits
from .jit import inlined

__all__ = ["BLOCK", "decode_block", "encode_block", "is_marred", "largest_exponent"]

BLOCK = 128
"""Numbers that share an exponent: two cache lines."""

MARRED = np.uint32(0x100)
_TOP = np.uint32(0xFF)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_ZERO = np.uint32(0)
_EXPONENT = np.uint32(23)
"""Bits of a float32 below its exponent."""

_DROPPED = np.uint32(20)
"""Bits of a float32 below the 3 of the mantissa that are kept."""

_CARRY = np.uint32((1 << 21) - 1)
"""Carries into the exponent where the mantissa is above 1.75, the largest beside the code of NaN."""

_LOWEST = np.uint32(32)
"""The least exponent of a block, stored as 0, so that empty memory is a block of zeros."""

_DITHER = np.uint32(0xFFFFF)
_UPPER = np.uint32(12)
_SIGN, _SIGN_SHIFT = np.uint32(0x80), np.uint32(24)
_SPREAD, _SPREAD_MASK = np.int32(4), np.uint32(0x87F00000)


@inlined
def _lowest_bits(exponent: Any, signed: Any) -> Any:
    """Return the bits of the float32 that code 0 stands at: 15 or 31 octaves under the largest."""
    first = np.uint32(exponent & _TOP) + (_LOWEST - np.uint32(15) if signed else _LOWEST - np.uint32(31))
    return np.uint32(np.uint32(first) << _EXPONENT)


@inlined
def is_marred(exponent: Any) -> Any:
    """Return whether a block holds numbers that are not finite."""
    return np.uint32(exponent & MARRED) != _ZERO


@inlined
def decode_block(codes: Any, base: Any, size: Any, exponent: Any, signed: Any, values: Any) -> None:
    """Put the float32 numbers that `size` codes from place `base` on mean into `values`."""
    lowest = _lowest_bits(exponent, signed)
    for j in range(size):
        code = np.uint32(codes[base + j])
        if signed:
            # The sign to the top, the rest below it by one arithmetic shift.
            spread = np.int32(np.uint32(code << _SIGN_SHIFT)) >> _SPREAD
            bits = np.uint32(np.uint32(spread) & _SPREAD_MASK)
            bits = np.uint32(bits + lowest) if np.uint32(bits & _MAGNITUDE) != _ZERO else bits
        else:
            bits = np.uint32(np.uint32(code << _DROPPED) + lowest)
        values[j] = float_from_bits(bits)
    if is_marred(exponent):
        for j in range(size):
            if np.uint32(codes[base + j] | (_SIGN if signed else _ZERO)) == _TOP:
                values[j] = np.float32(np.nan)


@inlined
def largest_exponent(values: Any, size: Any) -> Any:
    """Return the exponent with which a block of these float32 numbers is encoded."""
    largest = _ZERO
    for j in range(size):
        largest = max(largest, np.uint32(float_to_bits(values[j]) & _MAGNITUDE))
    marred = _ZERO
    if largest >= _INFINITY:
        marred, largest = MARRED, _ZERO
        for j in range(size):
            bits = np.uint32(float_to_bits(values[j]) & _MAGNITUDE)
            largest = max(largest, bits if bits < _INFINITY else _ZERO)
    top = np.uint32(np.uint32(largest + _CARRY) >> _EXPONENT)
    return np.uint32(np.uint32(max(top, _LOWEST) - _LOWEST) | marred)


@inlined
def encode_block(values: Any, size: Any, exponent: Any, signed: Any, start: Any, codes: Any, base: Any) -> None:
    """Put the codes of `size` float32 numbers at place `base` on; `start` is the dither's, see `dither.origin`."""
    lowest = _lowest_bits(exponent, signed)
    for j in range(size):
        bits = float_to_bits(values[j])
        fraction = dither(base + j, start)
        if signed:
            fraction = np.uint32(fraction >> _UPPER)
            sign = np.uint32(np.uint32(bits >> _SIGN_SHIFT) & _SIGN)
        else:
            fraction = np.uint32(fraction & _DITHER)
            sign = _ZERO
        above = np.int32(np.uint32(np.uint32(np.uint32(bits & _MAGNITUDE) + fraction) - lowest))
        code = np.uint32(np.uint32(max(above, np.int32(0))) >> _DROPPED)
        codes[base + j] = np.uint8(code | sign)
    if is_marred(exponent):
        for j in range(size):
            if np.uint32(float_to_bits(values[j]) & _MAGNITUDE) >= _INFINITY:
                codes[base + j] = np.uint8(_TOP)
