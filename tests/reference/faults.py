"""Wrong references: each has one fault that a comparison with correct training must notice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .loop import ReferenceLoop


class RoundedInitialMasters(ReferenceLoop):
    """Masters start from the BF16 weights."""

    def initial_master(self, parameter: Tensor) -> Tensor:
        return parameter.detach().bfloat16().float()


class ShortWindowDivisor(ReferenceLoop):
    """A short last window is averaged over its own length."""

    def loss_divisor(self, window_length: int) -> int:
        return window_length


class NoClipping(ReferenceLoop):
    """Gradients are never clipped."""

    def clip(self, weights: list[Tensor]) -> None:
        pass


class StaleWeight(ReferenceLoop):
    """One weight is left behind when the others become their masters."""

    def push(self) -> None:
        stale = next(self.network.parameters())
        kept = stale.detach().clone()
        super().push()
        stale.data.copy_(kept)


class MastersFollowWeights(ReferenceLoop):
    """Masters take over the rounding of their weights."""

    def push(self) -> None:
        super().push()
        for name, weight in self.network.named_parameters():
            self.masters[name].copy_(weight)


class WideGradientSums(ReferenceLoop):
    """Weights, and so their gradients, stay FP32; autocast still rounds the weights for the forward pass."""

    def device_dtype(self, owner: nn.Module, tensor: Tensor) -> torch.dtype:
        return tensor.dtype


FAULTS = [RoundedInitialMasters, ShortWindowDivisor, NoClipping, StaleWeight, MastersFollowWeights, WideGradientSums]
