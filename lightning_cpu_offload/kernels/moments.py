"""Adam's two moments in fewer bytes, the step with them, and the ways in and out for checkpoints.

float32    12 bytes a parameter with its master, 28 of traffic   `kernels.adamw`
bfloat16    8                                    20              `BFloat16Moments`
float8      6 (and 1/32 for exponents)           16              `Float8Moments`
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import coefficients
from .arrays import check_array, check_step, is_in_place
from .dither import origin
from .float8 import BLOCK
from .reduced import SHARE, decode_float8, encode_float8, update_bfloat16, update_float8
from .threads import ThreadPool

__all__ = ["MOMENTS", "BFloat16Moments", "Float8Moments", "Moments"]

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]
Allocate = Callable[[int, Any], NDArray[Any]]


class Moments(ABC):
    """Both moments of `size` parameters, zero at first.

    Args:
        size: How many parameters.
        allocate: Makes an array of zeros from a length and a dtype.
    """

    def __init__(self, size: int, allocate: Allocate = np.zeros) -> None:
        self.size = size

    def step(
        self,
        param: Floats,
        gradient: Words | Floats,
        weight: Words | Floats,
        *,
        first: int,
        seed: int = 0,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: int,
        grad_scale: float = 1.0,
        threads: ThreadPool,
    ) -> None:
        """Step the parameters from place `first` on; see `kernels.adamw` for what is not said here.

        Args:
            param: FP32 master weights, [n].
            gradient: The gradient, [n].
            weight: Where the new weight goes, [n]; may be `gradient`.
            first: Place of the first parameter among the moments; the dither depends on it.
            seed: Another seed, another dither.
            lr: Learning rate.
            beta1: Decay of the first moment.
            beta2: Decay of the second moment.
            eps: Added to the root of the second moment.
            weight_decay: Weight decay or the factor of the L2 term.
            decoupled: True for AdamW, False for Adam.
            step: Number of this step, 1 for the first.
            grad_scale: Factor of the gradient.
            threads: Who does the work.

        Raises:
            ValueError: If a number or an array is not as described.
        """
        check_step(step)
        self._check_range(first, param.size)
        check_array("param", param, param.size, np.float32)
        check_array("gradient", gradient, param.size, np.uint16, np.float32)
        check_array("weight", weight, param.size, np.uint16, np.float32)
        out = None if is_in_place(gradient, weight) else weight
        c = coefficients(lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale)
        begin = first // SHARE * SHARE
        run = self._kernel(param, gradient, out, first, origin(seed, step), c, np.full(1, begin, np.int64))
        shares = math.ceil((first + param.size - begin) / SHARE) if param.size else 0
        threads.map(lambda _: run(), range(min(shares, threads.num_threads)))

    @abstractmethod
    def get(self, name: str, first: int, size: int) -> Floats:
        """Return `size` numbers of `name`, "exp_avg" or "exp_avg_sq", from place `first` on: what they are, exactly."""

    @abstractmethod
    def set(self, name: str, first: int, values: Floats) -> None:
        """Put numbers, [n], into `name` from place `first` on; those that came from `get` stay what they are."""

    @abstractmethod
    def _kernel(
        self, param: Any, gradient: Any, weight: Any, first: int, start: Any, c: Any, next_share: Any
    ) -> Callable[[], None]:
        """Return what each thread calls."""

    def _check_range(self, first: int, size: int) -> None:
        if not 0 <= first <= first + size <= self.size:
            raise ValueError(
                f"first={first!r}: {size} numbers from there on must be among {self.size}. Pass their place."
            )


class BFloat16Moments(Moments):
    """Moments in BF16: 4 bytes a parameter, 8 with its master; a step moves 20."""

    def __init__(self, size: int, allocate: Allocate = np.zeros) -> None:
        super().__init__(size)
        self.exp_avg: Words = allocate(size, np.uint16)
        self.exp_avg_sq: Words = allocate(size, np.uint16)

    def get(self, name: str, first: int, size: int) -> Floats:  # noqa: D102
        self._check_range(first, size)
        words = getattr(self, name)[first : first + size]
        return (words.astype(np.uint32) << 16).view(np.float32)

    def set(self, name: str, first: int, values: Floats) -> None:
        """Round to nearest even."""
        self._check_range(first, values.size)
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        getattr(self, name)[first : first + values.size] = np.where(np.isnan(values), 0x7FC0, rounded)

    def _kernel(
        self, param: Any, gradient: Any, weight: Any, first: int, start: Any, c: Any, next_share: Any
    ) -> Callable[[], None]:
        stop = first + param.size
        moments = self.exp_avg[first:stop], self.exp_avg_sq[first:stop]
        next_share[0] = 0
        return lambda: update_bfloat16(param, gradient, weight, *moments, np.uint64(first), start, c, next_share)


class Float8Moments(Moments):
    """Moments in 8 bits, see `float8`: 2 bytes a parameter and 1/32 for exponents, 6 with its master; a step moves 16.

    Blocks of 128 parameters share an exponent, so those that are stepped together should stand together.
    """

    def __init__(self, size: int, allocate: Allocate = np.zeros) -> None:
        super().__init__(size)
        blocks = math.ceil(size / BLOCK)
        self.exp_avg: NDArray[np.uint8] = allocate(size, np.uint8)
        self.exp_avg_sq: NDArray[np.uint8] = allocate(size, np.uint8)
        self.exponents: Words = allocate(2 * blocks, np.uint16)
        self._parts = {
            "exp_avg": (True, np.uint32(0), self.exp_avg, self.exponents[:blocks]),
            "exp_avg_sq": (False, np.uint32(0), self.exp_avg_sq, self.exponents[blocks:]),
        }

    def get(self, name: str, first: int, size: int) -> Floats:  # noqa: D102
        self._check_range(first, size)
        signed, _, codes, exponents = self._parts[name]
        values = np.empty(size, np.float32)
        decode_float8(values, first, signed, codes, exponents)
        return values

    def set(self, name: str, first: int, values: Floats) -> None:
        """Round by the dither of step 0 and seed 0."""
        self._check_range(first, values.size)
        encode_float8(np.ascontiguousarray(values, np.float32), first, *self._parts[name])

    def _kernel(
        self, param: Any, gradient: Any, weight: Any, first: int, start: Any, c: Any, next_share: Any
    ) -> Callable[[], None]:
        arrays = (*self._parts["exp_avg"][2:], *self._parts["exp_avg_sq"][2:])
        return lambda: update_float8(param, gradient, weight, *arrays, first, start, c, next_share)


MOMENTS: dict[str, type[Moments]] = {"bfloat16": BFloat16Moments, "float8": Float8Moments}
"""The kinds of moments that take less than float32 does."""
