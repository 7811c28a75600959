"""The arithmetic of the host step: numpy arrays in, numpy arrays out.

`adamw` updates FP32 masters and moments in one pass over memory; the kinds of `MOMENTS` do so in fewer bytes.
`accumulate`, `square_sum`, `scale` and `clamp` are for gradients kept on the host, `fingerprint` tells whether an
array was written to, and `ThreadPool` shares such work out over the physical cores. Nothing here knows of torch or
Lightning. Without numba this package still imports, but only `ThreadPool`, `physical_cores` and `available` can be
used: `available()` is then False and `IMPORT_ERROR` says why.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .threads import ThreadPool, physical_cores

__all__ = [
    "IMPORT_ERROR",
    "MOMENTS",
    "Moments",
    "ThreadPool",
    "accumulate",
    "adamw",
    "available",
    "clamp",
    "fingerprint",
    "physical_cores",
    "scale",
    "square_sum",
    "warm_up",
]

IMPORT_ERROR: Exception | None = None
"""Why the compiled kernels cannot be used; None when they can."""

try:
    from .adamw import adamw
    from .fingerprint import fingerprint
    from .gradients import accumulate, clamp, scale, square_sum
    from .moments import MOMENTS, Moments
except (ImportError, RuntimeError) as error:  # RuntimeError: numba finds no folder it may write its cache to
    IMPORT_ERROR = error


def available() -> bool:
    """Return whether the compiled kernels can be used."""
    return IMPORT_ERROR is None


def warm_up(*, host_gradients: bool = False, amsgrad: bool = False, state_dtype: str = "float32") -> None:
    """Compile the kernels, or load them from numba's cache, so that the first step does not wait for it.

    Takes some seconds the first time on a machine, and a fraction of a second later.

    Args:
        host_gradients: Also what sums up gradients on the host and steps from there.
        amsgrad: The AMSGrad kernels in place of the others.
        state_dtype: What the moments are kept in: "float32" or a key of `MOMENTS`.
    """
    threads = ThreadPool(1)
    words, others = np.zeros((2, 1), np.uint16)
    param, values, exp_avg, exp_avg_sq, maximum = np.zeros((5, 1), np.float32)
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    options |= {"decoupled": True, "step": 1, "threads": threads}
    pairs: list[tuple[Any, Any]] = [(words, words), (values, values)]
    pairs += [(values, words), (others, words)] if host_gradients else []
    for gradient, weight in pairs:
        if state_dtype != "float32":
            MOMENTS[state_dtype](1).step(param, gradient, weight, first=0, **options)
        else:
            options["max_exp_avg_sq"] = maximum if amsgrad else None
            adamw(param, gradient, weight, exp_avg, exp_avg_sq, **options)
    if host_gradients:
        accumulate(values, words, store=True, threads=threads)
        accumulate(values, maximum, store=True, threads=threads)
        accumulate(others, words, store=True, threads=threads)
    fingerprint(np.zeros(1, np.uint64), threads=threads)
