"""Each converted tensor's truth on the host, and how the module sees it.

While the module is attached, a parameter keeps its identity but its data is a compute copy: BF16, on the device.
The value that counts is its master on the host. Three rules hold it together:

* what leaves the module through `state_dict` is the master, with what others wrote into the copy since the last step;
* what enters it through `load_state_dict` reaches the master unrounded;
* what others wrote into the copy is adopted by the master when the next step begins, and not before: a value that was
  exchanged and put back leaves no trace. An element is adopted where it differs from what the master rounds to; a
  tensor of higher precision put in place of the copy is adopted as a whole.

Some masters are resident: they stay on the device and are stepped there. What leaves the module is then a copy, and
what is written into that copy before the next step counts as well.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cpu_offload.offload.bits import words
from lightning_cpu_offload.offload.deferred import DeferredTensor
from lightning_cpu_offload.offload.mapped import take
from lightning_cpu_offload.offload.share import Share

_SLICE_NUMEL = 4 << 20
"""Elements compared at a time, so that reading the masters takes next to no memory."""


class Standing:
    """What masters that are stepped together have in common.

    Attributes:
        ahead: The host was stepped, and the new values are not yet in the compute copies.
    """

    def __init__(self) -> None:
        self.ahead = False


class Master:
    """One parameter or buffer of the module and its value on the host.

    Attributes:
        name: Qualified name in the module.
        tensor: The module's own object; its data is the compute copy while attached.
        host: The value that counts: FP32 for what is trained, the module's own tensor for the rest. On the CPU, unless
            the master is resident.
        resident: It is on the device.
        view: The compute copy, on the device.
        standing: Shared with those that are stepped together with it.
        share: What of the value is here, where other ranks own parts; None: all of it.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.host = tensor.data.to("cpu")
        self.view = self.host
        self._remember(self.view)
        self.resident = False
        self.standing = Standing()
        self.share: Share | None = None
        self._exported: tuple[Tensor, int] | None = None  # a copy of a resident master that left, and its version then
        self._deferred: Callable[[], DeferredTensor | None] = lambda: None  # what stands for it in a checkpoint
        self._replacement: tuple[Tensor, Tensor] | None = None  # FP32 data put in the copy's place, and its cast
        self._dtype = tensor.dtype
        self.note()

    @property
    def ahead(self) -> bool:
        """Whether the host was stepped, and its new value is not yet in the compute copy."""
        return self.standing.ahead

    def bind(self, view: Tensor) -> None:
        """Make `view` what the module computes with; its values must be those of the master."""
        self.view = view
        self._remember(view)
        self.tensor.data = view
        self.note()

    def on_gradient(self, function: Callable[[Tensor], None]) -> Any:
        """Call `function` with the parameter whenever autograd has accumulated its gradient; returns the handle."""
        trained = self.tensor.requires_grad
        self.tensor.requires_grad_(True)  # torch refuses hooks on what is frozen at the moment
        handle = self.tensor.register_post_accumulate_grad_hook(function)
        self.tensor.requires_grad_(trained)
        return handle

    def note(self) -> None:
        """Master and compute copy agree as they are now: only later writes are news."""
        self._exported = self._replacement = None
        self._version = self.tensor._version
        self._host_version = self.host._version

    def note_step(self) -> None:
        """The compute copy's version was raised by one for a step; nobody else has written since `note`."""
        self._exported = self._replacement = None
        self._version += 1

    def replaced(self) -> bool:
        """Whether the module's data is no longer the compute copy but something put in its place."""
        tensor = self.tensor
        return tensor.data_ptr() != self._address or tensor.dtype is not self._view_dtype or tensor.shape != self._shape

    def written(self) -> bool:
        """Whether torch saw a write to either side; it does not see writes through `.data`."""
        return self.tensor._version != self._version or self.replaced() or self.host_written()

    def host_written(self) -> bool:
        """Whether someone wrote into a tensor that `state_dict` returned: in a plain run, that is the weight."""
        return (self.host._version != self._host_version and not self.ahead) or self._exported_written()

    def cast_replacement(self) -> None:
        """Let the module compute with FP32 data that was put in the copy's place; uncast, the data still counts.

        Both the copy and the data stay as they are: whoever exchanged them may put the copy back.
        """
        if self.tensor.dtype != self.view.dtype:
            uncast = self.tensor.data
            cast = uncast.to(self.view.dtype)
            self.tensor.data = cast
            self._replacement = uncast, cast
            self._version = self.tensor._version

    @torch.no_grad()
    def current(self) -> Tensor:
        """The value as it counts now, where the master is: itself, or a new tensor where others wrote."""
        if self._exported is not None and self._exported_written():
            self.host.copy_(self._exported[0])
            self._exported = self._exported[0], self._exported[0]._version
        data = self._data()
        if self._host_leads() or data.shape != self.host.shape:
            return self.host
        if data.dtype == self.view.dtype:
            written = [_written(part, host) for part, host in zip(_slices(data), _slices(self.host), strict=True)]
            if all(part is None for part in written):
                return self.host
            value = self.host.clone()
            for part, target in zip(written, _slices(value), strict=True):
                if part is not None:
                    target.copy_(part)
            return value
        # Data of another dtype was put in place; a mere cast of the copy, as by `module.float()`, writes nothing.
        return self.host if self.shows_in(data) else data.to(self.host.device, self.host.dtype)

    @torch.no_grad()
    def exported(self) -> Tensor:
        """The value as it counts now, on the CPU; a write to it counts as one to the weight, until the next step."""
        if self.share is not None:
            return self._exported_share(self.share)
        value = self.current()
        if not self.resident:
            return value
        exported = value.to("cpu", copy=True) if self._exported is None else self._exported[0].copy_(value)
        self._exported = exported, exported._version
        return exported

    def require_exportable(self) -> None:
        """Raise RuntimeError if other ranks hold parts of the value, and it is not about to be saved by all."""
        if self.share is not None and not self.share.deferring:
            self.share.require_here(self.name)

    def _exported_share(self, share: Share) -> Tensor:
        """A copy, or what is read only when it is saved; RuntimeError if that is not asked for, and it is not here."""
        self.require_exportable()
        if not share.deferring:
            return self.current().clone()

        def read() -> Tensor:
            share.fetch()
            return self.current()

        deferred = self._deferred()
        if deferred is None:  # one for all names of a tied weight in a checkpoint: it is written once
            deferred = DeferredTensor(self.host.shape, self.host.stride(), read, partial(share.require_here, self.name))
            self._deferred = weakref.ref(deferred)
        return deferred

    def shows_in(self, data: Tensor) -> bool:
        """Whether `data` holds exactly what the master rounds to, in whatever dtype."""
        rounded = self.host.to(self.view.dtype).to(self.host.dtype)
        return data.shape == rounded.shape and torch.equal(data.detach().to(rounded.device, rounded.dtype), rounded)

    def take_over(self) -> None:
        """Give the master what others wrote; the compute copy is left as it is."""
        if self.tensor.shape != self.host.shape:
            raise RuntimeError(
                f"{self.name}: its data was replaced by a tensor of shape {tuple(self.tensor.shape)}, but the "
                f"optimizer holds one of {tuple(self.host.shape)}. Change shapes before training."
            )
        data = self._data()
        if data.dtype not in (self.view.dtype, self.host.dtype):
            raise RuntimeError(
                f"{self.name}: was cast to {data.dtype} during training, but its compute copy is {self.view.dtype}. "
                "Cast the module before training, or choose the Trainer's precision."
            )
        if self.view.data_ptr() != self._address:
            raise RuntimeError(
                f"{self.name}: its memory was moved during training, as share_memory() does, so steps would no longer "
                "reach it. Call that before training."
            )
        with self._made_up():
            value = self.current()
            if value is not self.host:
                with torch.no_grad():
                    self.host.copy_(value)

    def adopt(self) -> None:
        """Make both sides agree: the master takes over what others wrote, or the copy what only the host has."""
        stale = self._host_leads() or self.replaced()
        with self._made_up():
            self.take_over()
            if stale:
                with torch.no_grad():
                    self.view.copy_(self.host)
        self.bind(self.view)

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        """Take over a value on its way into the module; where it is only the master's rounding, the master stays."""
        value = value.detach()
        with self._made_up():
            if value.dtype == self.view.dtype != self.host.dtype:
                value = value.to(self.host.device)
                differs = words(value) != words(self.host.to(value.dtype))
                value = torch.where(differs, value.to(self.host.dtype), self.host)
            take(self.host, value)
        self._host_version, self._exported = self.host._version, None

    def restore(self) -> None:
        """Give the module its value back in the dtype it came with; gradients of the compute copy are dropped."""
        self.tensor.grad = None
        self.host = self.host.to("cpu")
        self.tensor.data = self.host if self.host.dtype == self._dtype else self.host.to(self._dtype)

    def _remember(self, view: Tensor) -> None:
        """What `replaced` compares with: at each step, and the view itself is seldom in the processor's caches."""
        self._address, self._view_dtype, self._shape = view.data_ptr(), view.dtype, view.shape

    def _made_up(self) -> AbstractContextManager[None]:
        return nullcontext() if self.share is None else self.share.made_up()

    def _data(self) -> Tensor:
        data = self.tensor.data
        if self._replacement is not None and self.tensor._version == self._version:
            uncast, cast = self._replacement
            return uncast if data.data_ptr() == cast.data_ptr() else data
        return data

    def _host_leads(self) -> bool:
        return self.ahead or self.host_written()

    def _exported_written(self) -> bool:
        return self._exported is not None and self._exported[0]._version != self._exported[1]


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
        land: Waits until no step is under way.
    """

    def __init__(self, module: nn.Module, masters: dict[Tensor, Master], land: Callable[[], None]) -> None:
        self._module = module
        self._masters = masters
        self._land = land
        self._process = os.getpid()
        self._before = {(owner, name): (tensor, tensor.dtype) for owner, name, tensor in _named_tensors(module)}
        self._handles = []
        for owner in module.modules():
            if isinstance(owner, torch.jit.ScriptModule):
                continue  # takes no hooks: the module that holds it speaks for its tensors
            self._handles.append(owner.register_state_dict_post_hook(Live(self._on_save)))
            self._handles.append(owner.register_load_state_dict_pre_hook(Live(self._on_load)))

    def remove(self) -> None:
        """Take the hooks off; tensors made in the compute dtype during training become what a plain run has."""
        for handle in self._handles:
            handle.remove()
        for owner, name, tensor in _named_tensors(self._module):
            if tensor not in self._masters:
                tensor.data = self._uncast(owner, name, tensor)

    def _on_save(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if os.getpid() != self._process:
            return  # a forked child has the compute copies only: it does not inherit the masters' memory
        held = [self._masters[tensor] for _, tensor in _own_tensors(owner) if tensor in self._masters]
        for master in held:
            master.require_exportable()  # before a wait in which other ranks may have no part
        if held:
            self._land()
        for name, tensor in _own_tensors(owner):
            saved = state_dict.get(prefix + name)
            # A module may save something else under the name, and `keep_vars=True` asks for the object itself.
            if saved is None or saved is tensor or saved.data_ptr() != tensor.data_ptr():
                continue
            if tensor in self._masters:
                state_dict[prefix + name] = self._masters[tensor].exported()
            else:
                state_dict[prefix + name] = self._uncast(owner, name, saved)

    def _on_load(self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
        self._land()
        for name, tensor in _own_tensors(owner):
            master, value = self._masters.get(tensor), state_dict.get(prefix + name)
            if master and isinstance(value, Tensor) and value.shape == master.host.shape:
                master.load(value)

    def _uncast(self, owner: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """What a tensor that came into the module during training is in a plain run.

        It may have been made of BF16 weights (a pruning mask, a buffer assigned anew), or be a mere cast of a buffer
        whose master still holds the value, since `module.float()` replaces buffers.
        """
        before, dtype = self._before.get((owner, name), (None, torch.float32))
        master = self._masters.get(before) if before is not None else None
        if master is not None and master.shows_in(tensor):
            return master.host.to("cpu")
        return tensor.data.float() if (tensor.dtype, dtype) == (torch.bfloat16, torch.float32) else tensor


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() <= _SLICE_NUMEL:
        return (tensor,)
    return tensor.split(max(1, _SLICE_NUMEL * len(tensor) // tensor.numel()))


def _written(data: Tensor, host: Tensor) -> Tensor | None:
    """What a part of the master becomes where its compute copy was written to, None if it was not."""
    value = data.to(host.device)
    differs = words(value) != words(host.to(value.dtype))
    return torch.where(differs, value.to(host.dtype), host) if differs.any() else None


def _own_tensors(owner: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a module by their names in it, with those of its parts in TorchScript."""
    for named in (owner._parameters, owner._buffers):
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)
    for name, part in owner._modules.items():
        if isinstance(part, torch.jit.ScriptModule):
            yield from part.named_parameters(name)
            yield from part.named_buffers(name)


def _named_tensors(module: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        yield from ((owner, name, tensor) for name, tensor in _own_tensors(owner))
