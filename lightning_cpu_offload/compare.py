"""Whether a checkpoint fits the live module and optimizers, told before a single value is loaded.

`load_state_dict` copies what fits and complains of the rest afterwards, which leaves a mixture behind. Here names and
shapes are compared first. What only a module's own loading code can judge is left to that code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_cpu_offload.archive import BadCheckpointError

_LATER_OPTIONS = {
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov",
}  # fmt: skip
"""Options that torch's optimizers got over time and add to older groups by themselves."""

_ELEMENTWISE = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "sum",
}  # fmt: skip
"""State of torch's optimizers that has the shape of its parameter."""


def require_module_fits(state_dict: Mapping[str, Any], module: nn.Module, path: str, strict: bool) -> None:
    """Refuse weights of another architecture.

    Args:
        state_dict: What is about to be loaded into `module`.
        module: Untouched.
        path: The file the weights are from, for the message.
        strict: Whether every name must be on both sides.

    Raises:
        BadCheckpointError: Names the first parameter or buffer that does not fit.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return
    known = set()
    free = []
    for prefix, part, adapts in _parts(module):
        if adapts:
            free.append(prefix)
        for name, tensor in _saved_tensors(part):
            known.add(prefix + name)
            value = state_dict.get(prefix + name)
            if value is None and strict and not adapts:
                raise BadCheckpointError(f"{path}: lacks {prefix + name!r} of {_shape(tensor)}. {_ADVICE}")
            if isinstance(value, Tensor) and not _is_foreign(part) and not _fits(value, tensor):
                raise BadCheckpointError(
                    f"{path}: {prefix + name!r} is of {_shape(value)} in it and of {_shape(tensor)} here. {_ADVICE}"
                )
        known.add(f"{prefix}_extra_state")
    if strict:
        for name, value in state_dict.items():
            if name not in known and not any(name.startswith(prefix) for prefix in free):
                what = f" of {_shape(value)}" if isinstance(value, Tensor) else ""
                raise BadCheckpointError(f"{path}: holds {name!r}{what}, which is not here. {_ADVICE}")


def require_optimizers_fit(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[torch.optim.Optimizer], path: str
) -> None:
    """Refuse optimizer state that belongs to other optimizers, or to other parameters.

    Args:
        states: The checkpoint's `optimizer_states`, one for each optimizer.
        optimizers: Untouched.
        path: The file the state is from, for the message.

    Raises:
        BadCheckpointError: Names the first optimizer, group or state that does not fit.
    """
    if len(states) != len(optimizers):
        raise BadCheckpointError(
            f"{path}: holds state of {len(states)} optimizers, and there are {len(optimizers)} here. {_ADVICE}"
        )
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        where = f"{path}: optimizer {index} ({type(optimizer).__name__})"
        _require_groups_fit(state["param_groups"], optimizer, where)
        if type(optimizer).__module__.startswith("torch.optim"):
            _require_state_fits(state, optimizer, where)


_ADVICE = "Build the module and its optimizers as they were when it was saved, or fit without ckpt_path."


def _require_groups_fit(groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, where: str) -> None:
    own = optimizer.param_groups
    if len(groups) != len(own):
        raise BadCheckpointError(f"{where}: {len(groups)} parameter groups in it and {len(own)} here. {_ADVICE}")
    for index, (saved, group) in enumerate(zip(groups, own, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise BadCheckpointError(
                f"{where}: group {index} has {len(saved['params'])} parameters in it and {len(group['params'])} here. "
                f"{_ADVICE}"
            )


def _require_state_fits(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, where: str) -> None:
    for index, saved in enumerate(state["param_groups"]):
        missing = optimizer.defaults.keys() - saved.keys() - _LATER_OPTIONS
        if missing:
            raise BadCheckpointError(
                f"{where}: group {index} lacks {min(missing)!r}, so it is of an optimizer of another class. {_ADVICE}"
            )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [key for group in state["param_groups"] for key in group["params"]]
    for key, parameter in zip(ids, parameters, strict=True):
        for name, value in state["state"].get(key, {}).items():
            if name in _ELEMENTWISE and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise BadCheckpointError(
                    f"{where}: {name} of parameter {key} is of {_shape(value)} in it and the parameter of "
                    f"{_shape(parameter)} here. {_ADVICE}"
                )


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every part with its prefix, and whether its own or an outer part's code may rename, add or drop what it loads."""
    adapting: list[str] = []
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        own_code = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        if own_code or any(not _is_ours(hook) for hook in getattr(part, "_load_state_dict_pre_hooks", {}).values()):
            adapting.append(prefix)
        yield prefix, part, any(prefix.startswith(outer) for outer in adapting)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps what `register_load_state_dict_pre_hook` is given
    return type(function).__module__.startswith(__package__)


def _is_foreign(part: nn.Module) -> bool:
    """Whether shapes are its own affair; torch's own parts with loading code only fill in names."""
    loading: Any = type(part)._load_from_state_dict
    return not loading.__module__.startswith("torch.nn.modules") or _is_lazy_part(part)


def _is_lazy_part(part: nn.Module) -> bool:
    """Whether a part still waits for its shapes."""
    return any(is_lazy(tensor) for tensor in part._parameters.values() if tensor is not None)


def _saved_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor) for name, tensor in part._parameters.items() if tensor is not None)
    for name, buffer in part._buffers.items():
        if buffer is not None and name not in getattr(part, "_non_persistent_buffers_set", ()):
            yield name, buffer


def _fits(value: Tensor, tensor: Tensor) -> bool:
    return value.shape == tensor.shape or (tensor.ndim == 0 and value.shape == (1,))  # as torch 0.3 saved scalars


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
