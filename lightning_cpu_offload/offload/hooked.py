"""Hangs the offload on the user's optimizer object.

The optimizer stays the object the user made, of the class it has, with the module's own parameters in
`param_groups`; schedulers, callbacks and closures never see anything else.

    step(closure) -> pre-hook -> closure: forward, backward, clipping, on the module's parameters
                              -> engage: the kernel is launched, and the body finds no parameters; or
                                 each parameter's data and gradient are its master's, for the body to step
                     body
                     post-hook -> disengage: gradients, or compute copies, back in place

Because these are hooks of the optimizer and not of the strategy, a bare `optimizer.step()` gets the same.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.adam import is_adam, is_fused
from lightning_cpu_offload.offload.body_step import BodyStep, own_state
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.early import Early
from lightning_cpu_offload.offload.fused import FusedAdamW
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.kernel_step import KernelStep
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.probe import require_reducible
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.resident import require_adam
from lightning_cpu_offload.offload.trained import RegionBuilder, Trained
from lightning_cpu_offload.offload.writes import Writes


class HookedOptimizer:
    """One optimizer of the module, stepped on the host.

    Args:
        optimizer: The user's object.
        host: What it shares with the module's other optimizers.
        build: Where regions come from.
        order: Position of each parameter in the module.
        converted: Masters of the whole module; may grow.

    Attributes:
        num_calls: Calls of `step`.
        num_steps: Steps begun; a call may make several, or none.
        norm: L2 norm of its gradients if nothing can have changed them since it was taken; a scalar on the device.
        clip: How gradients on the host are to be clipped in the next step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: Host,
        build: RegionBuilder,
        order: dict[Tensor, int],
        converted: Mapping[Tensor, Master],
    ) -> None:
        self.optimizer = optimizer
        self.num_calls = self.num_steps = 0
        self.norm: Tensor | None = None
        self.clip = Clip()
        self._host = host
        self._trained = Trained(optimizer, build, order, converted)
        self._writes = Writes(self.regions, host.watch, host.pipeline)
        self._fused = (
            FusedAdamW(optimizer, self._trained, host.threads, host.state_dtype) if is_adam(optimizer) else None
        )
        self._early = (
            Early(self._fused, self._trained, host, self._writes) if self._fused is not None and host.early else None
        )
        self._kernel = (
            KernelStep(self._fused, self._trained, host, self._writes, self._early) if self._fused is not None else None
        )
        self._body = BodyStep(optimizer, self._trained, host, self._writes)
        self._engaged: KernelStep | BodyStep | None = None
        self._frame: FrameType | None = None
        self._warned = False
        if host.pipeline.hold and not self.is_fused:
            warnings.warn(
                f"update='delayed' is for Adam and AdamW: {type(optimizer).__name__} makes exact steps.", stacklevel=2
            )
        self._admit()
        self._save_handles = [
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_state_dict_post_hook(self._after_save, prepend=True),
        ]
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]
        # The user's own post-hooks come after ours: they expect the step to be over.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]

    @property
    def regions(self) -> list[Region]:
        """Everything this optimizer steps on the host."""
        return self._trained.regions

    @property
    def is_fused(self) -> bool:
        """Whether the kernel makes its steps, rather than its own body."""
        return is_fused(self.optimizer)

    @property
    def streams(self) -> bool:
        """Whether its gradients are on the host when it steps."""
        return self._host.stream is not None

    def parameters(self) -> list[Tensor]:
        """What the optimizer holds."""
        return self._trained.parameters()

    def gradient_norm(self) -> Tensor | None:
        """L2 norm of its gradients as they are now, where they are; None if there are none."""
        due = self._trained.due()
        if not due:
            return None
        if self._host.stream is not None:
            return torch.tensor(self._host.stream.measure_now(due)[1])
        norms = [_norm(master.tensor.grad) for master in due]
        return torch.linalg.vector_norm(torch.stack(norms))

    def detach(self) -> None:
        """Leave the optimizer as the user made it, with its state.

        Raises:
            RuntimeError: State is on a device that no longer answers; all else is done.
        """
        self._engaged = self._frame = None
        if self._early is not None:
            self._early.detach()
        if self._kernel is not None:
            self._kernel.end()
        self._body.put_back()
        for handle in self._handles:
            handle.remove()
        if not any(region.spread for region in self.regions):  # else it is still in the memory of all ranks
            for handle in self._save_handles:
                handle.remove()
        if self._fused is not None:
            self._fused.bring_home()

    def inherit_on_fork(self) -> None:
        """Make its host memory ordinary for children of this process, once training is over."""
        if self._fused is not None:
            self._fused.inherit_on_fork()

    def begin_early(self) -> None:
        """A backward is about to begin."""
        if self._early is not None and self.is_fused:
            self._early.begin()

    def engage(self) -> None:
        """Step on the host, or put each master in its parameter's place so that the optimizer's body can."""
        if self._engaged is not None:
            return
        require_reducible(self.optimizer, self._host.state_dtype)
        self._host.pipeline.catch_up()
        self._admit()
        self._writes.adopt_seen()
        due = self._trained.due()
        self._warn_without_gradients(found=bool(due))
        self.num_steps += 1
        norm, clip, self.norm, self.clip = self.norm, self.clip, None, Clip()
        if self._kernel is not None and self.is_fused:
            self._engaged = self._kernel
            self._kernel.begin(due, self.num_steps, norm, clip)
        else:
            if any(region.resident for region in self.regions):
                require_adam([self.optimizer])
            self._require_all_here()
            self._engaged = self._body
            self._body.begin(due, self.num_steps, clip)

    def disengage(self) -> None:
        """End what `engage` began."""
        engaged, self._engaged = self._engaged, None
        if engaged is not None:
            engaged.end()
            self._host.depart(self.num_steps)

    def _before_step(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engaged is not None and self._is_nested():
            return None  # `super().step()` in the body: a part of the step that has begun
        self.disengage()
        self.num_calls += 1
        self._frame = sys._getframe(1)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.engage()
            return None
        wrapped = partial(self._run_closure, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        # Optimizers such as LBFGS call it many times in one step; each call must see the weights of that moment.
        self.disengage()
        with self._early.last_backward() if self._early is not None else nullcontext():
            result = closure()
        self.engage()
        return result

    def _after_step(self, *_unused: Any) -> None:
        if sys._getframe(1) is self._frame:
            self._frame = None
            self.disengage()

    def _is_nested(self) -> bool:
        """Whether the step that has begun is still running, rather than ended by an exception."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False

    def _before_save(self, _optimizer: Any) -> None:
        self._saved_shares()  # before a wait in which other ranks may have no part
        self._host.land()
        if self._kernel is not None:
            self._kernel.end()  # a signal handler may save in the middle of a step

    def _after_save(self, _optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        resident = [index for index, parameter in enumerate(self.parameters()) if self._trained.is_resident(parameter)]
        if self._kernel is not None and self._engaged is self._kernel:
            self._kernel.hide()
        state = state_dict["state"]
        copies = {index: {**state[index], **_on_host(state[index])} for index in resident if index in state}
        copies.update((index, {**state[index], **moments}) for index, moments in self._saved_shares().items())
        return {**state_dict, "state": {**state, **copies}} if copies else None

    def _saved_shares(self) -> dict[int, dict[str, Tensor]]:
        """Moments of which other ranks hold parts, by the parameter's number, as they may be saved."""
        partition = self._host.partition
        if self._fused is None or partition is None:
            return {}
        found = self._fused.saved(partition.deferring)
        return {index: found[parameter] for index, parameter in enumerate(self.parameters()) if parameter in found}

    def _require_all_here(self) -> None:
        """Whether the optimizer's own body finds all of what it is to step."""
        if any(region.spread for region in self.regions):
            raise RuntimeError(
                f"{type(self.optimizer).__name__}: its own step is needed for the options it has now (amsgrad, "
                "differentiable), or for its class, but its parameters are spread over the ranks, as Adam and AdamW "
                "step them. Set the options when the optimizer is made, and give each parameter to one optimizer."
            )

    def _before_load(self, _optimizer: Any, state_dict: dict[str, Any]) -> None:
        # torch casts loaded state to the dtype and device of the parameters it finds: it must find the masters.
        self.disengage()
        self._host.land()
        if _fits(self.optimizer, state_dict):
            held = self.parameters()
            self._admit(with_state=[held[index] for index in state_dict["state"] if index < len(held)])
            self._body.put_masters()

    def _after_load(self, _optimizer: Any) -> None:
        self._body.put_back()
        self._own_state(self._trained.masters)

    def _admit(self, with_state: Iterable[Tensor] = ()) -> None:
        added = self._trained.admit(with_state)
        if not added:
            return
        if not self.is_fused:
            self._require_all_here()
        self._host.land()
        for region in added:
            self._host.watch.remember(region)
            if self._early is not None:
                self._early.attach(region)
            if not self.is_fused:
                region.allocate_gradients()
        if self._fused is not None and self.is_fused:
            self._fused.allocate()
        chunks = self._trained.chunks
        self._host.pipeline.reserve(len(chunks), sum(not region.takes_slot(chunk) for region, chunk in chunks))
        self._own_state(master.tensor for region in added for master in region.masters)

    def _own_state(self, parameters: Iterable[Tensor]) -> None:
        if self._fused is not None:
            self._fused.adopt_state()
        else:
            own_state(self.optimizer, parameters)

    def _warn_without_gradients(self, found: bool) -> None:
        if not found and self._trained.masters and not self._warned:
            warnings.warn(
                f"{type(self.optimizer).__name__}.step() found no gradient in any of its {len(self._trained.masters)} "
                "parameters, so no weight moved. Check that the loss depends on them and that backward ran.",
                stacklevel=2,
            )
        self._warned = True  # once a step had gradients, one without is the user's intention


def _norm(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def _on_host(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in state.items() if isinstance(value, Tensor)}


def _fits(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> bool:
    """Whether torch will accept the state; if not it raises, and no post-hook comes to put the parameters back."""
    ours, theirs = optimizer.param_groups, state_dict.get("param_groups", ())
    return len(ours) == len(theirs) and all(
        len(own["params"]) == len(loaded["params"]) for own, loaded in zip(ours, theirs, strict=True)
    )
