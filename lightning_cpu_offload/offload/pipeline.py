"""The step's way through the machine: gradients in, host work, weights out, chunk by chunk.

A staging buffer (a slot of the ring) carries one chunk both ways: its gradient arrives in it, the host turns the
gradient into the updated weight in place, and the weight leaves from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.memory import HostMemory, allocate_ring
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import Engine

SLOT_BYTES = 8 << 20
RING_DEPTH = 4

Range = tuple[int, int]
HostWork = Callable[[Region, Chunk, Tensor], Sequence[Range]]
"""Works on one chunk; gets the staged values (one vector, device dtype), returns the ranges of the region whose
staged values are weights to send."""


@dataclass
class StepReport:
    """What one optimizer step moved and cost.

    Attributes:
        host_ms: Time in the optimizer's arithmetic on the host, milliseconds.
        wait_ms: Time the host waited for gradients to arrive, milliseconds.
        total_ms: Time the training thread spent in the whole step, milliseconds.
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
    """One staging buffer and the two moments in its life."""

    buffer: Tensor
    fetched: Any
    pushed: Any
    busy: bool = field(default=False)


class Pipeline:
    """Runs host work over chunks with transfers on both sides of it.

    Args:
        engine: Lanes of the device.
        memory: Where the ring is counted.
        slot_bytes: Size of one staging buffer.
        pin: Page-lock the ring: True, False or `"auto"`.
    """

    def __init__(self, engine: Engine, memory: HostMemory, slot_bytes: int, pin: bool | str) -> None:
        self.engine = engine
        self.report = StepReport()
        buffers, self.pinned = allocate_ring(
            memory, RING_DEPTH, slot_bytes, pin if engine.device.type != "cpu" else False
        )
        self._ring = [Slot(buffer, engine.event(), engine.event()) for buffer in buffers]
        self._ready = engine.event()
        self._done = engine.event()

    @torch.no_grad()
    def run(self, chunks: Sequence[tuple[Region, Chunk]], work: HostWork, *, fetch: bool = True) -> None:
        """Run `work` over `chunks` in order; when it returns, all is queued and all gradients have been read.

        Args:
            chunks: What to work on.
            work: The host's part.
            fetch: Bring the gradients in first; else `work` finds the staged values undefined.
        """
        try:
            self._run(chunks, work, fetch)
        except BaseException:
            # Hazard: what is still queued would write into slots and weights after control has left.
            self.engine.synchronize()
            raise

    def new_report(self) -> None:
        """Begin to count a new step."""
        self.report = StepReport()

    def _run(self, chunks: Sequence[tuple[Region, Chunk]], work: HostWork, fetch: bool) -> None:
        # Hazard: a gradient would leave before backward, still queued on the device, has written it; and a weight
        # would be overwritten while that backward still reads it.
        self.engine.record(self._ready, "compute")
        self.engine.wait("d2h", self._ready)
        self.engine.wait("h2d", self._ready)
        if fetch:
            for slot, (region, chunk) in zip(self._ring, chunks, strict=False):
                self._fetch(slot, region, chunk)
        for index, (region, chunk) in enumerate(chunks):
            slot = self._ring[index % RING_DEPTH]
            self._work(slot, region, chunk, work, fetch)
            following = index + RING_DEPTH
            if fetch and following < len(chunks):
                self._fetch(slot, *chunks[following])
        # Hazard: the next forward would read weights that have not returned yet.
        self.engine.record(self._done, "h2d")
        self.engine.wait("compute", self._done)

    def _fetch(self, slot: Slot, region: Region, chunk: Chunk) -> None:
        if slot.busy:
            # Hazard: the gradient would overwrite a staged weight that has not left yet.
            self.engine.wait("d2h", slot.pushed)
        staged = region.staged(slot.buffer, chunk)
        for piece in chunk.pieces:
            gradient = region.gradient(piece)
            if gradient is not None:
                target = staged[piece.start - chunk.start : piece.stop - chunk.start]
                self.engine.copy("d2h", target, gradient)
                self.report.d2h_bytes += target.nbytes
        self.engine.record(slot.fetched, "d2h")

    def _work(self, slot: Slot, region: Region, chunk: Chunk, work: HostWork, fetched: bool) -> None:
        begin = time.perf_counter()
        if fetched:
            # Hazard: the host would read the staged gradient before it has arrived.
            self.engine.host_wait(slot.fetched)
        elif slot.busy:
            # Hazard: the host would overwrite a staged weight that has not left yet.
            self.engine.host_wait(slot.pushed)
        arrived = time.perf_counter()
        staged = region.staged(slot.buffer, chunk)
        ranges = work(region, chunk, staged)
        self.report.wait_ms += (arrived - begin) * 1e3
        self.report.host_ms += (time.perf_counter() - arrived) * 1e3
        for start, stop in ranges:
            self.engine.copy("h2d", region.weights[start:stop], staged[start - chunk.start : stop - chunk.start])
            self.report.h2d_bytes += (stop - start) * region.weights.element_size()
        self.engine.record(slot.pushed, "h2d")
        slot.busy = True
