"""What is to be trained: the module's optimizers, which parameters they step, and what state they keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cpu_offload.estimate.fakes import DtypeRule, WorstCase, without_trainer
from lightning_cpu_offload.estimate.work import Unit
from lightning_cpu_offload.offload.adam import is_fused
from lightning_cpu_offload.offload.resident import resident_bytes

ADAM_STATE_BYTES = 8


@dataclass(frozen=True)
class Subject:
    """A module as its optimizers see it.

    Attributes:
        optimizers: How many there are.
        group_of: For each stepped parameter, by identity, its group over all optimizers.
        parameters: The stepped parameters in forward order, with their names and owners.
        state_bytes: Bytes of optimizer state in FP32.
        bytes_of: What each stepped parameter's master and Adam's moments take, in forward order.
        fused: Whether the one-pass kernel steps all of them.
        note: What could not be found out, if anything.
    """

    optimizers: int
    group_of: dict[int, int]
    parameters: tuple[tuple[str, Tensor, nn.Module], ...]
    state_bytes: int
    bytes_of: dict[Tensor, int]
    fused: bool
    note: str = ""

    @property
    def numel(self) -> int:
        """Parameters that are stepped."""
        return sum(parameter.numel() for _, parameter, _ in self.parameters)

    def units(self, rule: DtypeRule, flops: dict[str, float]) -> tuple[Unit, ...]:
        """The parameters as the time model takes them, given each one's operations."""
        return tuple(
            Unit(
                parameter.numel(),
                flops.get(name, 0.0),
                rule(owner, parameter, False).itemsize,
                self.group_of[id(parameter)],
            )
            for name, parameter, owner in self.parameters
        )


def subject(module: Any) -> Subject:
    """Ask the module for its optimizers; one that cannot say is taken to have one AdamW over all it trains."""
    note = ""
    try:
        with without_trainer(module, optimizers=1):
            optimizers = list(_optimizers(module.configure_optimizers()))
    except Exception as error:  # whatever a module does there
        first_line = str(error).split("\n")[0]
        note = f"configure_optimizers: {type(error).__name__}: {first_line}; AdamW over all parameters is assumed"
        optimizers = []
    if not optimizers:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizers = [torch.optim.AdamW(trained)] if trained else []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    parameters = tuple(
        (name, parameter, owner)
        for name, parameter, owner in _owned(module)
        if id(parameter) in group_of and parameter.requires_grad
    )
    held = resident_bytes(optimizers)
    return Subject(
        optimizers=len(optimizers),
        group_of=group_of,
        parameters=parameters,
        state_bytes=sum(_state_bytes(optimizer) for optimizer in optimizers),
        bytes_of={parameter: held[parameter] for _, parameter, _ in parameters},
        fused=all(is_fused(optimizer) for optimizer in optimizers),
        note=note,
    )


def _owned(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    seen = set()
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, owner


def _optimizers(configured: Any) -> Iterator[torch.optim.Optimizer]:
    """All optimizers in whatever form `configure_optimizers` may return them."""
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _optimizers(item)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """FP32 bytes that one step of the optimizer leaves behind, found by a step on fakes."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if is_fused(optimizer):
        return sum(ADAM_STATE_BYTES * parameter.numel() for parameter in trained)
    lists = [list(group["params"]) for group in optimizer.param_groups]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        with FakeTensorMode(), WorstCase():
            for group in optimizer.param_groups:
                group["params"][:] = [_stepped(parameter) for parameter in group["params"] if parameter.requires_grad]
            optimizer.step()
            tensors = [value for kept in optimizer.state.values() for value in kept.values()]
            return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim)
    except Exception:
        return sum(ADAM_STATE_BYTES * parameter.numel() for parameter in trained)  # as much as Adam's: seldom less
    finally:
        optimizer.state = state
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"][:] = parameters


def _stepped(parameter: Tensor) -> nn.Parameter:
    fake = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu"))
    fake.grad = torch.empty_like(fake)
    return fake
