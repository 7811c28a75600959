"""What all policies of the step share: the micro-batches of a window, the ring, and what each move costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_cpu_offload.estimate.timeline import Timeline
from lightning_cpu_offload.estimate.work import Load, Rates, Unit, Window, loads
from lightning_cpu_offload.offload.pipeline import EARLY_DEPTH

FINITE_BYTES = 2
"""Bytes per parameter that looking for a gradient that is not finite reads on the device."""

CLIP_BYTES = 6
"""Bytes per parameter that clipping the norm moves on the device: one read for it, one read and write to scale."""

DEVICE_STEP_BYTES = 28
"""Bytes per parameter of AdamW on the device, FP32 state and BF16 gradient and weight."""

RESIDENT_STEP_BYTES = 100
"""Bytes per parameter of the same in torch's operations, one after the other, for what is resident on the device."""

ADD_BYTES = 10
"""Bytes per parameter of adding a BF16 gradient to an FP32 sum on the host."""

STORE_BYTES = 6
"""Bytes per parameter of storing the first one there."""

SUM_BYTES = 4
"""Bytes per parameter of reading the FP32 sum in the step."""


@dataclass(frozen=True)
class Staging:
    """The host's side of transfers.

    Attributes:
        slot_bytes: Size of a staging buffer, so of a chunk on the device.
        slots: Buffers in the ring.
        early_slots: Buffers in the ring of `early`; the last `slots` of them serve what is left after backward.
        in_flight_bytes: Gradients that may wait on the device for their way out, under `host`.
        device_fraction: Part of the parameters that policies with a share of the device step there, from 0 to 1.
        finite_check: Whether a step is skipped if a gradient is not finite, which has to be known before it begins.
    """

    slot_bytes: int
    slots: int
    early_slots: int = EARLY_DEPTH
    in_flight_bytes: int = 64 << 20
    device_fraction: float = 0.25
    finite_check: bool = True


class Schedule:
    """What all policies share: the micro-batches of a window, and the ring.

    Args:
        window: What is computed.
        rates: How fast.
        staging: The ring.

    Attributes:
        clips: Whether the norm of all gradients can be known before the step.
        shares: Whether the device steps a part of the parameters.
        loads: The chunks that the host steps.
    """

    clips = True
    shares = False

    def __init__(self, window: Window, rates: Rates, staging: Staging) -> None:
        self.window, self.rates, self.staging = window, rates, staging
        self.line = Timeline()
        self._resident = 0  # parameters stepped on the device
        on_host = self._on_host() if self.shares else enumerate(window.units)
        self.loads = loads(on_host, staging.slot_bytes, window.state_dtype)
        self._weights = [0.0] * len(window.units)  # when each parameter may be read again
        self._slots = [0.0] * staging.slots
        self._next_slot = 0

    def _on_host(self) -> list[tuple[int, Unit]]:
        """All but the first parameters in forward order, with which the next forward begins."""
        on_host = []
        for index, unit in enumerate(self.window.units):
            if self._resident + unit.numel <= self.staging.device_fraction * self.window.numel:
                self._resident += unit.numel
            else:
                on_host.append((index, unit))
        return on_host

    def run(self) -> float:
        """Add one window; returns when its last backward ends."""
        ends = self.micro_batches()
        self.update(ends)
        return max(ends, default=0.0)

    def update(self, ends: Sequence[float]) -> None:
        """Add what turns gradients into weights, given when the backward of each parameter ends."""
        raise NotImplementedError

    def micro_batches(self) -> list[float]:
        """Add all forwards and backwards; returns when the last backward of each parameter ends."""
        for _ in range(self.window.accumulate - 1):
            self.forward()
            self.whole_backward()
        self.forward()
        return [self.backward(index) for index in reversed(range(len(self._weights)))][::-1]

    def whole_backward(self) -> None:
        """Add a backward after which nothing begins, in one piece."""
        self.compute("backward", self.window.flops * self.window.backward)

    def forward(self) -> None:
        """Add a forward; its first one waits for each parameter in turn."""
        if not any(self._weights):
            self.compute("forward", self.window.flops)
            return
        for unit, ready in zip(self.window.units, self._weights, strict=True):
            self.compute("forward", unit.flops, ready)
        self._weights = [0.0] * len(self._weights)

    def backward(self, index: int, *after: float) -> float:
        """Add the backward of one parameter."""
        return self.compute("backward", self.window.units[index].flops * self.window.backward, *after)

    def compute(self, name: str, flops: float, *after: float) -> float:
        """Add products on the device."""
        return self.line.add("compute", name, flops / self.rates.flops, *after)

    def check(self) -> float:
        """Add what is read of the gradients on the device before any step may begin."""
        nbytes = CLIP_BYTES * self.window.clip + FINITE_BYTES * self.staging.finite_check
        return self.line.add("compute", "check", nbytes * self.window.numel / self.rates.device)

    def step_resident(self, *after: float) -> None:
        """Add the step of what is resident on the device, if anything is."""
        if self._resident:
            self.line.add("compute", "step", RESIDENT_STEP_BYTES * self._resident / self.rates.device, *after)

    def fetch(self, load: Load, *after: float) -> float:
        """Add the way out of one chunk of gradients."""
        return self.line.add("d2h", "gradients", load.nbytes / self.rates.d2h, *after)

    def step(self, load: Load, *after: float, nbytes: float | None = None) -> float:
        """Add the host step of one chunk."""
        nbytes = load.step_bytes if nbytes is None else nbytes
        return self.line.add("host", "step", nbytes / self.rates.host, *after)

    def push(self, load: Load, *after: float) -> float:
        """Add the way back of one chunk of weights, which the next forward waits for."""
        pushed = self.line.add("h2d", "weights", load.nbytes / self.rates.h2d, *after)
        for index in load.units:
            self._weights[index] = max(self._weights[index], pushed)
        return pushed

    def pipeline(self, chunks: Iterable[Load], begin: float) -> None:
        """Add out, step and back of chunks through the ring, all after `begin`."""
        for load in chunks:
            self.through_slot(load, begin, begin)

    def through_slot(self, load: Load, complete: float, unread: float) -> float:
        """Add one chunk's way through a slot, given when its gradients are complete and its weights unread.

        Returns when its weights are back.
        """
        slot = self._next_slot % len(self._slots)
        self._next_slot += 1
        done = self.step(load, self.fetch(load, complete, self._slots[slot]))
        self._slots[slot] = self.push(load, done, unread)
        return self._slots[slot]
