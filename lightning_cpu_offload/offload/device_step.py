"""AdamW and Adam in torch operations: on the device for what is resident there, and on hosts without numba.

A resident chunk needs no transfers. Its gradient takes the place of its weight and becomes the new weight there, as in
a staging buffer of the host, and all of it is queued on the lane by which other weights return: whoever waits for
weights need not know where they were stepped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.moments import FloatMoments
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region, Source


@dataclass(frozen=True)
class Run:
    """Elements `start` to `stop` of a region make the same step, with these settings of `adamw`."""

    start: int
    stop: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class DeviceStep:
    """The step of one resident chunk, with all that it depends on as it was when the step began.

    Attributes:
        region: Whose chunk.
        chunk: Which one.
        sources: Its gradients.
        moments: Those of the region.
        runs: What is stepped.
        scratch: Room for the chunk in FP32; a vector that only steps on the same lane use.
    """

    region: Region
    chunk: Chunk
    sources: Sequence[Source]
    moments: FloatMoments
    runs: Sequence[Run]
    scratch: Tensor

    @property
    def reads(self) -> list[Tensor]:
        """What `run` only reads."""
        return [tensor.detach() for source in self.sources for tensor in source.tensors]

    @property
    def changes(self) -> list[Tensor]:
        """What `run` changes in place."""
        arenas = (self.region.master, self.moments.exp_avg, self.moments.exp_avg_sq)
        return [arena.flat(self.chunk.start, self.chunk.stop) for arena in arenas]

    @property
    def writes(self) -> list[Tensor]:
        """What `run` writes without having read it."""
        return [self.scratch, *(self.region.weights[run.start : run.stop] for run in self.runs)]

    def run(self) -> None:
        """Step, without any memory that is not there yet: a step must not fail half way."""
        weights, master = self.region.weights, self.region.master
        for source in self.sources:
            source.copy_to(weights[source.start : source.stop])
        for run in self.runs:
            weight = weights[run.start : run.stop]
            arenas = (master, self.moments.exp_avg, self.moments.exp_avg_sq)
            param, exp_avg, exp_avg_sq = (arena.flat(run.start, run.stop) for arena in arenas)
            scratch = self.scratch[: run.stop - run.start]
            adamw(param, weight, weight, exp_avg, exp_avg_sq, scratch=scratch, **run.settings)


def adamw(
    param: Tensor,
    gradient: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    scratch: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
) -> None:
    """What the host kernel computes.

    Args:
        param: Masters, float32[n].
        gradient: Gradients, [n].
        weight: Takes the updated weights, [n] of the device dtype; may be `gradient`.
        exp_avg: First moments, float32[n].
        exp_avg_sq: Second moments, float32[n].
        scratch: Overwritten, float32[n].
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Decay coefficient.
        decoupled: AdamW's decay of the weight; else Adam's decay through the gradient.
        step: Number of this step, from 1.
        grad_scale: Factor of the gradient.
    """
    wide = scratch.copy_(gradient)
    if grad_scale != 1:
        wide.mul_(grad_scale)
    if decoupled:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay:
        wide.add_(param, alpha=weight_decay)
    exp_avg.lerp_(wide, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    denominator = torch.sqrt(exp_avg_sq, out=scratch).div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    weight.copy_(param)
