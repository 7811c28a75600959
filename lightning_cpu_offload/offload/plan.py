"""How the step's work is cut: pure arithmetic over sizes, no tensors.

Parameters that share an optimizer group and a device dtype lie end to end in one region. A region is cut into
chunks of equal size, whatever the borders of its parameters: a chunk is what one staging buffer holds, what one
transfer carries and what one kernel call updates. Chunks of all regions are stepped in forward order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one chunk.

    Attributes:
        index: Position of the parameter in its region.
        start: First element, counted in the region.
        stop: One past the last element, counted in the region.
        offset: First element, counted in the parameter.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of a region, and the pieces of parameters they are made of."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def offsets(numels: Sequence[int]) -> list[int]:
    """Where each parameter begins in its region, and last the size of the region."""
    result = [0]
    for numel in numels:
        result.append(result[-1] + numel)
    return result


def cut(numels: Sequence[int], chunk_numel: int) -> list[Chunk]:
    """Cut parameters laid end to end into chunks of `chunk_numel` elements, the last one shorter."""
    begins = offsets(numels)
    total = begins[-1]
    chunks = []
    first = 0
    for start in range(0, total, chunk_numel):
        stop = min(start + chunk_numel, total)
        while begins[first + 1] <= start:
            first += 1
        pieces = []
        index = first
        while index < len(numels) and begins[index] < stop:
            low, high = max(begins[index], start), min(begins[index + 1], stop)
            if low < high:
                pieces.append(Piece(index, low, high, low - begins[index]))
            index += 1
        chunks.append(Chunk(start, stop, tuple(pieces)))
    return chunks
