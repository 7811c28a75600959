"""What happens when a gradient is not finite: the step is skipped or training ends, but never silently."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Literal

import torch
from torch import Tensor

from lightning_cpu_offload.offload.region import SMALL

_PACK = 128
"""Small tensors that are looked at together: a few megabytes at most."""

SKIPS_IN_A_ROW = 8
"""So many skipped steps one after the other are an error: the run has diverged."""


class Nonfinite:
    """The policy, and how often it was needed.

    Args:
        policy: `"skip"` leaves weights, moments and step counts as they are; `"raise"` ends training.

    Attributes:
        skipped: Steps skipped so far.
    """

    def __init__(self, policy: Literal["skip", "raise"]) -> None:
        self.skipped = 0
        self._policy = policy
        self._in_a_row = 0

    def judge(self, names: Sequence[str], step: int, begun: bool = False) -> None:
        """Hear of a step: it was made, or not, because of the gradients of the parameters named.

        Args:
            names: Of the parameters.
            step: Its number.
            begun: Some masters have been stepped all the same.

        Raises:
            FloatingPointError: The policy says so, or it was the last of many in a row.
        """
        if not names:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        what = f"step {step}: the gradient of {names[0]!r} is not finite"
        if len(names) > 1:
            what += f", nor are those of {len(names) - 1} more parameters"
        if begun:
            raise FloatingPointError(
                f"{what}. update='early' had begun the step: the masters are between two steps and are not saved, the "
                "last checkpoint stays. Resume from it."
            )
        if self._policy == "raise":
            raise FloatingPointError(
                f'{what}. Weights and optimizer state are those before the step. nonfinite="skip" goes on without it.'
            )
        if self._in_a_row >= SKIPS_IN_A_ROW:
            raise FloatingPointError(
                f"{what}, and so were gradients in the {self._in_a_row - 1} steps before it. Weights and optimizer "
                "state are those before these steps. Lower the learning rate, clip gradients, or look at the data."
            )
        warnings.warn(f"{what}; the step is skipped.", stacklevel=2)


@torch.no_grad()
def is_finite(gradients: Sequence[Tensor | None]) -> Tensor:
    """Whether all elements are finite: bool scalar on the device of the gradients; one read of them."""
    dense = (g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None)
    values = [value for value in dense if value.numel()]
    if not values:
        return torch.ones((), dtype=torch.bool)
    if values[0].device.type == "cpu":
        # torch's norms read one tensor after the other there, an infinity norm at a tenth of the memory's speed.
        extremes = [extreme for vector in _vectors(values) for extreme in vector.aminmax()]
        return torch.stack([extreme.isfinite() for extreme in extremes]).all()
    # The largest magnitude, which cannot overflow as a sum of squares would.
    return torch.nn.utils.get_total_norm(values, norm_type=float("inf")).isfinite()


def _vectors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors with the elements of these: large ones themselves, runs of small ones of one dtype as copies."""
    for (small, _), run in groupby(tensors, key=lambda tensor: (tensor.numel() < SMALL, tensor.dtype)):
        if not small:
            yield from run
            continue
        while pack := [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in islice(run, _PACK)]:
            yield torch.cat(pack)
