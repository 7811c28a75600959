"""BF16 numbers as numpy holds them: the upper half of an FP32 number, in a uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

from .intrinsics import float_from_bits, float_to_bits, itemsize
from .jit import inlined

__all__ = ["narrow", "read", "widen", "write"]

_SHIFT = np.uint32(16)
_LOWEST_KEPT_BIT = np.uint32(1)
_JUST_UNDER_HALF = np.uint32(0x7FFF)
_NAN = np.uint16(0x7FC0)


@inlined
def widen(bits: np.uint16) -> np.float32:
    """Return the BF16 number `bits` as a float32; exact."""
    return float_from_bits(np.uint32(bits) << _SHIFT)


@inlined
def narrow(value: np.float32) -> np.uint16:
    """Return the BF16 number nearest to the float32 `value`, ties to even; NaN gives 0x7FC0, as in torch."""
    bits = float_to_bits(value)
    rounded = bits + _JUST_UNDER_HALF + ((bits >> _SHIFT) & _LOWEST_KEPT_BIT)
    return np.uint16(rounded >> _SHIFT) if value == value else _NAN


@inlined
def read(array: Any, i: Any) -> Any:
    """Return element `i` of an array of BF16 or float32 numbers as a float32."""
    return widen(array[i]) if itemsize(array) == 2 else array[i]


@inlined
def write(array: Any, i: Any, value: Any) -> None:
    """Put the float32 `value` at place `i` of an array of BF16 or float32 numbers."""
    if itemsize(array) == 2:
        array[i] = narrow(value)
    else:
        array[i] = value
