"""BF16 numbers as numpy holds them: the upper half of an FP32 number, in a uint16."""

from __future__ import annotations

import numpy as np
from numba import njit

from .intrinsics import float_from_bits, float_to_bits

__all__ = ["narrow", "widen"]

_SHIFT = np.uint32(16)
_LOWEST_KEPT_BIT = np.uint32(1)
_JUST_UNDER_HALF = np.uint32(0x7FFF)
_NAN = np.uint16(0x7FC0)


@njit(error_model="numpy")
def widen(bits: np.uint16) -> np.float32:
    """Return the BF16 number `bits` as a float32; exact."""
    return float_from_bits(np.uint32(bits) << _SHIFT)


@njit(error_model="numpy")
def narrow(value: np.float32) -> np.uint16:
    """Return the BF16 number nearest to the float32 `value`, ties to even; NaN gives 0x7FC0, as in torch."""
    bits = float_to_bits(value)
    rounded = bits + _JUST_UNDER_HALF + ((bits >> _SHIFT) & _LOWEST_KEPT_BIT)
    return np.uint16(rounded >> _SHIFT) if value == value else _NAN
