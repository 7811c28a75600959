"""Which masters and moments stay on the device, to be stepped there.

Whole parameters, the first in forward order: the device steps them at once, so the next forward can begin while the
host still steps the later ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_cpu_offload.offload.adam import is_fused

MASTER_BYTES, MOMENTS_BYTES = 4, 8


def resident_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, int]:
    """Bytes of the masters and moments of all parameters in these optimizers; more for one that several step."""
    counts = Counter(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return {p: p.numel() * (MASTER_BYTES + MOMENTS_BYTES * count) for p, count in counts.items()}


def choose(bytes_of: Mapping[Tensor, int], budget: float) -> set[Tensor]:
    """The first of the parameters that fit into the budget together; one that does not fit is passed over.

    Args:
        bytes_of: Bytes of masters and moments of parameters in forward order.
        budget: Bytes of the device for all of them.
    """
    chosen = set()
    for parameter, nbytes in bytes_of.items():
        if nbytes <= budget:
            chosen.add(parameter)
            budget -= nbytes
    return chosen


def require_adam(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that are not stepped on the device.

    Raises:
        ValueError: One is not Adam or AdamW, or has settings with which its own body steps.
    """
    for optimizer in optimizers:
        if not is_fused(optimizer):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: device_fraction and device_memory keep state on the device, "
                "where only torch.optim.AdamW and Adam without amsgrad and differentiable are stepped. Use one of "
                "them, or leave both options out."
            )
