"""Each converted tensor's truth on the host, and how the module sees it.

While the module is attached, a parameter keeps its identity but its data is a compute copy: BF16, on the device.
The value that counts is its master on the host. Three rules hold it together:

* what leaves the module through `state_dict` is the master, with what others wrote into the copy since the last step;
* what enters it through `load_state_dict` reaches the master unrounded;
* what others wrote into the copy is adopted by the master when the next step begins, and not before: a value that was
  exchanged and put back leaves no trace. An element is adopted where it differs from what the master rounds to; a
  tensor of higher precision put in place of the copy is adopted as a whole.
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
        ahead: The host was stepped, and its new value is not yet in the compute copy.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.host = tensor.data.to("cpu")
        self.view = self.host
        self.ahead = False
        self._cast: Tensor | None = None
        self._uncast = self.host
        self._dtype = tensor.dtype
        self.settle()

    def bind(self, view: Tensor) -> None:
        """Make `view` what the module computes with; its values must be those of the master."""
        self.view = view
        self.tensor.data = view
        self.settle()

    def settle(self) -> None:
        """Master and compute copy agree as they are now: only later writes are news."""
        self.ahead = False
        self._cast = None
        self._version = self.tensor._version
        self._host_version = self.host._version

    def replaced(self) -> bool:
        """Whether the module's data is no longer the compute copy but something put in its place."""
        data = self.tensor.data
        return data.data_ptr() != self.view.data_ptr() or data.dtype != self.view.dtype or data.shape != self.view.shape

    def written(self) -> bool:
        """Whether torch saw a write to either side; it does not see writes through `.data`."""
        return self._host_leads() or self.tensor._version != self._version or self.replaced()

    def cast_replacement(self) -> None:
        """Let the module compute with FP32 data that was put in the copy's place; uncast, the data still counts.

        Both the copy and the data stay as they are: whoever exchanged them may put the copy back.
        """
        if self.tensor.dtype != self.view.dtype:
            self._uncast = self.tensor.data
            self._cast = self._uncast.to(self.view.dtype)
            self.tensor.data = self._cast
            self._version = self.tensor._version

    @torch.no_grad()
    def current(self) -> Tensor:
        """The value as it counts now, on the host: the master itself, or a new tensor where others wrote."""
        data = self._data()
        if self._host_leads() or data.shape != self.host.shape:
            return self.host
        value = data.to("cpu")
        if value.dtype == self.view.dtype != self.host.dtype:
            differs = words(value) != words(self.host.to(value.dtype))
            return torch.where(differs, value.to(self.host.dtype), self.host) if differs.any() else self.host
        value = value.to(self.host.dtype)
        return self.host if torch.equal(words(value), words(self.host)) else value

    @torch.no_grad()
    def adopt(self) -> None:
        """Make both sides agree: the master takes over what others wrote, or the copy what only the host has."""
        data = self.tensor.data
        if data.shape != self.host.shape:
            raise RuntimeError(
                f"{self.name}: its data was replaced by a tensor of shape {tuple(data.shape)}, but the optimizer holds "
                f"one of {tuple(self.host.shape)}. Change shapes before training, or register a new parameter."
            )
        value = self.current()
        if value is not self.host:
            self.host.copy_(value)
        if self._host_leads() or self.replaced():
            self.view.copy_(self.host)
        self.bind(self.view)

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        """Take over a value on its way into the module; where it is only the master's rounding, the master stays."""
        value = value.detach().to("cpu")
        if value.dtype == self.view.dtype != self.host.dtype:
            differs = words(value) != words(self.host.to(value.dtype))
            value = torch.where(differs, value.to(self.host.dtype), self.host)
        self.host.copy_(value)
        self._host_version = self.host._version

    def restore(self) -> None:
        """Give the module its value back in the dtype it came with; gradients of the compute copy are dropped."""
        self.tensor.grad = None
        self.tensor.data = self.host if self.host.dtype == self._dtype else self.host.to(self._dtype)

    def _data(self) -> Tensor:
        data = self.tensor.data
        is_cast = self._cast is not None and data.data_ptr() == self._cast.data_ptr()
        return self._uncast if is_cast and self.tensor._version == self._version else data

    def _host_leads(self) -> bool:
        # The version moves when someone writes into a tensor that `state_dict` returned: in a plain run, the weight.
        return self.ahead or self.host._version != self._host_version


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
        self._module = module
        self._masters = masters
        self._dtypes = {(owner, name): tensor.dtype for owner, name, tensor in _named_tensors(module)}
        self._handles = []
        for owner in module.modules():
            self._handles.append(owner.register_state_dict_post_hook(Live(self._on_save)))
            self._handles.append(owner.register_load_state_dict_pre_hook(Live(self._on_load)))

    def remove(self) -> None:
        """Take the hooks off; tensors made in the compute dtype during training become what a plain run has."""
        for handle in self._handles:
            handle.remove()
        for owner, name, tensor in _named_tensors(self._module):
            if tensor not in self._masters and self._made_in_compute_dtype(owner, name, tensor):
                tensor.data = tensor.data.float()

    def _on_save(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in _own_tensors(owner):
            saved = state_dict.get(prefix + name)
            # A module may save something else under the name, and `keep_vars=True` asks for the object itself.
            if saved is None or saved is tensor or saved.data_ptr() != tensor.data_ptr():
                continue
            if tensor in self._masters:
                state_dict[prefix + name] = self._masters[tensor].current()
            elif self._made_in_compute_dtype(owner, name, tensor):
                state_dict[prefix + name] = saved.float()

    def _on_load(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
        for name, tensor in _own_tensors(owner):
            master, value = self._masters.get(tensor), state_dict.get(prefix + name)
            if master and isinstance(value, Tensor) and value.shape == master.host.shape:
                master.load(value)

    def _made_in_compute_dtype(self, owner: nn.Module, name: str, tensor: Tensor) -> bool:
        """Whether it came during training, made of BF16 weights: a pruning mask, a buffer assigned anew."""
        return tensor.dtype == torch.bfloat16 and self._dtypes.get((owner, name), torch.float32) == torch.float32


def _own_tensors(owner: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for named in (owner._parameters, owner._buffers):
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)


def _named_tensors(module: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        yield from ((owner, name, tensor) for name, tensor in _own_tensors(owner))
