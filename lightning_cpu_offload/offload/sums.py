"""A region's sums of gradients on the host: FP32, or one BF16 gradient that is still as it came.

A sum has four bytes for an element, a gradient alone in it needs two: it is kept in the first half of its place, and
the step reads it from there. Its FP32 sum is neither written when it comes nor read when it is stepped. Whoever adds
to it or reads it has it widened first, to the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.bits import as_array
from lightning_cpu_offload.offload.memory import Arena

LEAST_KEPT = 1 << 18
"""Elements of the smallest piece that is kept as it came: it is stepped by a call of its own."""

BLOCK = 128
"""Kept pieces begin and end at multiples of so many elements, as 8-bit moments must be stepped by whole blocks."""

COPIED = 1 << 14
"""Elements that are copied aside to be widened into their own place."""


class Sums:
    """Sums of gradients, laid out as the masters are. Elements are counted in the region.

    Args:
        arena: Their place, FP32.
        threads: The pool for host work.
    """

    def __init__(self, arena: Arena, threads: ThreadPool) -> None:
        self._arena = arena
        self._threads = threads
        self._begins: list[int] = []  # of the pieces kept as they came, sorted
        self._ends: dict[int, int] = {}  # of each of them

    def begin(self, start: int, stop: int, gradient: Tensor, keep: bool) -> float:
        """Begin sums with a gradient, [stop - start]; return the sum of its squares.

        Args:
            start: First element.
            stop: One past the last.
            gradient: BF16 or FP32.
            keep: Leave it as it is, if it is BF16 and worth it: nothing is to be added to it.
        """
        for first, _ in self._kept(start, stop):
            self._forget(first)
        blocks = start % BLOCK == stop % BLOCK == 0
        if not (keep and blocks and stop - start >= LEAST_KEPT and gradient.dtype == torch.bfloat16):
            return self._accumulate(self._arena.flat(start, stop), gradient, store=True)
        insort(self._begins, start)
        self._ends[start] = stop
        return self._accumulate(self._as_it_came(start, stop), gradient, store=True)

    def add(self, start: int, stop: int, gradient: Tensor) -> float:
        """Add a gradient, BF16 or FP32, [stop - start], in FP32; return the sum of the squares of the sums."""
        return self._accumulate(self.total(start, stop), gradient, store=False)

    def total(self, start: int, stop: int) -> Tensor:
        """The sums of elements `start` to `stop` themselves, an FP32 vector."""
        for first, last in self._kept(start, stop):
            self._widen(first, last)
            self._forget(first)
        return self._arena.flat(start, stop)

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Cut elements `start` to `stop` into vectors, each with its first element and one past its last.

        What is kept as it came is BF16, all else FP32.
        """
        for first, last in self._kept(start, stop):
            if start < first:
                yield start, first, self._arena.flat(start, first)
            begin, end = max(start, first), min(stop, last)
            yield begin, end, self._as_it_came(first, last)[begin - first : end - first]
            start = end
        if start < stop:
            yield start, stop, self._arena.flat(start, stop)

    def _kept(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The kept pieces with elements from `start` to `stop`, in order."""
        position = max(0, bisect_right(self._begins, start) - 1)
        found = []
        while position < len(self._begins) and (first := self._begins[position]) < stop:
            if self._ends[first] > start:
                found.append((first, self._ends[first]))
            position += 1
        return found

    def _forget(self, first: int) -> None:
        self._begins.remove(first)
        del self._ends[first]

    def _as_it_came(self, start: int, stop: int) -> Tensor:
        return self._arena.flat(start, stop).view(torch.bfloat16)[: stop - start]

    def _widen(self, start: int, stop: int) -> None:
        """Last elements first: what is in the second half has its BF16 number elsewhere than its FP32 number."""
        kept, wide, end = self._as_it_came(start, stop), self._arena.flat(start, stop), stop - start
        while end > COPIED:
            middle = (end + 1) // 2
            wide[middle:end].copy_(kept[middle:end])
            end = middle
        wide[:end].copy_(kept[:end].clone())

    def _accumulate(self, total: Tensor, gradient: Tensor, store: bool) -> float:
        if kernels.available():
            return kernels.accumulate(as_array(total), as_array(gradient), store=store, threads=self._threads)
        total.copy_(gradient) if store else total.add_(gradient)
        return float(total.double().square().sum())
