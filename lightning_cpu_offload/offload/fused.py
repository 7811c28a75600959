"""AdamW and Adam in one pass over memory, through the host kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.adam import Hyperparameters
from lightning_cpu_offload.offload.adam_state import AdamState
from lightning_cpu_offload.offload.bits import as_array
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.device_step import DeviceStep, Run, adamw
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.moments import FloatMoments, ReducedMoments
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region, Source
from lightning_cpu_offload.offload.sums import Sums
from lightning_cpu_offload.offload.trained import Trained

Due = tuple[int, int]
"""The step a parameter is about to make: its number, from 1, and the index of its parameter group."""


class FusedAdamW:
    """The host's part of a step: gradients become weights, chunk by chunk.

    Args:
        optimizer: The user's AdamW or Adam.
        trained: Everything it steps.
        threads: The pool the kernel runs on.
        state_dtype: What the moments are held in, see `moments`.

    Attributes:
        clip: What is to be done to gradients on the host in this step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Trained,
        threads: ThreadPool,
        state_dtype: str = "float32",
    ) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._threads = threads
        self.clip = Clip()
        self._state = AdamState(optimizer, state_dtype)
        self._scratch = torch.empty(0)  # for steps on the device, which has them one after the other
        self._settings: list[Hyperparameters] = []
        self._groups: dict[Region, list[int | None]] = {}
        self._strange: list[tuple[Region, int]] = []
        self._due: dict[Region, list[Due | None]] = {}

    def allocate(self) -> None:
        """Make room for the state of every region."""
        self._state.allocate(self._trained.regions)
        for region in self._trained.regions:
            if region.resident and len(self._scratch) < region.chunk_numel:
                self._scratch = torch.empty(region.chunk_numel, dtype=torch.float32, device=region.weights.device)

    def begin(self, due: Sequence[Master]) -> None:
        """Read the settings of every group, and the group of what is due; later changes do not count."""
        self._read_settings()
        for master in due:
            if (gradient := master.tensor.grad) is not None and gradient.is_sparse:
                raise RuntimeError(
                    f"{master.name}: {type(self._optimizer).__name__} does not support sparse gradients. "
                    "Use torch.optim.SparseAdam for it, or build the embedding with sparse=False."
                )
        self._groups = self._trained.groups(due)
        self._strange = [
            (region, index)
            for region, groups in self._groups.items()
            for index in self._state.strange(region, (i for i, group in enumerate(groups) if group is not None))
        ]

    def begin_early(self) -> None:
        """Read the settings; `expect` says which gradients are complete."""
        self._read_settings()
        self._due = {region: [None] * len(region.masters) for region in self._trained.regions}

    def expect(self, region: Region, chunk: Chunk) -> bool:
        """A chunk is to be stepped before the step is counted; False if that cannot be."""
        indices = [piece.index for piece in chunk.pieces]
        groups = [self._trained.group_of.get(region.masters[index].tensor) for index in indices]
        if None in groups or self._state.strange(region, indices):
            return False
        for index, group in zip(indices, groups, strict=True):
            assert group is not None
            self._due[region][index] = self._state.steps(region, index) + 1, group
        return True

    def settings_changed(self) -> bool:
        """Whether the settings are no longer those that were read last."""
        return self._settings != [Hyperparameters.of(self._optimizer, group) for group in self._optimizer.param_groups]

    def has_state(self) -> bool:
        """Whether the state of everything due is where steps change it."""
        return not self._strange

    def count(self) -> None:
        """The step is made: count it for every parameter that has a gradient."""
        for region, index in self._strange:
            self._state.attach(region, index)
        for region, groups in self._groups.items():
            steps = self._state.count(region, groups)
            self._due[region] = [
                None if group is None else (step, group) for step, group in zip(steps, groups, strict=True)
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
        moments = self._state.moments[region]
        assert isinstance(moments, FloatMoments)
        return DeviceStep(region, chunk, sources, moments, runs, self._scratch)

    def adopt_state(self) -> None:
        """Take state that was loaded into the optimizer, in ordinary tensors, into the arenas."""
        self._state.adopt(self._trained.regions)

    def memory(self) -> list[Tensor]:
        """Host tensors that a step changes."""
        with torch._C.DisableTorchFunction():  # as in the state's
            masters = [region.master.flat(0, region.numel) for region in self._trained.regions]
        return masters + self._state.memory()

    def saved(self, deferring: bool) -> dict[Tensor, dict[str, Tensor]]:
        """The moments of each parameter of which other ranks hold parts, for a state dict; see `moments.saved`."""
        return self._state.saved(self._trained.regions, deferring)

    def bring_home(self) -> None:
        """Give state that is on the device to the optimizer on the CPU; training is over."""
        self._state.bring_home(self._trained.regions)

    def inherit_on_fork(self) -> None:
        """Make the moments ordinary memory for children of this process, once training is over."""
        self._state.inherit_on_fork()

    def _read_settings(self) -> None:
        self.allocate()
        self._trained.look()  # asked anew each time: users move parameters between groups and take them out
        self._settings = [Hyperparameters.of(self._optimizer, group) for group in self._optimizer.param_groups]

    def _runs(self, region: Region, chunk: Chunk) -> Iterator[tuple[int, int, Due]]:
        """Neighbouring pieces that make the same step with the same settings, joined."""
        all_due = self._due[region]
        for due, pieces in groupby(chunk.pieces, key=lambda piece: all_due[piece.index]):
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
        moments, settings = self._state.moments[region], self._arguments(due, scale)
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
