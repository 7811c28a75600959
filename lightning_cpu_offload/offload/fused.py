"""AdamW and Adam in one pass over memory, through the host kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.bits import as_array
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.device_step import DeviceStep, Run, adamw
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.moments import (
    NAMES,
    FloatMoments,
    ReducedMoments,
    ReducedTensor,
    make_moments,
    moment_bytes,
)
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region, Source
from lightning_cpu_offload.offload.sums import Sums

Due = tuple[int, int]
"""The step a parameter is about to make: its number, from 1, and the index of its parameter group."""

UNFUSED = ("amsgrad", "differentiable")
"""Options with which torch's own step is needed."""


@dataclass(frozen=True)
class Hyperparameters:
    """One parameter group's settings at one step, as plain numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Read a group; it is read anew at each step because schedulers and users change it."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
            grad_scale=-1.0 if group["maximize"] else 1.0,
        )


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torch's own Adam or AdamW; a subclass may step differently."""
    return type(optimizer) in (torch.optim.AdamW, torch.optim.Adam)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel computes what this optimizer's own step would, with the settings it has now."""
    return is_adam(optimizer) and not any(group[name] for group in optimizer.param_groups for name in UNFUSED)


def state_bytes(optimizer: torch.optim.Optimizer, state_dtype: str = "float32") -> float:
    """Bytes on the host for each parameter besides its master: Adam's moments, else a gradient and about one moment."""
    if is_fused(optimizer):
        return moment_bytes(state_dtype)
    plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return 4 if plain else 8


class FusedAdamW:
    """The host's part of a step: gradients become weights, chunk by chunk.

    The state stays in torch's form: `optimizer.state[parameter]` holds `step`, `exp_avg` and `exp_avg_sq`, the
    latter two showing what the kernel works on.

    Args:
        optimizer: The user's AdamW or Adam.
        regions: Everything it steps; the caller adds regions as parameters are added.
        threads: The pool the kernel runs on.
        state_dtype: What the moments are held in, see `moments`.

    Attributes:
        clip: What is to be done to gradients on the host in this step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        regions: list[Region],
        threads: ThreadPool,
        state_dtype: str = "float32",
    ) -> None:
        self._optimizer = optimizer
        self._regions = regions
        self._threads = threads
        self._state_dtype = state_dtype
        self.clip = Clip()
        self._moments: dict[Region, FloatMoments | ReducedMoments] = {}
        self._scratch = torch.empty(0)  # for steps on the device, which has them one after the other
        self._views: dict[Region, dict[int, tuple[Tensor, Tensor]]] = {}
        self._settings: list[Hyperparameters] = []
        self._groups: dict[Region, list[int | None]] = {}
        self._group_of: dict[Tensor, int] = {}
        self._due: dict[Region, list[Due | None]] = {}

    def allocate(self) -> None:
        """Make room for the moments of every region."""
        for region in self._regions:
            if region not in self._moments:
                self._moments[region] = make_moments(self._state_dtype, region)
                if region.resident and len(self._scratch) < region.chunk_numel:
                    self._scratch = torch.empty(region.chunk_numel, dtype=torch.float32, device=region.weights.device)

    def begin(self) -> None:
        """Read the settings of every group, and which parameters have a gradient; later changes do not count."""
        self._read_settings()
        self._groups = {region: [self._group(master) for master in region.masters] for region in self._regions}

    def begin_early(self) -> None:
        """Read the settings; `expect` says which gradients are complete."""
        self._read_settings()
        self._due = {region: [None] * len(region.masters) for region in self._regions}

    def expect(self, region: Region, chunk: Chunk) -> bool:
        """A chunk is to be stepped before the step is counted; False if that cannot be."""
        for index in (piece.index for piece in chunk.pieces):
            parameter = region.masters[index].tensor
            state, group = self._optimizer.state.get(parameter), self._group_of.get(parameter)
            if group is None or not state or not self._is_attached(region, index, state):
                return False
            self._due[region][index] = int(state["step"].item()) + 1, group
        return True

    def settings_changed(self) -> bool:
        """Whether the settings are no longer those that were read last."""
        return self._settings != [Hyperparameters.of(self._optimizer, group) for group in self._optimizer.param_groups]

    def has_state(self) -> bool:
        """Whether everything that is to be stepped has been stepped before."""
        return all(
            self._optimizer.state.get(master.tensor)
            for region, groups in self._groups.items()
            for master, group in zip(region.masters, groups, strict=True)
            if group is not None
        )

    def count(self) -> None:
        """The step is made: count it for every parameter that has a gradient."""
        for region, groups in self._groups.items():
            self._due[region] = [
                None if group is None else self._count(region, index, group) for index, group in enumerate(groups)
            ]

    def work(self, region: Region, chunk: Chunk, staged: Tensor) -> Sequence[tuple[int, int]]:
        """Step one chunk in place: staged gradients in, staged weights out."""
        ranges = []
        for start, stop, due in self._runs(region, chunk):
            plane = staged[start - chunk.start : stop - chunk.start]
            self._step(region, start, stop, due, plane, plane, 1.0)
            ranges.append((start, stop))
        return ranges

    def work_on_host_gradients(
        self, sums: Mapping[Region, Sums], region: Region, chunk: Chunk, staged: Tensor
    ) -> Sequence[tuple[int, int]]:
        """Step one chunk with the gradients on the host; staged weights out."""
        gradients = sums[region]
        if self.clip.max_value is not None:
            self.clip.apply(gradients.total(chunk.start, chunk.stop))
        scale = self.clip.scale if self.clip.max_value is None else 1.0
        ranges = []
        for start, stop, due in self._runs(region, chunk):
            for first, last, gradient in gradients.parts(start, stop):
                weights = staged[first - chunk.start : last - chunk.start]
                self._step(region, first, last, due, gradient, weights, scale)
            ranges.append((start, stop))
        return ranges

    def step_on_device(self, region: Region, chunk: Chunk, sources: Sequence[Source]) -> DeviceStep:
        """The step of a resident chunk with these gradients."""
        runs = [Run(start, stop, self._arguments(due)) for start, stop, due in self._runs(region, chunk)]
        moments = self._moments[region]
        assert isinstance(moments, FloatMoments)
        return DeviceStep(region, chunk, sources, moments, runs, self._scratch)

    def adopt_state(self) -> None:
        """Take state that was loaded into the optimizer, in ordinary tensors, into the arenas."""
        for region in self._regions:
            states = [(index, self._optimizer.state.get(master.tensor)) for index, master in enumerate(region.masters)]
            loaded = [(index, state) for index, state in states if state]
            for index, state in loaded:
                self._clear(region, index, state)
            for index, state in loaded:
                self._attach(region, index, state)

    def memory(self) -> list[Tensor]:
        """Host tensors that a step changes."""
        arenas = [arena for moments in self._moments.values() for arena in moments.arenas]
        arenas += [region.master for region in self._regions]
        steps = [state["step"] for state in self._optimizer.state.values() if "step" in state]
        with torch._C.DisableTorchFunction():  # the gate would wait for them; here nobody touches their elements
            return [*(arena.flat(0, arena.numel) for arena in arenas), *steps]

    def bring_home(self) -> None:
        """Give state that is on the device to the optimizer on the CPU; training is over."""
        for region in self._regions:
            for master in region.masters if region.resident else ():
                state = self._optimizer.state.get(master.tensor, {})
                state.update({name: value.to("cpu") for name, value in state.items() if isinstance(value, Tensor)})

    def inherit_on_fork(self) -> None:
        """Make the moments ordinary memory for children of this process, once training is over."""
        for moments in self._moments.values():
            for arena in moments.arenas:
                arena.inherit_on_fork()

    def _read_settings(self) -> None:
        self.allocate()
        groups = self._optimizer.param_groups
        self._settings = [Hyperparameters.of(self._optimizer, group) for group in groups]
        # Asked anew each time: users move parameters between groups and take them out.
        self._group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}

    def _group(self, master: Master) -> int | None:
        """The group of a parameter that is to be stepped, None if it has no gradient or has left the optimizer."""
        gradient = master.tensor.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise RuntimeError(
                f"{master.name}: {type(self._optimizer).__name__} does not support sparse gradients. "
                "Use torch.optim.SparseAdam for it, or build the embedding with sparse=False."
            )
        return self._group_of.get(master.tensor)

    def _count(self, region: Region, index: int, group: int) -> Due:
        state = self._optimizer.state[region.masters[index].tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # whatever the defaults of the moment
        if not self._is_attached(region, index, state):
            self._attach(region, index, state)
        state["step"] += 1
        return int(state["step"].item()), group

    def _is_attached(self, region: Region, index: int, state: dict[str, Any]) -> bool:
        exp_avg, exp_avg_sq = self._view(region, index)
        return state.get("exp_avg") is exp_avg and state.get("exp_avg_sq") is exp_avg_sq

    def _view(self, region: Region, index: int) -> tuple[Tensor, Tensor]:
        views = self._views.setdefault(region, {})
        if index not in views:
            self.allocate()
            views[index] = self._moments[region].show(index)
        return views[index]

    def _attach(self, region: Region, index: int, state: dict[str, Any]) -> None:
        """Make a parameter's state live in the arenas, with the values it has, or zeros."""
        for name, view in zip(NAMES, self._view(region, index), strict=True):
            if state.get(name) is not view:
                self._moments[region].put(view, state.get(name))
            state[name] = view
        step = state["step"]
        state["step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")

    def _clear(self, region: Region, index: int, state: dict[str, Any]) -> None:
        """Before new values come in: in 8 bits, large old ones nearby would leave them no digits."""
        for name, view in zip(NAMES, self._view(region, index), strict=True):
            value = state.get(name)
            if value is not view and isinstance(view, ReducedTensor):
                if isinstance(value, ReducedTensor):
                    state[name] = value.decode()  # may be of what is cleared
                view.encode(None)

    def _runs(self, region: Region, chunk: Chunk) -> Iterator[tuple[int, int, Due]]:
        """Neighbouring pieces that make the same step with the same settings, joined."""
        for due, pieces in groupby(chunk.pieces, key=lambda piece: self._due[region][piece.index]):
            if due is not None:
                joined = list(pieces)
                yield joined[0].start, joined[-1].stop, due

    def _arguments(self, due: Due, scale: float = 1.0) -> dict[str, Any]:
        step, group = due
        settings = vars(self._settings[group])
        return {**settings, "step": step, "grad_scale": settings["grad_scale"] * scale}

    def _step(
        self, region: Region, start: int, stop: int, due: Due, gradient: Tensor, weight: Tensor, scale: float
    ) -> None:
        moments, settings = self._moments[region], self._arguments(due, scale)
        if isinstance(moments, ReducedMoments):
            array = region.master.flat(start, stop).numpy()
            moments.kernel.step(
                array, as_array(gradient), as_array(weight), first=start, threads=self._threads, **settings
            )
            return
        arenas = (region.master, moments.exp_avg, moments.exp_avg_sq)
        param, exp_avg, exp_avg_sq = (arena.flat(start, stop) for arena in arenas)
        if kernels.available():
            kernels.adamw(
                param.numpy(),
                as_array(gradient),
                as_array(weight),
                exp_avg.numpy(),
                exp_avg_sq.numpy(),
                threads=self._threads,
                **settings,
            )
        else:
            adamw(param, gradient, weight, exp_avg, exp_avg_sq, scratch=torch.empty_like(param), **settings)
