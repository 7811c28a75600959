"""How the kernels are compiled: without Python's lock, kept on disk, and told that arrays do not overlap.

Where several arrays are written, LLVM would otherwise guard a vectorized loop by a comparison of every pair of
addresses, and give up vectorizing when there are many.
"""

from __future__ import annotations

from numba import njit
from numba.core.compiler import CompilerBase, DefaultPassBuilder

__all__ = ["inlined", "kernel"]


class _WithoutOverlap(CompilerBase):
    """numba's compiler, with every array argument marked `noalias`."""

    def define_pipelines(self) -> list[object]:
        self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


kernel = njit(nogil=True, cache=True, error_model="numpy", pipeline_class=_WithoutOverlap)
"""Decorates a function over arrays that do not overlap; it is compiled when it first meets a combination of types."""

inlined = njit(error_model="numpy")
"""Decorates a function of a few operations that kernels call; LLVM inlines it."""
