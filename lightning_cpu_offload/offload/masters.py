"""Each converted tensor's truth on the host, and how the module sees it.

While the module is attached, a parameter keeps its identity but its data is a compute copy: BF16, on the device.
The value that counts is its master on the host. Three rules hold it together:

* what leaves the module through `state_dict` is the master;
* what enters it through `load_state_dict` reaches the master unrounded;
* what anybody else writes into the compute copy is adopted by the master before the master is used again. An
  element is adopted where it differs from what the master rounds to, so a value that was merely written back
  leaves the master alone; a tensor of higher precision put in place of the copy is adopted as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cpu_offload.offload.transfer import words


class Master:
    """One parameter or buffer of the module and its value on the host.

    Attributes:
        name: Qualified name in the module.
        tensor: The module's own object; its data is the compute copy while attached.
        host: The value that counts, on the CPU: FP32 for what is trained, the module's own tensor for the rest.
        view: The compute copy, on the device.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.host = tensor.detach().to("cpu")
        self.view = self.host
        self._dtype = tensor.dtype
        self._version = tensor._version

    def bind(self, view: Tensor) -> None:
        """Make `view` what the module computes with; its values must be those of the master."""
        self.view = view
        self.tensor.data = view
        self._version = self.tensor._version

    def replaced(self) -> bool:
        """Whether the module's data is no longer the compute copy but something put in its place."""
        data = self.tensor.data
        return data.data_ptr() != self.view.data_ptr() or data.dtype != self.view.dtype or data.shape != self.view.shape

    def written(self) -> bool:
        """Whether torch saw a write since the last `bind` or `adopt`; it does not see writes through `.data`."""
        return self.replaced() or self.tensor._version != self._version

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written into the compute copy, and bind the copy again if it was replaced."""
        data = self.tensor.data
        if data.shape != self.host.shape:
            raise RuntimeError(
                f"{self.name}: its data was replaced by a tensor of shape {tuple(data.shape)}, but the optimizer holds "
                f"one of {tuple(self.host.shape)}. Change shapes before training, or register a new parameter."
            )
        self.assign(data)
        if self.replaced():
            self.view.copy_(self.host)
            self.bind(self.view)
        self._version = self.tensor._version

    @torch.no_grad()
    def assign(self, value: Tensor) -> None:
        """Give the master a new value; where `value` is only its rounding, the master stays."""
        value = value.detach().to("cpu")
        if value.dtype == self.host.dtype or value.dtype != self.view.dtype:
            self.host.copy_(value)
            return
        differs = words(value) != words(self.host.to(value.dtype))
        self.host.copy_(torch.where(differs, value.to(self.host.dtype), self.host))

    def restore(self) -> None:
        """Give the module its value back in the dtype it came with; gradients of the compute copy are dropped."""
        self.tensor.grad = None
        self.tensor.data = self.host if self.host.dtype == self._dtype else self.host.to(self._dtype)


class Live:
    """A callable for hooks of the module that lives in this process, on this module, only.

    Modules, and with them their hooks, are copied and pickled by callbacks and users. A copy must not drag the
    masters along or write to them, so copies of this object do nothing.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; do nothing in a copy."""
        return self._function(*args, **kwargs) if self._function is not None else None

    def __reduce__(self) -> tuple[type[Live], tuple[()]]:
        return Live, ()


class StateDictHooks:
    """Routes `state_dict` and `load_state_dict` of the module, and of any part of it, through the masters.

    Args:
        module: The attached module.
        masters: Masters by the tensors they belong to; may grow.
    """

    def __init__(self, module: nn.Module, masters: dict[Tensor, Master]) -> None:
        self._masters = masters
        self._handles = []
        for owner in module.modules():
            if any(True for _ in _own_tensors(owner)):
                self._handles.append(owner.register_state_dict_post_hook(Live(self._on_save)))
                self._handles.append(owner.register_load_state_dict_pre_hook(Live(self._on_load)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _on_save(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in _own_tensors(owner):
            master, saved = self._masters.get(tensor), state_dict.get(prefix + name)
            # A module may save something else under the name, and `keep_vars=True` asks for the object itself.
            if master and saved is not None and saved is not tensor and saved.data_ptr() == tensor.data_ptr():
                master.adopt()
                state_dict[prefix + name] = master.host

    def _on_load(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
        for name, tensor in _own_tensors(owner):
            master, value = self._masters.get(tensor), state_dict.get(prefix + name)
            if master and isinstance(value, Tensor) and value.shape == master.host.shape:
                master.assign(value)


def _own_tensors(owner: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for named in (owner._parameters, owner._buffers):
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)
