"""Hangs the offload on the user's optimizer object.

The optimizer stays the object the user made, of the class it has, with the module's own parameters in
`param_groups`; schedulers, callbacks and closures never see anything else. Only while the body of its `step` runs
are the parameters exchanged for what the host steps:

    step(closure) -> pre-hook -> closure: forward, backward, clipping, on the module's parameters
                              -> engage: the kernel steps the masters, and the body finds nothing left to do; or
                                 gradients go to the masters, which stand in for the parameters in the body
                     body
                     post-hook -> disengage: parameters back in place, weights returned to the device

Because these are hooks of the optimizer and not of the strategy, a bare `optimizer.step()` gets the same.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.fused import FusedAdamW, is_adam, is_fused
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.pipeline import Pipeline
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.watch import Watch

RegionBuilder = Callable[[Sequence[tuple[int, Tensor]]], list[Region]]


class HookedOptimizer:
    """One optimizer of the module, stepped on the host.

    Args:
        optimizer: The user's object.
        build: Makes regions of parameters that are new to it, given with the index of their group.
        order: Position of each parameter in the module, which is taken for forward order.
        pipeline: Moves gradients and weights.
        watch: Notices what others write into the weights.
        threads: The pool for host work.

    Attributes:
        regions: Everything this optimizer steps on the host.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        build: RegionBuilder,
        order: dict[Tensor, int],
        pipeline: Pipeline,
        watch: Watch,
        threads: ThreadPool,
    ) -> None:
        self.optimizer = optimizer
        self._build = build
        self._order = order
        self._pipeline = pipeline
        self._watch = watch
        self.regions: list[Region] = []
        self._fused = FusedAdamW(optimizer, self.regions, threads) if is_adam(optimizer) else None
        self._known: set[Tensor] = set()
        self._masters: dict[Tensor, Tensor] = {}
        self._chunks: list[tuple[Region, Chunk]] = []
        self._absent: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._borrowed: list[tuple[dict[str, Any], str, Any]] = []
        self._engaged: str | None = None
        self._began = self._ready = 0.0
        self._warned = False
        self._admit()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]
        # The user's own post-hooks come after ours: they expect the step to be over.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]

    @property
    def is_fused(self) -> bool:
        """Whether the kernel makes its steps, rather than its own body."""
        return is_fused(self.optimizer)

    def detach(self) -> None:
        """Leave the optimizer as the user made it, with its state; the device is not touched."""
        self._return_parameters()
        for handle in self._handles:
            handle.remove()

    def adopt_writes(self) -> None:
        """Let the masters take over what others wrote into the weights since the last step."""
        for region in self.regions:
            suspects = {index for index, master in enumerate(region.masters) if master.written()}
            suspects.update(piece.index for chunk in self._watch.changed(region) for piece in chunk.pieces)
            for index in sorted(suspects):
                region.masters[index].adopt()
            if suspects:
                self._watch.remember(region)

    def engage(self) -> None:
        """Step on the host, or put the masters in the parameters' place so that the optimizer's body can."""
        if self._engaged:
            return
        self._began = time.perf_counter()
        self._pipeline.new_report()
        self._admit()
        self.adopt_writes()
        for region in self.regions:
            region.lay_out_gradients()
        chunks = self._stepped_chunks()
        if not chunks:
            self._warn_without_gradients()
        if self._fused is not None and self.is_fused:
            self._fused.begin()
            self._masters_lead()
            self._pipeline.run(chunks, self._fused.work)
            self._settle()
            self._hide_parameters()
            self._engaged = "kernel"
        else:
            self._collect_gradients(chunks)
            self._masters_lead()
            self._borrow_group_values()
            self._exchange(self._masters)
            self._engaged = "body"
        self._ready = time.perf_counter()

    def disengage(self) -> None:
        """Put the module's parameters back, and what the body changed on the device."""
        if self._engaged is None:
            return
        if self._engaged != "early":
            self._pipeline.report.host_ms += (time.perf_counter() - self._ready) * 1e3
        if self._return_parameters() == "body":
            self._pipeline.run(self._chunks, _round_masters, fetch=False)
            self._settle()
        self._pipeline.report.total_ms = (time.perf_counter() - self._began) * 1e3

    def parameters(self) -> list[Tensor]:
        """What the optimizer holds while no step runs."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _return_parameters(self) -> str | None:
        """End what `engage` began, on the host; returns who made the step."""
        engaged, self._engaged = self._engaged, None
        if engaged == "kernel":
            for group, parameters in self._absent:
                group["params"][:] = parameters
            self._absent.clear()
        elif engaged is not None:
            self._exchange_back()
            self._return_group_values()
            self._keep_in_arena()
        return engaged

    def _before_step(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.disengage()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.engage()
            return None
        if not self.is_fused:
            # Some optimizers list their parameters first and call the closure then.
            self._admit()
            self._exchange(self._masters)
            self._engaged = "early"
        wrapped = partial(self._run_closure, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        # Optimizers such as LBFGS call it many times in one step; each call must see the weights of that moment.
        self.disengage()
        result = closure()
        self.engage()
        return result

    def _after_step(self, *_unused: Any) -> None:
        self.disengage()

    def _before_load(self, _optimizer: Any, state_dict: dict[str, Any]) -> None:
        # torch casts loaded state to the dtype and device of the parameters it finds: it must find the masters.
        self.disengage()
        if _fits(self.optimizer, state_dict):
            self._admit(with_state=self._parameters_with_state(state_dict))
            self._exchange(self._masters)

    def _after_load(self, _optimizer: Any) -> None:
        self._exchange_back()
        self._own_state(self._masters)
        self._allocate()

    def _admit(self, with_state: Iterable[Tensor] = ()) -> None:
        """Take in parameters that are to be stepped by now: at first what is trained, later what is added or unfrozen.

        A frozen parameter in an optimizer costs nothing on the host, unless it has state.
        """
        stateful = set(with_state)
        new = [
            (index, parameter)
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
            if parameter not in self._known
            and (parameter.requires_grad or parameter.grad is not None or parameter in stateful)
        ]
        if not new:
            return
        self._known.update(parameter for _, parameter in new)
        added = self._build(new)
        self.regions.extend(added)
        masters = {master.tensor: nn.Parameter(master.host) for region in added for master in region.masters}
        self._masters.update(masters)
        self._chunks = _in_forward_order(self.regions, self._order)
        for region in added:
            self._watch.remember(region)
        self._allocate()
        self._own_state(masters)

    def _parameters_with_state(self, state_dict: dict[str, Any]) -> list[Tensor]:
        return [parameter for index, parameter in enumerate(self.parameters()) if index in state_dict["state"]]

    def _allocate(self) -> None:
        for region in self.regions:
            if self.is_fused:
                region.allocate_moments()
            else:
                region.allocate_gradients()

    def _own_state(self, parameters: Iterable[Tensor]) -> None:
        """Keep state that came from outside (a constructor, a checkpoint) in host memory that is only ours."""
        if self._fused is not None:
            self._fused.adopt_state()
            return
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.detach().to("cpu", copy=True)

    def _warn_without_gradients(self) -> None:
        if self._masters and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.optimizer).__name__}.step() found no gradient in any of its {len(self._masters)} "
                "parameters, so no weight moved. Check that the loss depends on them and that backward ran.",
                stacklevel=2,
            )

    def _keep_in_arena(self) -> None:
        """An optimizer may have put new storage in place of a master; its values belong in the arena."""
        for region in self.regions:
            for master in region.masters:
                stand_in = self._masters[master.tensor]
                if stand_in.data_ptr() != master.host.data_ptr():
                    master.host.copy_(stand_in.detach())
                    stand_in.data = master.host

    def _stepped_chunks(self) -> list[tuple[Region, Chunk]]:
        return [
            (region, chunk)
            for region, chunk in self._chunks
            if any(region.has_gradient(piece) for piece in chunk.pieces)
        ]

    def _masters_lead(self) -> None:
        """From here to `_settle` the compute copies are old: whoever looks in between, or interrupts, gets masters."""
        for region in self.regions:
            for master in region.masters:
                master.ahead = True

    def _settle(self) -> None:
        for region in self.regions:
            for master in region.masters:
                if master.tensor.grad is not None:
                    # As after any step in place: backward through an older graph must fail, not mix two steps.
                    torch.autograd.graph.increment_version(master.tensor)
                master.settle()
            self._watch.remember(region)

    def _hide_parameters(self) -> None:
        for group in self.optimizer.param_groups:
            parameters = list(group["params"])
            self._absent.append((group, parameters))
            group["params"][:] = [parameter for parameter in parameters if parameter not in self._masters]

    def _exchange(self, places: dict[Tensor, Tensor]) -> None:
        """Replace parameters in `param_groups` and as keys of the state, in place: some optimizers keep the lists."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            group["params"][:] = [places.get(parameter, parameter) for parameter in group["params"]]
        for old, new in places.items():
            if old in state:
                state[new] = state.pop(old)

    def _exchange_back(self) -> None:
        self._exchange({master: parameter for parameter, master in self._masters.items()})

    def _collect_gradients(self, chunks: list[tuple[Region, Chunk]]) -> None:
        for region in self.regions:
            region.allocate_gradients()
        self._pipeline.run(chunks, _widen_gradients)
        for region in self.regions:
            assert region.gradients is not None
            for index, master in enumerate(region.masters):
                stand_in = self._masters[master.tensor]
                stand_in.grad = _host_gradient(region, index, master)
                vars(stand_in).update(vars(master.tensor))  # what users hang on a parameter for their optimizer

    def _borrow_group_values(self) -> None:
        """Settings that only make sense for device tensors, exchanged while the body steps host tensors."""
        for group in self.optimizer.param_groups:
            for name, value in list(group.items()):
                host = _on_host(name, value)
                if host is not value:
                    self._borrowed.append((group, name, value))
                    group[name] = host

    def _return_group_values(self) -> None:
        for group, name, value in self._borrowed:
            group[name] = value
        self._borrowed.clear()


def _host_gradient(region: Region, index: int, master: Master) -> Tensor | None:
    gradient = master.tensor.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        return gradient.detach().to("cpu", torch.float32)
    assert region.gradients is not None
    return region.view(region.gradients, index)


def _widen_gradients(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    assert region.gradients is not None
    region.gradients.flat(chunk.start, chunk.stop).copy_(staged)
    return []


def _round_masters(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    staged.copy_(region.master.flat(chunk.start, chunk.stop))
    return [(chunk.start, chunk.stop)]


def _in_forward_order(regions: list[Region], order: dict[Tensor, int]) -> list[tuple[Region, Chunk]]:
    def position(item: tuple[Region, Chunk]) -> tuple[int, int]:
        region, chunk = item
        first = chunk.pieces[0]
        return order[region.masters[first.index].tensor], first.offset

    return sorted(((region, chunk) for region in regions for chunk in region.chunks), key=position)


def _on_host(name: str, value: Any) -> Any:
    if name == "capturable" and value:
        return False
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.to("cpu")
    return value


def _fits(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> bool:
    """Whether torch will accept the state; if not it raises, and no post-hook comes to put the parameters back."""
    ours, theirs = optimizer.param_groups, state_dict.get("param_groups", ())
    return len(ours) == len(theirs) and all(
        len(own["params"]) == len(loaded["params"]) for own, loaded in zip(ours, theirs, strict=True)
    )
