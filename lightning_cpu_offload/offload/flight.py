"""One step on its way: what it carries, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cpu_offload.offload.device_step import DeviceStep
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region, Source
from lightning_cpu_offload.offload.worker import Task

Range = tuple[int, int]
HostWork = Callable[[Region, Chunk, Tensor], Sequence[Range]]
"""Works on one chunk; gets the staged values (one vector, device dtype), returns the ranges of the region whose
staged values are weights to send."""

DeviceWork = Callable[[Region, Chunk, Sequence[Source]], DeviceStep]
"""What is to happen on the device to a chunk of a resident region, with its gradients."""


@dataclass
class StepReport:
    """What one optimizer step moved and cost.

    Attributes:
        host_ms: Time in the optimizer's arithmetic on the host, milliseconds.
        wait_ms: Time the host waited for gradients to arrive, milliseconds.
        total_ms: Time the training thread could not go on because of the step, milliseconds.
        d2h_bytes: Bytes of gradients that left the device.
        h2d_bytes: Bytes of weights that returned.
    """

    host_ms: float = 0.0
    wait_ms: float = 0.0
    total_ms: float = 0.0
    d2h_bytes: int = 0
    h2d_bytes: int = 0


@dataclass
class Slot:
    """One staging buffer and the two moments in its life; without bytes for a chunk that is stepped on the device."""

    buffer: Tensor
    fetched: Any
    pushed: Any
    busy: bool = False


@dataclass(eq=False)
class Flight:
    """One step on its way.

    Attributes:
        chunks: What is stepped, in this order.
        work: The host's part.
        sources: The gradients of each chunk, kept alive until they have left, or, if they do not leave, until the
            flight has landed; empty if none are fetched.
        on_device: What is done to chunks that stay on the device.
        checks: On the device, uint8: brought to the host first, for `decide`.
        decide: Asked on the host thread, with the checks, before the first chunk: whether to step at all.
        finished: Called on the training thread when the host is done.
        landed: Called on the training thread when nothing is on its way any more.
        stepped: Masters and state that change while the step is on its way.
        report: What it moved and cost.
        slots: One for each chunk.
        following: By the number of a chunk, that of the one which takes its slot next.
        ranges: Of each chunk, which staged values are weights.
    """

    chunks: list[tuple[Region, Chunk]]
    work: HostWork
    sources: list[list[Source]] = field(default_factory=list)
    checks: Tensor | None = None
    on_device: DeviceWork | None = None
    decide: Callable[[Tensor], bool] | None = None
    finished: Callable[[], None] | None = None
    landed: Callable[[], None] | None = None
    stepped: Sequence[Tensor] = ()
    report: StepReport = field(default_factory=StepReport)
    slots: list[Slot] = field(default_factory=list)
    following: dict[int, int] = field(default_factory=dict)
    ranges: list[Sequence[Range]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    grounded: bool = False
    error: BaseException | None = None

    def attempt(self, part: Callable[[], None]) -> None:
        """A part of it on the host thread: after a failure nothing more is done, and the training thread hears."""
        if self.grounded:
            return
        try:
            part()
        except BaseException as error:
            self.grounded, self.error = True, error
