"""What a caching allocator reserves for a given course of allocations: a model of CUDA's in torch, default settings.

Requests of up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, and larger ones get segments of
their own, rounded up to 2 MiB. The smallest free block that suffices is taken and what is left of it split off;
neighbouring free blocks are joined. (c10/cuda/CUDACachingAllocator.cpp.)
"""

from __future__ import annotations

from collections.abc import Iterable

SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE = 10 << 20
LARGE_SEGMENT = 20 << 20
ROUND_LARGE = 2 << 20
SMALLEST_REST = 512


class _Block:
    def __init__(self, size: int, small: bool) -> None:
        self.size, self.small = size, small
        self.used = False
        self.before: _Block | None = None
        self.after: _Block | None = None


def reserved_peak(trace: Iterable[tuple[int, int]]) -> int:
    """Replay allocations and return the most bytes ever reserved.

    Args:
        trace: For each allocation a number and its bytes; for each release the number again and minus the bytes.
    """
    reserved = 0
    free: dict[bool, list[_Block]] = {True: [], False: []}
    used: dict[int, _Block] = {}
    for number, nbytes in trace:
        if nbytes < 0:
            _release(used.pop(number), free)
            continue
        small = nbytes <= SMALL
        fitting = [block for block in free[small] if block.size >= nbytes]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            free[small].remove(block)
        else:
            block = _Block(_segment(nbytes), small)
            reserved += block.size
        _split(block, nbytes, free)
        block.used = True
        used[number] = block
    return reserved


def _segment(nbytes: int) -> int:
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < LARGE else -(-nbytes // ROUND_LARGE) * ROUND_LARGE


def _split(block: _Block, nbytes: int, free: dict[bool, list[_Block]]) -> None:
    rest = block.size - nbytes
    if rest < SMALLEST_REST if block.small else rest <= SMALL:
        return
    tail = _Block(rest, block.small)
    tail.before, tail.after = block, block.after
    if block.after is not None:
        block.after.before = tail
    block.after = tail
    block.size = nbytes
    free[block.small].append(tail)


def _release(block: _Block, free: dict[bool, list[_Block]]) -> None:
    block.used = False
    after, before = block.after, block.before
    if after is not None and not after.used:
        free[block.small].remove(after)
        _join(block, after)
    if before is not None and not before.used:
        free[block.small].remove(before)
        _join(before, block)
        block = before
    free[block.small].append(block)


def _join(first: _Block, second: _Block) -> None:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
