"""AdamW and Adam in one pass over memory (Loshchilov & Hutter 2019, algorithm 2; Kingma & Ba 2015).

The step is bound by memory, so each array is read once and written once: 28 bytes for a parameter whose BF16
gradient and weight share one array, the plane. It holds the gradient when the step starts and the new weight when
it ends; writing where one has just read spares the memory the read that precedes a write elsewhere.

The arithmetic is that of torch's `_single_tensor_adam` (torch/optim/adam.py), operation by operation in IEEE
float32: no fastmath, no fused multiply-add. Each element depends on its own inputs only, so neither the
processor nor the number of threads nor the way an array is cut changes a bit of the result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import coefficients, descend, moments
from .arrays import check_array, check_step, is_in_place
from .bfloat16 import read, write
from .intrinsics import fetch_add, itemsize, prefetch
from .jit import kernel
from .threads import ThreadPool

__all__ = ["adamw"]

SHARE = 1 << 16
"""Elements a thread takes at a time: about 50 microseconds of work, and the least worth waking a thread for."""

BLOCK = 128
"""Elements between two rounds of prefetching: eight cache lines of FP32."""

AHEAD = 4 * BLOCK
"""How far ahead to prefetch: measured best of 1 to 16 blocks on Sapphire Rapids, and free on Zen 4."""

LINE_BYTES = 64


@kernel
def _update_shares(
    param: Any, gradient: Any, weight: Any, exp_avg: Any, exp_avg_sq: Any, max_exp_avg_sq: Any, c: Any, next_share: Any
) -> None:
    """Update shares of the arrays until none is left; threads draw them from the counter `next_share`.

    `weight` is None where the new weight takes the gradient's place, `max_exp_avg_sq` without amsgrad; each of
    them makes a kernel of its own. Indices are unsigned because numba makes signed ones count from the end when
    negative, and a loop with that test in it is not vectorized.
    """
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
                for i in range(first, last, np.uint64(LINE_BYTES // itemsize(gradient))):
                    prefetch(gradient, i)
            for i in range(np.uint64(block), np.uint64(min(block + BLOCK, stop))):
                w, m, v = moments(param[i], read(gradient, i), exp_avg[i], exp_avg_sq[i], c)
                exp_avg[i], exp_avg_sq[i] = m, v
                if max_exp_avg_sq is not None:
                    if v > max_exp_avg_sq[i] or v != v:  # torch.maximum, which keeps NaN
                        max_exp_avg_sq[i] = v
                    v = max_exp_avg_sq[i]
                w = descend(w, m, v, c)
                param[i] = w
                if weight is None:
                    write(gradient, i, w)
                else:
                    write(weight, i, w)


def adamw(
    param: NDArray[np.float32],
    gradient: NDArray[np.uint16] | NDArray[np.float32],
    weight: NDArray[np.uint16] | NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    *,
    max_exp_avg_sq: NDArray[np.float32] | None = None,
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
    """Take one step of AdamW or Adam in place; all arrays have shape `(n,)`.

    No two arrays may overlap, but `gradient` and `weight` may be the same array: that is the fastest way.

    Args:
        param: FP32 master weights.
        gradient: The gradient: BF16 numbers in uint16, or float32. Only read, unless it is `weight`.
        weight: Where the new weight goes, rounded to nearest even: BF16 numbers in uint16, or float32.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        max_exp_avg_sq: Maximum of the second moments so far; given, the step is that of AMSGrad.
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
    check_step(step)
    for name, array in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_array(name, array, param.size, np.float32)
    if max_exp_avg_sq is not None:
        check_array("max_exp_avg_sq", max_exp_avg_sq, param.size, np.float32)
    check_array("gradient", gradient, param.size, np.uint16, np.float32)
    check_array("weight", weight, param.size, np.uint16, np.float32)
    out = None if is_in_place(gradient, weight) else weight
    c = coefficients(lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale)
    next_share = np.zeros(1, np.int64)

    def work(_: int) -> None:
        _update_shares(param, gradient, out, exp_avg, exp_avg_sq, max_exp_avg_sq, c, next_share)

    shares = math.ceil(param.size / SHARE)
    threads.map(work, range(min(shares, threads.num_threads)))
