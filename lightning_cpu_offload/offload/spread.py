"""Arithmetic of host memory that is spread over several ranks: which part of it is whose.

Each rank maps all of an arena, so that places and views are the same everywhere, and uses the pages of its own parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Where the elements of a region lie in an arena.

    Attributes:
        itemsize: Bytes of one entry.
        block: Elements of the region that share one entry.
        planes: How many entries an element has, each in a vector of its own.
    """

    itemsize: int = 4
    block: int = 1
    planes: int = 1

    def spans(self, start: int, stop: int, numel: int) -> Iterator[Span]:
        """Bytes from and to which the entries of elements `start` to `stop` lie, of `numel` elements in all."""
        plane = math.ceil(numel / self.block) * self.itemsize
        for base in range(0, self.planes * plane, plane):
            yield base + start // self.block * self.itemsize, base + math.ceil(stop / self.block) * self.itemsize


FLOATS = Layout()


@dataclass(frozen=True)
class Spread:
    """Whose the elements of a region are.

    Attributes:
        parts: Elements from and to, and their owner, in order and without gaps.
        rank: Who we are.
    """

    parts: tuple[tuple[int, int, int], ...]
    rank: int

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.parts[-1][1] if self.parts else 0

    def owned(self) -> Iterator[Span]:
        """What this rank keeps."""
        return ((start, stop) for start, stop, owner in self.parts if owner == self.rank)

    def gaps(self) -> Iterator[Span]:
        """What it does not, neighbours joined."""
        for mine, run in groupby(self.parts, key=lambda part: part[2] == self.rank):
            if not mine:
                joined = list(run)
                yield joined[0][0], joined[-1][1]

    def among(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of elements `start` to `stop`, with their owners."""
        for first, last, owner in self.parts:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, owner

    def missing(self, start: int, stop: int) -> Iterator[Span]:
        """What of elements `start` to `stop` other ranks keep."""
        return ((low, high) for low, high, owner in self.among(start, stop) if owner != self.rank)
