"""One row for each way to train a module: what it takes on the device and on the host, and how long its steps are."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.estimate.memory import CannotRun, Compute, Course, DeviceMemory, course, weight_bytes
from lightning_cpu_offload.estimate.replay import Keeping
from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.subject import Subject, subject
from lightning_cpu_offload.estimate.time import StepTime, step_time
from lightning_cpu_offload.estimate.tracker import GRADIENTS, IN_FLIGHT, SCRATCH, STATE, WEIGHTS
from lightning_cpu_offload.estimate.ways import DEFAULT, Way, configured, ways
from lightning_cpu_offload.estimate.work import Rates, Window, loads
from lightning_cpu_offload.offload.attach import Settings, slot_bytes
from lightning_cpu_offload.offload.moments import BORDER_BYTES, moment_bytes
from lightning_cpu_offload.offload.pipeline import RING_DEPTH
from lightning_cpu_offload.offload.resident import choose

CONTEXT_BYTES = 400 << 20
"""What a device's driver and libraries take beside torch's allocator; a few hundred MB on current cards."""

PROCESS_BYTES = 1 << 30
"""Python, torch, and the host's side of a device context."""

RECOMPUTES = 0.25
"""Part of the forward above which, where backward computes it again, the module is taken to do so on purpose."""


@dataclass(frozen=True)
class Row:
    """What one way needs.

    Attributes:
        name: What the user writes.
        device: Its peak on the device.
        host: Bytes on the host by category.
        pinned_bytes: Of them page-locked.
        checkpoint_bytes: Size of a checkpoint.
        step: Time of an optimizer step; None where the operations are not known.
        by_shapes: Whether the step could not be run, so that activations are missing from `device`.
    """

    name: str
    device: DeviceMemory
    host: dict[str, int]
    pinned_bytes: int
    checkpoint_bytes: int
    step: StepTime | None
    by_shapes: bool = False

    @property
    def device_bytes(self) -> int:
        """What the card must have: what the allocator reserves, and the context."""
        return self.device.reserved + CONTEXT_BYTES

    @property
    def host_bytes(self) -> int:
        """What the process takes on the host."""
        return sum(self.host.values())


@dataclass
class Survey:
    """Builds rows for one module.

    Args:
        module: A LightningModule, built anywhere.
        batch: One batch.
        compute: How steps compute under the offload.
        rates: Of the machine.
        device_fraction: For the way of that name.
        settings: What the user gave the strategy; None: nothing, or no strategy of this package.
        accumulate: Micro-batches of a window.
        clip: Whether the norm is clipped.
        vram: Bytes the device has; None: not known.

    Attributes:
        reason: Why the step could not be run; empty if it could.
    """

    module: Any
    batch: Any
    compute: Compute
    rates: Rates
    device_fraction: float = 0.25
    settings: Settings | None = None
    accumulate: int = 1
    clip: bool = False
    vram: int | None = None
    reason: str = ""
    _courses: dict[tuple[bool, bool], Course] = field(default_factory=dict)
    _tracked: dict[tuple[bool, bool, Keeping], DeviceMemory] = field(default_factory=dict)

    @cached_property
    def subject(self) -> Subject:
        """The module as its optimizers see it."""
        return subject(self.module)

    @cached_property
    def configured(self) -> Way | None:
        """The way of the strategy's settings, under the name of the general one that it is, if it is one."""
        if self.settings is None:
            return None
        total = sum(self.subject.bytes_of.values())
        own = configured(self.settings, total, has_room=self.vram is None or 3 * self._weight_bytes <= self.vram)
        return next((way for way in ways(self.device_fraction) if way == own), own)

    def rows(self) -> list[Row]:
        """Every way that the settings allow, without and, where the module does not do it already, with recomputing."""
        every = ways(self.device_fraction)
        if self.configured is not None and self.configured not in every:
            every.insert(1, self.configured)
        allowed = [way for way in every if self._allows(way)]
        rows = [self.row(way) for way in allowed]
        if not self.reason and not self._recomputes():
            candidates = [self.row(way.recomputing()) for way in allowed]
            rows += [new for new, old in zip(candidates, rows, strict=True) if new.device.peak < old.device.peak]
        return rows

    def _allows(self, way: Way) -> bool:
        return (way.clips or not self.clip) and (self.subject.fused or not way.needs_adam)

    def row(self, way: Way) -> Row:
        """What one way needs."""
        device, state = self._device(way), self.subject.state_bytes
        resident = choose(self.subject.bytes_of, way.share * sum(self.subject.bytes_of.values()))
        if way.policy == "device":
            device = device.plus(STATE, state)
        elif resident:
            device = device.plus(STATE, sum(self.subject.bytes_of[parameter] for parameter in resident))
            device = device.plus(SCRATCH, self._scratch(way, resident))
        host, pinned = self._host(way, resident)
        every = (*self.module.parameters(), *self.module.buffers())
        return Row(
            name=way.name,
            device=device,
            host=host,
            pinned_bytes=pinned,
            checkpoint_bytes=sum(4 * tensor.numel() for tensor in every) + state,
            step=self._step(way, device),
            by_shapes=bool(self.reason),
        )

    @cached_property
    def _weight_bytes(self) -> int:
        """Of all stepped parameters on the device."""
        return sum(unit.numel * unit.itemsize for unit in self.subject.units(self.compute.rule, {}))

    def _staging(self, way: Way) -> Staging:
        size = slot_bytes(self.module, BORDER_BYTES[way.state_dtype])
        return Staging(size, RING_DEPTH, device_fraction=way.share)

    def _scratch(self, way: Way, resident: set[Tensor]) -> int:
        """A chunk in FP32, in which the device steps."""
        held = [(owner, parameter) for _, parameter, owner in self.subject.parameters if parameter in resident]
        least = min(self.compute.rule(owner, parameter, False).itemsize for owner, parameter in held)
        return 4 * (self._staging(way).slot_bytes // least)

    def _recomputes(self) -> bool:
        tracked = self._track(DEFAULT)
        forward = sum(tracked.forward_flops.values())
        return tracked.recomputed_flops > RECOMPUTES * forward

    def _compute(self, way: Way) -> Compute:
        if way.policy != "device":
            return self.compute
        return Compute(context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))

    def _track(self, way: Way) -> DeviceMemory:
        key = way.policy == "device", way.checkpointing
        if key not in self._courses:
            self._courses[key] = course(
                self.module,
                self.batch,
                self._compute(way),
                checkpointing=way.checkpointing,
                optimizers=self.subject.optimizers,
                trained=set(self.subject.group_of),
            )
        keeping = Keeping(way.gradients, self._staging(way).in_flight_bytes, accumulating=self.accumulate > 1)
        known = (*key, keeping)
        if known not in self._tracked:
            self._tracked[known] = self._courses[key].memory(keeping)
        return self._tracked[known]

    def _device(self, way: Way) -> DeviceMemory:
        if not self.reason:
            try:
                return self._track(way)
            except CannotRun as error:
                self.reason = str(error)
        rule = self._compute(way).rule
        weights = weight_bytes(self.module, rule)
        gradients = sum(unit.numel * unit.itemsize for unit in self.subject.units(rule, {}))
        by_category = {WEIGHTS: weights, GRADIENTS: gradients}
        if way.gradients == "host":
            by_category = {WEIGHTS: weights, IN_FLIGHT: min(gradients, self._staging(way).in_flight_bytes)}
        total = sum(by_category.values())
        return DeviceMemory(total, by_category, "not run: weights and gradients alone", total)

    def _host(self, way: Way, resident: set[Tensor]) -> tuple[dict[str, int], int]:
        """Bytes by category, and how many of them are page-locked."""
        host = {"process": PROCESS_BYTES}
        if way.policy == "device":
            return host, 0
        numel = self.subject.numel - sum(parameter.numel() for parameter in resident)
        on_device = sum(self.subject.bytes_of[parameter] - 4 * parameter.numel() for parameter in resident)
        reduced = moment_bytes(way.state_dtype) / moment_bytes("float32") if self.subject.fused else 1.0
        host["masters"] = 4 * numel
        host["optimizer state"] = math.ceil(reduced * (self.subject.state_bytes - on_device))
        if way.gradients == "host" or not self.subject.fused:
            host["gradients"] = 4 * numel
        staged = "planes" if way.policy == "delayed" else "ring"
        host[staged] = self._slots(way) * self._staging(way).slot_bytes
        if kept := self._kept():
            host["converted, not trained"] = kept
        return host, host[staged]

    def _slots(self, way: Way) -> int:
        """How many staging buffers there are."""
        staging = self._staging(way)
        if way.policy == "delayed":  # one for each chunk
            units = self.subject.units(self.compute.rule, {})
            return len(loads(enumerate(units), staging.slot_bytes))
        if not way.clips:
            return staging.early_slots
        return 2 * staging.slots if way.gradients == "host" else staging.slots

    def _kept(self) -> int:
        """Originals of what is held in another dtype on the device and stepped by no optimizer."""
        kept = {}
        for owner in self.module.modules():
            for tensor in (*owner._parameters.values(), *owner._buffers.values()):
                if tensor is not None and id(tensor) not in self.subject.group_of:
                    converted = self.compute.rule(owner, tensor, True) != tensor.dtype
                    kept[id(tensor)] = tensor.nbytes if converted else 0
        return sum(kept.values())

    def _step(self, way: Way, device: DeviceMemory) -> StepTime | None:
        forward = sum(device.forward_flops.values())
        if not forward or not self.subject.parameters:
            return None
        named = {name for name, _, _ in self.subject.parameters}
        flops = {name: value for name, value in device.forward_flops.items() if name in named}
        # What belongs to no stepped parameter (frozen ones, attention before the first) is shared out.
        share = forward / sum(flops.values()) if any(flops.values()) else 0.0
        first = self.subject.parameters[0][0]
        flops = {name: value * share for name, value in flops.items()} if share else {first: forward}
        window = Window(
            units=self.subject.units(self.compute.rule, flops),
            accumulate=self.accumulate,
            backward=device.backward_flops / forward,
            clip=self.clip,
            state_dtype=way.state_dtype,
        )
        with contextlib.suppress(ValueError):
            return step_time(window, self.rates, self._staging(way), way.policy)
        return None
