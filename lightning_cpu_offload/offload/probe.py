"""Refuses optimizers that cannot step host tensors, before training begins."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from lightning_cpu_offload import kernels
from lightning_cpu_offload.offload.adam import UNFUSED, is_fused

_DEVICE_WORDS = re.compile(r"cuda|gpu|xpu|hip|device|triton", re.IGNORECASE)


def require_host_step(optimizer: torch.optim.Optimizer) -> None:
    """Try one step of a stand-in over tiny host tensors.

    torch's own optimizers all run on the CPU. Of others, a failure that speaks of a device is taken for what it
    says; any other failure is left to show itself in the real step, where the user's parameters are at hand.

    Raises:
        ValueError: The optimizer runs on an accelerator only, or its `step` cannot be hooked.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks") or not getattr(type(optimizer).step, "hooked", False):
        raise ValueError(
            f"optimizer={_name(optimizer)}: its step does not run torch's optimizer hooks, by which the host steps. "
            "Call torch.optim.Optimizer.__init__ in its constructor, or use a torch optimizer."
        )
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            type(optimizer).step(_stand_in(optimizer), lambda: 0.0)
    except (AttributeError, KeyError, TypeError):
        return  # the stand-in is too simple for it
    except Exception as error:
        if isinstance(error, AssertionError) or _DEVICE_WORDS.search(str(error)):
            raise ValueError(
                f"optimizer={_name(optimizer)}: it cannot step parameters in host memory "
                f"({error or 'assertion failed'}). Use one that runs on the CPU, such as torch.optim.AdamW, or "
                "strategy='auto' to keep the state on the device."
            ) from error


def require_reducible(optimizer: torch.optim.Optimizer, state_dtype: str) -> None:
    """Refuse an optimizer whose state only its own step, in FP32, can make.

    Args:
        optimizer: The user's object.
        state_dtype: What its state is to be held in.

    Raises:
        ValueError: It is not one that the kernel steps, or there is no kernel.
    """
    if state_dtype == "float32":
        return
    if not is_fused(optimizer):
        options = [name for name in UNFUSED if any(group.get(name) for group in optimizer.param_groups)]
        raise ValueError(
            f"state_dtype={state_dtype!r}: for torch.optim.AdamW and Adam without {' and '.join(UNFUSED)}, and this "
            f"is {', '.join([type(optimizer).__name__, *options])}. Use one of those, or state_dtype='float32'."
        )
    if not kernels.available():
        raise ValueError(
            f"state_dtype={state_dtype!r}: needs the compiled kernels, which cannot be used ({kernels.IMPORT_ERROR}). "
            "Install numba, or use state_dtype='float32'."
        )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}"


def _stand_in(optimizer: torch.optim.Optimizer) -> Any:
    """A copy with the same settings over tensors of the same number of dimensions, two elements along each."""
    stand_in = type(optimizer).__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [
        {**group, "params": [_tiny(parameter) for parameter in group["params"][:1]]} for group in optimizer.param_groups
    ]
    return stand_in


def _tiny(parameter: torch.Tensor) -> torch.nn.Parameter:
    tiny = torch.nn.Parameter(torch.ones((2,) * parameter.ndim))
    tiny.grad = torch.zeros_like(tiny)
    return tiny
