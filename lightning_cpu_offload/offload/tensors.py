"""The parameters and buffers of a module, and what can be said of them before anything is made."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def tensors_of(module: nn.Module) -> Iterable[tuple[nn.Module, Tensor]]:
    """Every parameter and buffer once, with the module that owns it first."""
    seen = set()
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                yield owner, tensor


def names_of(module: nn.Module) -> Iterable[tuple[Tensor, str]]:
    """Every parameter and buffer with its qualified name."""
    for name, parameter in module.named_parameters():
        yield parameter, name
    for name, buffer in module.named_buffers():
        yield buffer, name


def require_initialised(module: nn.Module) -> None:
    """Raise ValueError for a parameter without a shape."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet, so it can have no master. "
                "Run the module once on a dummy batch, in configure_model for instance."
            )
