"""What the kernels demand of the arrays they get."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["check_array", "check_step", "is_in_place"]


def check_array(name: str, array: Any, size: int, *dtypes: Any) -> None:
    """Raise ValueError unless `array` is contiguous, writable, of shape `(size,)` and of one of `dtypes`."""
    if array.dtype not in dtypes:
        allowed = " or ".join("uint16 (BF16 bits)" if dtype == np.uint16 else dtype.__name__ for dtype in dtypes)
        raise ValueError(f"{name}.dtype={array.dtype}: must be {allowed}. Convert it first.")
    if array.shape != (size,):
        raise ValueError(f"{name}.shape={array.shape}: must be {(size,)}. Pass flat arrays of one size.")
    if not array.flags.carray:
        raise ValueError(f"{name}.strides={array.strides}: must be contiguous and writable. Pass a plain view.")


def check_step(step: int) -> None:
    """Raise ValueError unless `step` is a number of a step."""
    if step < 1:
        raise ValueError(f"step={step!r}: must be 1 or more. Count the step before taking it.")


def is_in_place(gradient: Any, weight: Any) -> bool:
    """Return whether both are the same array.

    Raises:
        ValueError: If they overlap in any other way.
    """
    if gradient is weight:
        return True
    if not np.may_share_memory(gradient, weight):
        return False
    if gradient.ctypes.data == weight.ctypes.data and gradient.dtype == weight.dtype and gradient.size == weight.size:
        return True
    raise ValueError("weight overlaps gradient: must be the same array or another one. Pass one array for both.")
