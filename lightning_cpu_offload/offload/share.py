"""The part of a master that this rank owns."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_cpu_offload.offload.memory import HostArena
from lightning_cpu_offload.offload.partition import ELSEWHERE, Partition
from lightning_cpu_offload.offload.spread import Span


class Share:
    """The part of a parameter's master that this rank owns, and how the rest is made up for.

    Where a master is compared with its compute copy, or written to, what others own takes for that time the values of
    the copy, to which it was rounded: so the same code serves masters that are all here.

    Args:
        arena: The masters of its region.
        partition: The ranks.
        weights: The region's compute copies, on the device.
        place: From which element of the region to which the parameter lies.
    """

    def __init__(self, arena: HostArena, partition: Partition, weights: Tensor, place: Span) -> None:
        assert arena.spread is not None
        self._arena = arena
        self._partition = partition
        self._weights = weights
        self._place = place
        self._missing = list(arena.spread.missing(*place))
        self._made_up = False

    @contextmanager
    def made_up(self) -> Generator[None, None, None]:
        """Meanwhile what others own has the values of the compute copy."""
        if self._made_up or self._arena.whole:
            yield
            return
        self._made_up = True
        self.make_up()
        try:
            yield
        finally:
            self._made_up = False
            self._arena.release(*self._place)

    @torch.no_grad()
    def make_up(self) -> None:
        """Give what others own the values of the compute copy."""
        for start, stop in self._missing:
            self._arena.flat(start, stop).copy_(self._weights[start:stop])

    @property
    def deferring(self) -> bool:
        """Whether the master is to be read when it is saved, and not before."""
        return self._partition.deferring

    def require_here(self, what: str) -> None:
        """Raise RuntimeError if only saving may read the master."""
        if not self._arena.whole:
            raise RuntimeError(f"{what}: {ELSEWHERE}")

    def fetch(self) -> None:
        """On rank 0, while it writes: bring the parts of others here."""
        self._partition.fetch([self._arena], *self._place)

    def release(self) -> None:
        """Give them back."""
        self._arena.release(*self._place)
