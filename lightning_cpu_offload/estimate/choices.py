"""One row for each way to train a module: what it takes on the device and on the host, and how long its steps are."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_cpu_offload.estimate.memory import CannotRun, Compute, Course, DeviceMemory, course, weight_bytes
from lightning_cpu_offload.estimate.replay import Keeping
from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.subject import Subject, subject
from lightning_cpu_offload.estimate.time import StepTime, step_time
from lightning_cpu_offload.estimate.tracker import GRADIENTS, IN_FLIGHT, STATE, WEIGHTS
from lightning_cpu_offload.estimate.work import Rates, Window

CONTEXT_BYTES = 400 << 20
"""What a device's driver and libraries take beside torch's allocator; a few hundred MB on current cards."""

PROCESS_BYTES = 1 << 30
"""Python, torch, and the host's side of a device context."""

RECOMPUTES = 0.25
"""Part of the forward above which, where backward computes it again, the module is taken to do so on purpose."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: What the user writes.
        policy: Of the time model.
        gradients: Where they live.
        clips: Whether it can clip the norm; else it is left out where clipping is on.
        checkpointing: Whether blocks are recomputed, where the module does not do so itself.
    """

    name: str
    policy: str
    gradients: Any = "device"
    clips: bool = True
    checkpointing: bool = False


WAYS = (
    Way("AdamW on the device (stock, bf16-mixed)", "device"),
    Way('gradients="device"', "exact"),
    Way('gradients="device", nonfinite="raise"', "early", clips=False),
    Way('update="delayed"', "delayed"),
    Way("device_fraction=", "partial"),
    Way('gradients="host"', "host", gradients="host"),
)


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
        staging: The offload's ring.
        accumulate: Micro-batches of a window.
        clip: Whether the norm is clipped.

    Attributes:
        reason: Why the step could not be run; empty if it could.
    """

    module: Any
    batch: Any
    compute: Compute
    rates: Rates
    staging: Staging
    accumulate: int = 1
    clip: bool = False
    reason: str = ""
    _courses: dict[tuple[bool, bool], Course] = field(default_factory=dict)
    _tracked: dict[tuple[bool, bool, Keeping], DeviceMemory] = field(default_factory=dict)

    @cached_property
    def subject(self) -> Subject:
        """The module as its optimizers see it."""
        return subject(self.module)

    def rows(self) -> list[Row]:
        """Every way that the settings allow, without and, where the module does not do it already, with recomputing."""
        ways = [way for way in WAYS if way.clips or not self.clip]
        rows = [self.row(way) for way in ways]
        if not self.reason and not self._recomputes():
            again = [Way(f"{way.name} + checkpointing", way.policy, way.gradients, way.clips, True) for way in ways]
            candidates = [self.row(way) for way in again]
            rows += [new for new, old in zip(candidates, rows, strict=True) if new.device.peak < old.device.peak]
        return rows

    def row(self, way: Way) -> Row:
        """What one way needs."""
        device = self._device(way)
        fraction = self.staging.device_fraction if way.policy == "partial" else 0.0
        host, pinned = self._host(way, fraction)
        numel, state = self.subject.numel, self.subject.state_bytes
        if way.policy == "device":
            device = device.plus(STATE, state)
        elif fraction:
            device = device.plus(STATE, int(fraction * (4 * numel + state)))
        name = f"device_fraction={fraction}" if fraction else way.name
        if way.policy == "partial" and way.checkpointing:
            name += " + checkpointing"
        elsewhere = sum(t.numel() * 4 for t in (*self.module.parameters(), *self.module.buffers())) - 4 * numel
        return Row(
            name=name,
            device=device,
            host=host,
            pinned_bytes=pinned,
            checkpoint_bytes=4 * numel + state + elsewhere,
            step=self._step(way, device),
            by_shapes=bool(self.reason),
        )

    def _recomputes(self) -> bool:
        tracked = self._track(WAYS[1])
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
        keeping = Keeping(way.gradients, self.staging.in_flight_bytes, accumulating=self.accumulate > 1)
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
        gradients = sum(p.numel() * rule(owner, p, False).itemsize for _, p, owner in self.subject.parameters)
        by_category = {WEIGHTS: weights, GRADIENTS: gradients}
        if way.gradients == "host":
            by_category = {WEIGHTS: weights, IN_FLIGHT: min(gradients, self.staging.in_flight_bytes)}
        total = sum(by_category.values())
        return DeviceMemory(total, by_category, "not run: weights and gradients alone", total)

    def _host(self, way: Way, fraction: float) -> tuple[dict[str, int], int]:
        """Bytes by category, and how many of them are page-locked."""
        numel = self.subject.numel
        host = {"process": PROCESS_BYTES}
        if way.policy == "device":
            return host, 0
        host["masters"] = int(4 * numel * (1 - fraction))
        host["optimizer state"] = int(self.subject.state_bytes * (1 - fraction))
        host["ring"] = pinned = self.staging.slots * self.staging.slot_bytes
        if way.gradients == "host" or not self.subject.fused:
            host["gradients"] = 4 * numel
        if way.policy == "delayed":
            rule = self.compute.rule
            host["planes"] = sum(p.numel() * rule(o, p, False).itemsize for _, p, o in self.subject.parameters)
            pinned += host["planes"]
        kept = self._kept()
        if kept:
            host["converted, not trained"] = kept
        return host, pinned

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
        )
        with contextlib.suppress(ValueError):
            return step_time(window, self.rates, self.staging, way.policy)
        return None
