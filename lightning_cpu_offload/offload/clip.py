"""Clipping of gradients that are on the host, as torch clips those on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """What is to be done to the gradients of one step.

    Attributes:
        max_norm: Largest L2 norm of all of them together; None: no limit. See `torch.nn.utils.clip_grad_norm_`.
        max_value: Largest magnitude of an element; None: no limit. See `torch.nn.utils.clip_grad_value_`.
        scale: Factor of each element.
    """

    max_norm: float | None = None
    max_value: float | None = None
    scale: float = 1.0

    def with_norm(self, norm: float) -> Clip:
        """The factor, now that the norm is known."""
        if self.max_norm is None:
            return self
        return replace(self, scale=min(1.0, self.max_norm / (norm + 1e-6)))

    @property
    def changes(self) -> bool:
        """Whether it does anything."""
        return self.scale != 1.0 or self.max_value is not None

    def apply(self, gradients: Tensor) -> None:
        """Clip gradients on the host in place."""
        if self.scale != 1.0:
            gradients.mul_(self.scale)
        if self.max_value is not None:
            gradients.clamp_(-self.max_value, self.max_value)
