"""The arithmetic of the host step: numpy arrays in, numpy arrays out.

`adamw` updates FP32 masters and moments in one pass over memory, `fingerprint` tells whether an array was
written to, and `ThreadPool` shares such work out over the physical cores. Nothing here knows of torch or
Lightning. Without numba this package still imports, but only `ThreadPool`, `physical_cores` and `available`
can be used: `available()` is then False and `IMPORT_ERROR` says why.
"""

from __future__ import annotations

import numpy as np

from .threads import ThreadPool, physical_cores

__all__ = ["IMPORT_ERROR", "ThreadPool", "adamw", "available", "fingerprint", "physical_cores", "warm_up"]

IMPORT_ERROR: Exception | None = None
"""Why the compiled kernels cannot be used; None when they can."""

try:
    from .adamw import adamw
    from .fingerprint import fingerprint
except (ImportError, RuntimeError) as error:  # RuntimeError: numba finds no folder it may write its cache to
    IMPORT_ERROR = error


def available() -> bool:
    """Return whether the compiled kernels can be used."""
    return IMPORT_ERROR is None


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, so that the first step does not wait for it.

    Takes some seconds the first time on a machine, and a fraction of a second later.
    """
    threads = ThreadPool(1)
    param, exp_avg, exp_avg_sq = np.zeros((3, 1), np.float32)
    for plane in (np.zeros(1, np.uint16), np.zeros(1, np.float32)):
        adamw(
            param,
            plane,
            exp_avg,
            exp_avg_sq,
            lr=0.0,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            decoupled=True,
            step=1,
            threads=threads,
        )
    fingerprint(np.zeros(1, np.uint64), threads=threads)
