"""One element of Adam's step, shared by the kernels of every kind of state."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .jit import inlined

__all__ = ["Coefficients", "coefficients", "descend", "descend_by_products", "moments"]


class Coefficients(NamedTuple):
    """The scalars of one step, each computed in double precision and rounded to float32 once."""

    grad_scale: np.float32
    l2_factor: np.float32
    decay_factor: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    bias_correction2_sqrt: np.float32
    inverse_bias_correction2_sqrt: np.float32
    eps: np.float32
    step_size: np.float32
    decoupled: bool


def coefficients(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
) -> Coefficients:
    """Return what an element's step needs, see `kernels.adamw` for the arguments."""
    return Coefficients(
        grad_scale=np.float32(grad_scale),
        l2_factor=np.float32(weight_decay),
        decay_factor=np.float32(1 - lr * weight_decay),
        one_minus_beta1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        bias_correction2_sqrt=np.float32((1 - beta2**step) ** 0.5),
        inverse_bias_correction2_sqrt=np.float32((1 - beta2**step) ** -0.5),
        eps=np.float32(eps),
        step_size=np.float32(lr / (1 - beta1**step)),
        # Without weight decay the two are the same step; the decoupled one does not touch the gradient.
        decoupled=bool(decoupled or weight_decay == 0),
    )


@inlined
def moments(weight: Any, grad: Any, m: Any, v: Any, c: Any) -> Any:
    """Return the decayed weight and the new moments of one element."""
    grad = grad * c.grad_scale
    if c.decoupled:
        weight = weight * c.decay_factor
    else:
        grad = grad + c.l2_factor * weight
    if c.one_minus_beta1 < 0.5:  # torch.lerp, exact at both of its ends
        m = m + c.one_minus_beta1 * (grad - m)
    else:
        m = grad + (c.one_minus_beta1 - np.float32(1)) * (grad - m)
    v = v * c.beta2 + c.one_minus_beta2 * grad * grad
    return weight, m, v


@inlined
def descend(weight: Any, m: Any, v: Any, c: Any) -> Any:
    """Return the weight after a step of `step_size` along the first moment over the root of the second."""
    denom = math.sqrt(v) / c.bias_correction2_sqrt + c.eps
    return weight - c.step_size * m / denom


@inlined
def descend_by_products(weight: Any, m: Any, v: Any, c: Any) -> Any:
    """Return what `descend` does, with a product where it has a quotient: as much as a unit in the last place off."""
    denom = math.sqrt(v) * c.inverse_bias_correction2_sqrt + c.eps
    return weight - c.step_size * m / denom
