"""The step's way through the machine: gradients in, host work, weights out, chunk by chunk.

A staging buffer (a slot) carries one chunk both ways: its gradient arrives in it, the host turns the gradient into
the updated weight in place, and the weight leaves from it. One step on its way is a flight: it is launched from the
training thread, which may go on, and has landed when its weights are on the device and its masters at rest.

Chunks of resident regions pass through no slot: they are stepped on the lane by which weights return. Nor do chunks
that another rank steps: their weights come from there. Every rank has all chunks of a step on its way, in one order.

A flight may begin under the backward that still makes its gradients: chunks are then worked on as their gradients are
complete, and their weights wait in their slots until that backward, which reads the weights of before, has ended.

With `hold`, a flight's weights leave only when the next flight is launched: the host works under the whole next
window, and the device is one step behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch

from lightning_cpu_offload.offload.flight import Flight, HostWork, Slot, StepReport
from lightning_cpu_offload.offload.memory import HostMemory, allocate_ring
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import Engine
from lightning_cpu_offload.offload.worker import Task

SLOT_BYTES = 8 << 20
RING_DEPTH = 4
EARLY_DEPTH = 16
"""Staging buffers where steps begin under backward; the last `RING_DEPTH` of them serve what is left then."""

BETWEEN_STEPS = (
    "the masters are between two steps: with update='early' a step had begun under a backward that then failed or was "
    "interrupted. They are not saved; the last checkpoint stays. Resume from it."
)

Pushed = Callable[[Region, Chunk], None]
"""Called when the weights of a chunk have been queued on the h2d lane."""


class Pipeline:
    """Runs host work over chunks with transfers on both sides of it.

    Args:
        engine: Lanes of the device.
        memory: Where the slots are counted.
        slot_bytes: Size of one slot.
        pin: Page-lock the slots: True, False or `"auto"`.
        depth: Number of slots.
        hold: Let weights leave only with the next flight, which takes a slot for each chunk.
        pushed: Told when weights are on the device.

    Attributes:
        report: What the last flight that landed moved and cost.
        arriving: The flight whose weights are on their way to the device.
        working: The flight the host works on: the same one, or with `hold` the one after it.
        opened: The flight that has begun under backward and is not launched yet.
        torn: Some masters are a step ahead of the others, or will be when the host is done.
    """

    def __init__(
        self,
        engine: Engine,
        memory: HostMemory,
        slot_bytes: int,
        pin: bool | str,
        *,
        depth: int = RING_DEPTH,
        hold: bool = False,
        pushed: Pushed | None = None,
    ) -> None:
        self.engine = engine
        self.hold = hold
        self.report = StepReport()
        self.arriving: Flight | None = None
        self.working: Flight | None = None
        self.opened: Flight | None = None
        self.torn = False
        self.pinned = True
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._pin = pin if engine.device.type != "cpu" else False
        self._pushed = pushed
        self._depth = depth
        self._slots: list[Slot] = []
        self._empty_slots: list[Slot] = []
        self._ready = engine.event()
        self._checked = engine.event()
        self._checks = torch.empty(0, dtype=torch.uint8)
        self.reserve(0)

    def reserve(self, num_chunks: int, num_elsewhere: int = 0) -> None:
        """Have room for steps of so many chunks, and so many of them stepped on the device or by other ranks."""
        if num_chunks and num_chunks >= len(self._checks):
            self._checks = self._memory.staging(num_chunks + 1, bool(self._pin) and self.pinned, "checks")
        missing = (num_chunks - num_elsewhere if self.hold else self._depth) - len(self._slots)
        if missing > 0:
            buffers, pinned = allocate_ring(self._memory, missing, self._slot_bytes, self._pin)
            self._slots += [Slot(buffer, self.engine.event(), self.engine.event()) for buffer in buffers]
            self.pinned = self.pinned and pinned
            if self._pin and not pinned:
                self.engine.clear_error()
        while len(self._empty_slots) < num_elsewhere:
            self._empty_slots.append(Slot(torch.empty(0), self.engine.event(), self.engine.event()))

    def run(
        self,
        chunks: Sequence[tuple[Region, Chunk]],
        work: HostWork,
        *,
        fetch: bool = True,
        report: StepReport | None = None,
    ) -> None:
        """Run `work` over `chunks`, and return when it has landed.

        Args:
            chunks: What to work on.
            work: The host's part.
            fetch: Bring the gradients in first; else `work` finds the staged values undefined.
            report: Where to count it.
        """
        sources = [region.sources(chunk) for region, chunk in chunks] if fetch else []
        self.launch(Flight(list(chunks), work, sources, report=report or StepReport()))
        self.land()

    @torch.no_grad()
    def open(self, flight: Flight) -> None:
        """Begin a step under backward, after the one before has landed; it has no chunks yet."""
        self._leave_after_compute()
        self._fetch_checks(flight)
        self.opened = flight
        self._submit(flight, [partial(self._decide, flight)])

    def has_room(self, flight: Flight) -> bool:
        """Whether one more chunk may be added before the launch."""
        return len(flight.slots) < len(self._slots) - RING_DEPTH

    @torch.no_grad()
    def add(self, flight: Flight, region: Region, chunk: Chunk) -> None:
        """Let the host work on one more chunk of a flight that is open."""
        index = len(flight.slots)
        flight.slots.append(self._slots[index])
        flight.chunks.append((region, chunk))
        flight.sources.append(region.sources(chunk))
        self.torn = True
        self._leave_after_compute()
        self._fetch(flight, index)
        self._submit(flight, [partial(self._work, flight, index)])

    @torch.no_grad()
    def launch(self, flight: Flight) -> None:
        """Queue a step. The one before it lands first; with `hold`, its weights leave now."""
        began = time.perf_counter()
        if flight is self.opened:
            self.opened = None
        elif self.hold:
            self.arriving = self._finish_work()
        else:
            self.land()
        self._leave_after_compute()
        # Hazard: a weight would be overwritten while backward, still queued on the device, reads it.
        self.engine.wait("h2d", self._ready)
        if self.arriving is not None:
            self._push_all(self.arriving)
        num_early = len(flight.slots)
        fetched_now = self._give_slots(flight)
        self._fetch_checks(flight)
        for index in fetched_now if flight.sources else ():
            self._fetch(flight, index)
        flight.tasks = []
        self.working = flight
        if not self.hold:
            self.arriving = flight
        parts = [partial(self._decide, flight)]
        parts += [partial(self._send, flight, index) for index in range(num_early)]
        parts += [partial(self._step, flight, index) for index in range(num_early, len(flight.chunks))]
        self._submit(flight, parts)
        flight.report.total_ms += (time.perf_counter() - began) * 1e3

    def await_decision(self) -> None:
        """Wait until the host knows whether it makes the step."""
        if self.working is not None:
            # Hazard: what the host makes before the first chunk would not be there yet.
            self.engine.finish(self.working.tasks[0])

    def arrive(self, index: int) -> None:
        """Let the compute lane go on only with the weights of the arriving flight's chunks up to number `index`."""
        flight = self.arriving
        if flight is None or not flight.chunks:
            return
        # Hazard: the weights would be awaited before the host has even queued them.
        self.engine.finish(flight.tasks[index + 1])
        # Hazard: what comes next on the device would read weights that have not returned yet.
        self.engine.wait("compute", flight.slots[index].pushed)

    def arrive_all(self) -> None:
        """Let the compute lane go on only with all weights of the arriving flight."""
        if self.arriving is not None:
            self.arrive(len(self.arriving.chunks) - 1)

    def depart(self, index: int) -> None:
        """Let the compute lane go on only without the gradients of the working flight's chunks up to number `index`."""
        if not self.hold or self.working is None:
            self.arrive(index)  # its gradient leaves before its weight returns
            return
        # Hazard: what comes next on the device would write to a gradient that is still being copied.
        self.engine.wait("compute", self.working.slots[index].fetched)

    def land(self) -> None:
        """Wait until nothing is on its way: masters and weights agree, and both may be read and written.

        Raises:
            Exception: What failed on the host.
            RuntimeError: Masters are between two steps, and stay so.
        """
        began = time.perf_counter()
        finished = self._finish_work()
        if self.hold and finished is not None:
            # Hazard: a weight would be overwritten while the device still reads it.
            self.engine.record(self._ready, "compute")
            self.engine.wait("h2d", self._ready)
            self._push_all(finished)
            self.arriving = finished
        self.working = None
        if self.arriving is not None:
            flight = self.arriving
            self.arrive_all()
            self.arriving = None
            if flight.grounded and flight.sources:
                # Hazard: gradients whose arrival nobody awaited, as the step is skipped, would be freed on their way.
                self.engine.synchronize()
            flight.sources = []
            flight.report.total_ms += (time.perf_counter() - began) * 1e3
            self.report = flight.report
            self.torn = self.torn and flight.grounded
            self._settle(flight)
        self._require_whole()

    def _settle(self, flight: Flight) -> None:
        if flight.landed is not None and not self.torn:
            flight.landed()

    def _require_whole(self) -> None:
        flight = self.opened
        if flight is not None and not flight.chunks:  # backward ended before any gradient was complete
            self._await_opening(flight)
            self.opened = None
            self._settle(flight)
        if self.torn:
            raise RuntimeError(BETWEEN_STEPS)

    def before_backward(self) -> None:
        """Wait for weights that forward did not, and let no gradient be written that is still leaving."""
        if not self.hold:
            self.land()
            return
        self.arrive_all()
        if self.working is not None and self.working.sources:
            self.depart(len(self.working.sources) - 1)

    def rest(self) -> None:
        """Let the host memory that is stepped come to rest.

        Where ranks step together and weights are held back, these stay: other ranks may not be here to send theirs.
        """
        flight = self.working
        if self.hold and flight is not None and any(region.partition is not None for region, _ in flight.chunks):
            self._finish_work()
        else:
            self.land()

    def wait_for_device(self) -> None:
        """Block until the device has done all it was given."""
        # Hazard: the host would read weights that are still being written.
        self.engine.synchronize()

    def catch_up(self) -> None:
        """Wait for the step before, as far as the next one has to."""
        if self.hold:
            self._finish_work()
        elif self.opened is not None:
            self._await_opening(self.opened)
        else:
            self.land()

    def _await_opening(self, flight: Flight) -> None:
        # Hazard: the checks with which the flight is launched would take the place of those with which it was opened.
        self.engine.finish(flight.tasks[0])

    def _finish_work(self) -> Flight | None:
        """Wait until the host is done with its flight, and return it; it stays the working one."""
        flight = self.working
        if flight is None:
            return None
        self.engine.finish(flight.tasks[-1])  # an interrupt may end the wait; the host goes on, and we wait again later
        if flight.error is not None:
            self.arriving = self.working = None
            # Hazard: what is still queued would write into slots and weights after control has left.
            self.engine.synchronize()
            raise flight.error
        self.report = flight.report
        finished, flight.finished = flight.finished, None
        if finished is not None:
            finished()
        return flight

    def _leave_after_compute(self) -> None:
        # Hazard: a gradient would leave before backward, still queued on the device, has written it.
        self.engine.record(self._ready, "compute")
        self.engine.wait("d2h", self._ready)

    def _submit(self, flight: Flight, parts: Sequence[Callable[[], None]]) -> None:
        tasks = [Task(partial(flight.attempt, part)) for part in parts]
        flight.tasks += tasks
        try:
            self.engine.submit(tasks)
        except BaseException:
            self.engine.submit(tasks)  # interrupted, maybe before they were queued; each runs once
            raise

    def _give_slots(self, flight: Flight) -> list[int]:
        """A slot for each chunk that has none; returns the chunks whose slots are free now."""
        num_early = len(flight.slots)
        empty, ring = iter(self._empty_slots), cycle([*self._slots[num_early:], *self._slots[:num_early]])
        owners = {id(slot): index for index, slot in enumerate(flight.slots)}
        free = []
        for index, (region, chunk) in enumerate(flight.chunks[num_early:], num_early):
            if not region.takes_slot(chunk):
                flight.slots.append(next(empty))
                if not region.resident:
                    free.append(index)
                continue
            slot = next(ring)
            if id(slot) in owners:
                flight.following[owners[id(slot)]] = index
            else:
                free.append(index)
            flight.slots.append(slot)
            owners[id(slot)] = index
        return free

    def _fetch_checks(self, flight: Flight) -> None:
        if flight.checks is None:
            return
        self.engine.copy("d2h", self._checks[: len(flight.checks)], flight.checks)
        self.engine.record(self._checked, "d2h")

    def _fetch(self, flight: Flight, index: int) -> None:
        slot, (region, chunk) = flight.slots[index], flight.chunks[index]
        if region.is_owned(chunk):
            if slot.busy:
                # Hazard: the gradient would overwrite a staged weight that has not left yet.
                self.engine.wait("d2h", slot.pushed)
            self.engine.mark("d2h", index)
            self._copy_gradient(flight, index)
            self.engine.mark("d2h", None)
        # Also where another rank steps: by it `depart` knows of all chunks before.
        self.engine.record(slot.fetched, "d2h")

    def _copy_gradient(self, flight: Flight, index: int) -> None:
        region, chunk = flight.chunks[index]
        staged = region.staged(flight.slots[index].buffer, chunk)
        for source in flight.sources[index]:
            target = staged[source.start - chunk.start : source.stop - chunk.start]
            if len(source.tensors) == 1:
                self.engine.copy("d2h", target, source.tensors[0].detach().view(-1))
            else:
                self.engine.gather("d2h", target, source.tensors)
            flight.report.d2h_bytes += target.nbytes

    def _decide(self, flight: Flight) -> None:
        if flight.decide is not None:
            num_checks = 0 if flight.checks is None else len(flight.checks)
            if num_checks:
                # Hazard: the host would decide by checks that have not arrived.
                self.engine.host_wait(self._checked)
            flight.grounded = not flight.decide(self._checks[:num_checks])

    def _step(self, flight: Flight, index: int) -> None:
        if flight.chunks[index][0].resident:
            self._step_on_device(flight, index)
            return
        if flight.chunks[index][0].is_owned(flight.chunks[index][1]):
            self._work(flight, index)
        else:
            flight.ranges.append([])
        if flight.sources:
            flight.sources[index] = []  # has left: its memory is free
        if not self.hold:
            self._send(flight, index)

    def _work(self, flight: Flight, index: int) -> None:
        slot, (region, chunk) = flight.slots[index], flight.chunks[index]
        begin = time.perf_counter()
        if flight.sources:
            # Hazard: the host would read the staged gradient before it has arrived.
            self.engine.host_wait(slot.fetched)
        elif slot.busy:
            # Hazard: the host would overwrite a staged weight that has not left yet.
            self.engine.host_wait(slot.pushed)
        arrived = time.perf_counter()
        self.engine.mark("host", index)
        flight.ranges.append(flight.work(region, chunk, region.staged(slot.buffer, chunk)))
        self.engine.mark("host", None)
        flight.report.wait_ms += (arrived - begin) * 1e3
        flight.report.host_ms += (time.perf_counter() - arrived) * 1e3

    def _send(self, flight: Flight, index: int) -> None:
        self._push(flight, index)
        if flight.sources and index in flight.following:
            self._fetch(flight, flight.following[index])

    def _step_on_device(self, flight: Flight, index: int) -> None:
        region, chunk = flight.chunks[index]
        assert flight.on_device is not None
        step = flight.on_device(region, chunk, flight.sources[index])
        self.engine.launch("h2d", step.run, [*step.reads, *step.changes], [*step.changes, *step.writes])
        flight.ranges.append([])
        self._push(flight, index)

    def _push(self, flight: Flight, index: int) -> None:
        slot, (region, chunk) = flight.slots[index], flight.chunks[index]
        self.engine.mark("h2d", index)
        for start, stop in flight.ranges[index]:
            staged = region.staged(slot.buffer, chunk)
            self.engine.copy("h2d", region.weights[start:stop], staged[start - chunk.start : stop - chunk.start])
            flight.report.h2d_bytes += (stop - start) * region.weights.element_size()
        if region.partition is not None:
            weights = region.weights[chunk.start : chunk.stop]
            send = partial(region.partition.broadcast, weights, region.owner(chunk))
            self.engine.launch("h2d", send, reads=[weights], writes=[weights])
        self.engine.mark("h2d", None)
        if self._pushed is not None:
            self._pushed(region, chunk)
        self.engine.record(slot.pushed, "h2d")
        slot.busy = True

    def _push_all(self, flight: Flight) -> None:
        with torch._C.DisableTorchFunction():  # the gate would wait for what leaves only now
            for index in range(len(flight.ranges)):
                self._push(flight, index)
