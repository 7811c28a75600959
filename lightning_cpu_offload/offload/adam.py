"""Adam and AdamW as the user set them up: whether the kernel computes their step, and with which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_cpu_offload.offload.moments import moment_bytes

UNFUSED = ("amsgrad", "differentiable")
"""Options with which torch's own step is needed."""


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
    return is_adam(optimizer) and not any(group[name] for group in optimizer.param_groups for name in UNFUSED)


def state_bytes(optimizer: torch.optim.Optimizer, state_dtype: str = "float32") -> float:
    """Bytes on the host for each parameter besides its master: Adam's moments, else a gradient and about one moment."""
    if is_fused(optimizer):
        return moment_bytes(state_dtype)
    plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return 4 if plain else 8
