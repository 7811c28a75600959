"""What data-parallel training computes, in one process and plain torch: each rank's gradients, and their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference import ReferenceLoop


def batches_of_ranks(batches: Sequence[Any], num_ranks: int) -> list[list[Any]]:
    """For each step of the loop the batch of every rank, as torch's DistributedSampler deals them without shuffling."""
    short = -len(batches) % num_ranks
    dealt = [*batches, *batches[:short]]
    return [dealt[first : first + num_ranks] for first in range(0, len(dealt), num_ranks)]


class RanksLoop(ReferenceLoop):
    """Each batch is a list, one for each rank; gradients are summed up for each of them, and their mean is stepped.

    Losses come rank after rank.
    """

    num_ranks = 2

    def zero_grad(self) -> None:
        """Begins a window."""
        super().zero_grad()
        self.sums: list[dict[str, Tensor | None]] = [{} for _ in range(self.num_ranks)]

    def backward(self, batch: Any, divisor: int) -> None:
        """Adds the gradients of one batch of every rank."""
        for sums, own in zip(self.sums, batch, strict=True):
            for name, weight in self.network.named_parameters():
                weight.grad = sums.get(name)
            super().backward(own, divisor)
            for name, weight in self.network.named_parameters():
                sums[name], weight.grad = weight.grad, None

    def collect_gradients(self) -> None:
        """The mean, in the dtype in which gradients are reduced."""
        for name, weight in self.network.named_parameters():
            weight.grad = self.mean(name, [sums[name] for sums in self.sums])
        super().collect_gradients()

    def mean(self, name: str, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """As DDP takes it: divided first, then added up; a rank without a gradient counts as zero."""
        there = [gradient / self.num_ranks for gradient in gradients if gradient is not None]
        return sum(there[1:], start=there[0]) if there else None


class RecordedMean(RanksLoop):
    """Goes on from the mean that was recorded, after judging it: a sum of more than two has no order.

    Each of N additions rounds the sum by at most half a unit in its last place, and so does the division.
    """

    recorded: Iterator[dict[str, Tensor]]

    def collect_gradients(self) -> None:
        """Takes the next step's."""
        self.now = next(self.recorded)
        super().collect_gradients()

    def mean(self, name: str, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The recorded one."""
        there = [gradient for gradient in gradients if gradient is not None]
        recorded = self.now.get(name)
        assert (recorded is None) == (not there), name
        if recorded is None:
            return None
        stacked = torch.stack(there).double() / self.num_ranks
        tolerance = self.num_ranks * torch.finfo(recorded.dtype).eps * stacked.abs().sum(0)
        assert ((recorded.double() - stacked.sum(0)).abs() <= tolerance).all(), name
        return recorded.clone()


class SumsRanks(RanksLoop):
    """A wrong one: does not divide."""

    def mean(self, name: str, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The sum."""
        mean = super().mean(name, gradients)
        return None if mean is None else mean * self.num_ranks


class FirstRankOnly(RanksLoop):
    """A wrong one: the other ranks' batches are lost."""

    def mean(self, name: str, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The first rank's."""
        return None if gradients[0] is None else torch.clone(gradients[0])
