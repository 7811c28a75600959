"""AdamW and Adam in one pass over memory (Loshchilov & Hutter 2019, algorithm 2; Kingma & Ba 2015).

The step is bound by memory, so each array is read once and written once: 28 bytes for a parameter with a BF16
plane. The plane holds the gradient when the step starts and the new weight when it ends; writing where one has
just read spares the memory the read that precedes a write elsewhere.

The arithmetic is that of torch's `_single_tensor_adam` (torch/optim/adam.py), operation by operation in IEEE
float32: no fastmath, no fused multiply-add. Each element depends on its own inputs only, so neither the
processor nor the number of threads nor the way an array is cut changes a bit of the result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .bfloat16 import narrow, widen
from .intrinsics import fetch_add, itemsize, prefetch
from .threads import ThreadPool

__all__ = ["adamw"]

SHARE = 1 << 16
"""Elements a thread takes at a time: about 50 microseconds of work, and the least worth waking a thread for."""

BLOCK = 128
"""Elements between two rounds of prefetching: eight cache lines of FP32."""

AHEAD = 4 * BLOCK
"""How far ahead to prefetch: measured best of 1 to 16 blocks on Sapphire Rapids, and free on Zen 4."""

LINE_BYTES = 64


class _Coefficients(NamedTuple):
    """The scalars of one step, each computed in double precision and rounded to float32 once."""

    grad_scale: np.float32
    weight_decay: np.float32
    decay_factor: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    bias_correction2_sqrt: np.float32
    eps: np.float32
    step_size: np.float32


@njit(nogil=True, cache=True, error_model="numpy")
def _update_shares(
    param: Any, plane: Any, exp_avg: Any, exp_avg_sq: Any, c: Any, decoupled: Any, next_share: Any
) -> None:
    """Update shares of the arrays until none is left; threads draw them from the counter `next_share`.

    Indices are unsigned because numba makes signed ones count from the end when negative, and a loop with
    that test in it is not vectorized.
    """
    is_bfloat16 = itemsize(plane) == 2
    while True:
        start = fetch_add(next_share, SHARE)
        if start >= param.size:
            return
        stop = min(start + SHARE, param.size)
        for block in range(start, stop, BLOCK):
            if block + AHEAD + BLOCK <= param.size:
                first, last = np.uint64(block + AHEAD), np.uint64(block + AHEAD + BLOCK)
                for i in range(first, last, np.uint64(LINE_BYTES // 4)):
                    prefetch(param, i)
                    prefetch(exp_avg, i)
                    prefetch(exp_avg_sq, i)
                for i in range(first, last, np.uint64(LINE_BYTES // itemsize(plane))):
                    prefetch(plane, i)
            for i in range(np.uint64(block), np.uint64(min(block + BLOCK, stop))):
                grad = (widen(plane[i]) if is_bfloat16 else plane[i]) * c.grad_scale
                weight, m, v = param[i], exp_avg[i], exp_avg_sq[i]
                if decoupled:
                    weight *= c.decay_factor
                else:
                    grad += c.weight_decay * weight
                if c.one_minus_beta1 < 0.5:  # torch.lerp, exact at both of its ends
                    m += c.one_minus_beta1 * (grad - m)
                else:
                    m = grad + (c.one_minus_beta1 - np.float32(1)) * (grad - m)
                v = v * c.beta2 + c.one_minus_beta2 * grad * grad
                denom = math.sqrt(v) / c.bias_correction2_sqrt + c.eps
                weight -= c.step_size * m / denom
                param[i], exp_avg[i], exp_avg_sq[i] = weight, m, v
                if is_bfloat16:
                    plane[i] = narrow(weight)
                else:
                    plane[i] = weight


def adamw(
    param: NDArray[np.float32],
    plane: NDArray[np.uint16] | NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    *,
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
    """Take one step of AdamW or Adam in place; all arrays have shape `(n,)` and do not overlap.

    Args:
        param: FP32 master weights.
        plane: On entry the gradient, on exit the new weight rounded to nearest even: BF16 numbers in uint16,
            or float32.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay (AdamW) or the factor of the L2 term in the gradient (Adam).
        decoupled: True for AdamW, False for Adam.
        step: Number of this step, 1 for the first.
        grad_scale: Factor of the gradient, applied in FP32: a clip coefficient; negative to maximize.
        threads: Who does the work.

    Raises:
        ValueError: If `step` or an array is not as described.
    """
    _check(param, plane, exp_avg, exp_avg_sq, step)
    coefficients = _Coefficients(
        grad_scale=np.float32(grad_scale),
        weight_decay=np.float32(weight_decay),
        decay_factor=np.float32(1 - lr * weight_decay),
        one_minus_beta1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        bias_correction2_sqrt=np.float32((1 - beta2**step) ** 0.5),
        eps=np.float32(eps),
        step_size=np.float32(lr / (1 - beta1**step)),
    )
    # Without weight decay the two are the same step; the decoupled one does not touch the gradient.
    decoupled = decoupled or weight_decay == 0
    next_share = np.zeros(1, np.int64)

    def work(_: int) -> None:
        _update_shares(param, plane, exp_avg, exp_avg_sq, coefficients, decoupled, next_share)

    shares = math.ceil(param.size / SHARE)
    threads.map(work, range(min(shares, threads.num_threads)))


def _check(param: Any, plane: Any, exp_avg: Any, exp_avg_sq: Any, step: int) -> None:
    if step < 1:
        raise ValueError(f"step={step!r}: must be 1 or more. Count the step before taking it.")
    if plane.dtype not in (np.uint16, np.float32):
        raise ValueError(f"plane.dtype={plane.dtype}: must be uint16 (BF16 bits) or float32. Convert it first.")
    arrays = {"param": param, "plane": plane, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, array in arrays.items():
        if name != "plane" and array.dtype != np.float32:
            raise ValueError(f"{name}.dtype={array.dtype}: must be float32. Keep masters and moments in FP32.")
        if array.shape != (param.size,):
            raise ValueError(f"{name}.shape={array.shape}: must be {(param.size,)}. Pass flat arrays of one size.")
        if not array.flags.carray:
            raise ValueError(f"{name}.strides={array.strides}: must be contiguous and writable. Pass a plain view.")
