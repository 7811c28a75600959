"""The arithmetic of the host step: numpy arrays in, numpy arrays out.

`adamw` updates FP32 masters and moments in one pass over memory; the kinds of `MOMENTS` do so in fewer bytes.
`accumulate` is for gradients kept on the host, `fingerprint` tells whether an array was written to, and `ThreadPool`
shares such work out over the physical cores. Nothing here knows of torch or Lightning. Without numba this package
still imports, but only `ThreadPool`, `physical_cores` and `available` can be used: `available()` is then False and
`IMPORT_ERROR` says why.
"""

from __future__ import annotations

import time
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
    "fingerprint",
    "physical_cores",
    "warm_up",
]

IMPORT_ERROR: Exception | None = None
"""Why the compiled kernels cannot be used; None when they can."""

try:
    from .adamw import adamw
    from .fingerprint import fingerprint
    from .gradients import accumulate
    from .moments import MOMENTS, Moments
except (ImportError, RuntimeError) as error:  # RuntimeError: numba finds no folder it may write its cache to
    IMPORT_ERROR = error


def available() -> bool:
    """Return whether the compiled kernels can be used."""
    return IMPORT_ERROR is None


def warm_up(*, host_gradients: bool = False, state_dtype: str = "float32") -> float:
    """Compile every kernel that a run meets, or load it from numba's cache, so that no step waits for it.

    Takes some seconds the first time on a machine, and a fraction of a second later.

    Args:
        host_gradients: Also what sums up gradients on the host; the step then reads its gradients from the sums.
        state_dtype: What the moments are kept in: "float32" or a key of `MOMENTS`.

    Returns:
        The seconds it took.
    """
    began = time.perf_counter()
    threads = ThreadPool(1)
    words, others = np.zeros((2, 1), np.uint16)
    param, values, sums, exp_avg, exp_avg_sq = np.zeros((5, 1), np.float32)
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    options |= {"decoupled": True, "step": 1, "threads": threads}
    moments = None if state_dtype == "float32" else MOMENTS[state_dtype](1)
    if moments is not None:
        for name in ("exp_avg", "exp_avg_sq"):
            moments.set(name, 0, moments.get(name, 0, 1))
    steps: list[tuple[Any, Any]] = [(words, words), (values, values)]
    sources: list[tuple[Any, Any]] = []
    if host_gradients:
        steps = [(sums, words), (others, words), (sums, values)]
        sources = [(sums, words), (sums, values), (others, words)]
    for gradient, weight in steps:
        if moments is not None:
            moments.step(param, gradient, weight, first=0, **options)
        else:
            adamw(param, gradient, weight, exp_avg, exp_avg_sq, **options)
    for total, gradient in sources:
        accumulate(total, gradient, store=True, threads=threads)
    fingerprint(words, threads=threads)
    return time.perf_counter() - began
