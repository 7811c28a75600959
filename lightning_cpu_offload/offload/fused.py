"""AdamW and Adam in one pass over memory, through the host kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import words

Due = tuple[int, int]
"""The step a parameter is about to make: its number, from 1, and the index of its parameter group."""


@dataclass(frozen=True)
class Hyperparameters:
    """One parameter group's settings at one step, as plain numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Read a group; it is read anew at each step because schedulers and users change it."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
            grad_scale=-1.0 if group["maximize"] else 1.0,
        )


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torch's own Adam or AdamW; a subclass may step differently."""
    return type(optimizer) in (torch.optim.AdamW, torch.optim.Adam)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel computes what this optimizer's own step would, with the settings it has now."""
    return is_adam(optimizer) and not any(
        group["amsgrad"] or group["differentiable"] for group in optimizer.param_groups
    )


class FusedAdamW:
    """The host's part of a step: gradients become weights, chunk by chunk.

    The state stays in torch's form: `optimizer.state[parameter]` holds `step`, `exp_avg` and `exp_avg_sq`, the
    latter two being views of the arenas that the kernel works on.

    Args:
        optimizer: The user's AdamW or Adam.
        regions: Everything it steps; the caller adds regions as parameters are added.
        threads: The pool the kernel runs on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, regions: list[Region], threads: ThreadPool) -> None:
        self._optimizer = optimizer
        self._regions = regions
        self._threads = threads
        self._views: dict[Region, dict[int, tuple[Tensor, Tensor]]] = {}
        self._settings: list[Hyperparameters] = []
        self._due: dict[Region, list[Due | None]] = {}

    def begin(self) -> None:
        """Count the step of every parameter that has a gradient and read the settings of every group."""
        groups = self._optimizer.param_groups
        self._settings = [Hyperparameters.of(self._optimizer, group) for group in groups]
        # Asked anew each time: users move parameters between groups and take them out.
        group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
        for region in self._regions:
            region.allocate_moments()
            self._due[region] = [
                self._count(region, index, group_of.get(master.tensor)) for index, master in enumerate(region.masters)
            ]

    def work(self, region: Region, chunk: Chunk, staged: Tensor) -> Sequence[tuple[int, int]]:
        """Step one chunk in place: staged gradients in, staged weights out."""
        ranges = []
        for start, stop, due in self._runs(region, chunk):
            self._step(region, start, stop, due, staged[start - chunk.start : stop - chunk.start])
            ranges.append((start, stop))
        return ranges

    def adopt_state(self) -> None:
        """Take state that was loaded into the optimizer, in ordinary tensors, into the arenas."""
        for region in self._regions:
            for index, master in enumerate(region.masters):
                state = self._optimizer.state.get(master.tensor)
                if state:
                    self._attach(region, index, state)

    def _count(self, region: Region, index: int, group: int | None) -> Due | None:
        """The step about to be made for a parameter, None if it has no gradient or has left the optimizer."""
        tensor = region.masters[index].tensor
        if tensor.grad is None or group is None:
            return None
        if tensor.grad.is_sparse:
            raise RuntimeError(
                f"{region.masters[index].name}: {type(self._optimizer).__name__} does not support sparse gradients. "
                "Use torch.optim.SparseAdam for it, or build the embedding with sparse=False."
            )
        state = self._optimizer.state[tensor]
        if not state:
            state["step"] = torch.tensor(0.0)
        exp_avg, exp_avg_sq = self._view(region, index)
        if state.get("exp_avg") is not exp_avg or state.get("exp_avg_sq") is not exp_avg_sq:
            self._attach(region, index, state)
        state["step"] += 1
        return int(state["step"].item()), group

    def _view(self, region: Region, index: int) -> tuple[Tensor, Tensor]:
        views = self._views.setdefault(region, {})
        if index not in views:
            region.allocate_moments()
            assert region.exp_avg is not None
            assert region.exp_avg_sq is not None
            views[index] = region.view(region.exp_avg, index), region.view(region.exp_avg_sq, index)
        return views[index]

    def _attach(self, region: Region, index: int, state: dict[str, Any]) -> None:
        """Make a parameter's state live in the arenas, with the values it has, or zeros."""
        for name, view in zip(("exp_avg", "exp_avg_sq"), self._view(region, index), strict=True):
            if name not in state:
                view.zero_()
            elif state[name] is not view:
                view.copy_(state[name])
            state[name] = view
        step = state["step"]
        state["step"] = step.to("cpu", torch.float32) if isinstance(step, Tensor) else torch.tensor(float(step))

    def _runs(self, region: Region, chunk: Chunk) -> Iterator[tuple[int, int, Due]]:
        """Neighbouring pieces that make the same step with the same settings, joined."""
        for due, pieces in groupby(chunk.pieces, key=lambda piece: self._due[region][piece.index]):
            if due is not None:
                joined = list(pieces)
                yield joined[0].start, joined[-1].stop, due

    def _step(self, region: Region, start: int, stop: int, due: Due, staged: Tensor) -> None:
        assert region.exp_avg is not None
        assert region.exp_avg_sq is not None
        step, group = due
        settings = vars(self._settings[group])
        if kernels.available():
            kernels.adamw(
                region.master.array[start:stop],
                _plane(staged),
                region.exp_avg.array[start:stop],
                region.exp_avg_sq.array[start:stop],
                step=step,
                threads=self._threads,
                **settings,
            )
        else:
            adamw(
                region.master.flat(start, stop),
                staged,
                region.exp_avg.flat(start, stop),
                region.exp_avg_sq.flat(start, stop),
                step=step,
                **settings,
            )


def _plane(staged: Tensor) -> np.ndarray:
    return staged.numpy() if staged.dtype == torch.float32 else words(staged).numpy().view(np.uint16)


def adamw(
    param: Tensor,
    plane: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
) -> None:
    """What the kernel computes, in torch operations, for machines without numba.

    Args:
        param: Masters, float32[n].
        plane: Gradients on entry, updated weights on exit, [n] of the device dtype.
        exp_avg: First moments, float32[n].
        exp_avg_sq: Second moments, float32[n].
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Decay coefficient.
        decoupled: AdamW's decay of the weight; else Adam's decay through the gradient.
        step: Number of this step, from 1.
        grad_scale: Factor of the gradient.
    """
    gradient = plane.float() * grad_scale
    if decoupled:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay:
        gradient.add_(param, alpha=weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    plane.copy_(param)
