"""Lanes and events: the only file that knows streams.

Work is queued on four lanes, each in order, and runs concurrently with the other lanes:

    compute   ..backward| forward of the next batch ........      the device's current stream
    d2h              |c0|c1|c2|c3|                               gradients leave
    host                |k0|k1|k2|k3|                            the CPU steps chunk after chunk, on a thread of its own
    h2d                    |w0|w1|w2|w3|                         weights return

An event marks a point of a device lane; a lane, or a thread of the host, waits for it. Host work is a task; it waits
for events and queues copies itself, and the training thread waits for the task. Each wait in `pipeline.py` names the
hazard it closes. The engine of a CPU "device" copies at once, so its waits for events are empty; the very same
pipeline runs on both.

While somebody records, work on a lane is marked where it begins and where it ends, with the time of either.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cpu_offload.offload.memory import end_to_end
from lightning_cpu_offload.offload.worker import Task, Worker

Lane = Literal["compute", "d2h", "h2d"]

AnyLane = Lane | Literal["host"]

Mark = tuple[AnyLane, object, Callable[[], float]]
"""A lane, what begins there (None: what has begun ends), and what tells when that was, once it has happened: seconds of
`time.perf_counter`."""


class Engine(Protocol):
    """What the pipeline asks of a device.

    Attributes:
        device: Where the module computes.
        overlaps: Whether it pays to let the training thread go on while host work runs.
        awaited: Whether a thread waits for host work.
        marks: Where `mark` writes; None: nobody records.
    """

    device: torch.device
    overlaps: bool
    awaited: bool = False
    marks: list[Mark] | None = None

    def event(self) -> Any:
        """A new event; events are made once and recorded again and again."""

    def record(self, event: Any, lane: Lane) -> None:
        """Mark the end of what is queued on `lane` by now."""

    def wait(self, lane: Lane, event: Any) -> None:
        """Queue nothing more on `lane` before `event` has happened; the host goes on."""

    def host_wait(self, event: Any) -> None:
        """Block the calling thread until `event` has happened."""

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        """Queue `dst.copy_(src)` on `lane`."""

    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        """Queue a copy of many small dense tensors, one behind the other, into the vector `dst`."""

    def launch(
        self, lane: Lane, function: Callable[[], object], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Queue torch operations on `lane`; what they read and write is named for engines that check it."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue host work: tasks run one after the other, without autograd."""

    def finish(self, task: Task) -> None:
        """Block the calling thread until `task` has run."""

    def synchronize(self) -> None:
        """Block the calling thread until the device's lanes are empty."""

    def clear_error(self) -> None:
        """Forget an error that the device reports once more at the next call: a refused page lock, for instance."""

    def shutdown(self) -> None:
        """End the host thread, after the work it has."""

    def training_goes_on(self) -> bool:
        """Whether the training thread has work of its own while host work runs."""
        return self.overlaps and not self.awaited

    def record_marks(self) -> list[Mark]:
        """Begin to record; it ends where `marks` becomes None again."""
        self.marks = []
        return self.marks

    def mark(self, lane: AnyLane, what: object) -> None:
        """Note, while somebody records, that `what` begins at the end of the lane's queue; None: that it has ended."""
        marks = self.marks  # asked once: the recording may end meanwhile
        if marks is not None:
            marks.append((lane, what, self._moment(lane)))

    def _moment(self, lane: AnyLane) -> Callable[[], float]:
        now = time.perf_counter()
        return lambda: now


class HostThread(Engine):
    """The host lane, the same for every device."""

    def __init__(self) -> None:
        self._worker = Worker()

    @override
    def submit(self, tasks: Sequence[Task]) -> None:
        self._worker.submit(tasks)

    @override
    def finish(self, task: Task) -> None:
        self.awaited = True
        try:
            task.wait()
        finally:
            self.awaited = False

    @override
    def clear_error(self) -> None:
        pass  # only devices have such errors

    @override
    def shutdown(self) -> None:
        self._worker.shutdown()


class InlineEngine(HostThread):
    """The engine of a CPU "device": copies happen when they are asked for, and block until they have."""

    overlaps = False  # device and host are the same cores

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @override
    def event(self) -> None:
        return None

    @override
    def record(self, event: None, lane: Lane) -> None:
        pass

    @override
    def wait(self, lane: Lane, event: None) -> None:
        pass

    @override
    def host_wait(self, event: None) -> None:
        pass

    @override
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)

    @override
    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        end_to_end(sources, dst)

    @override
    def launch(
        self, lane: Lane, function: Callable[[], object], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        function()

    @override
    def synchronize(self) -> None:
        pass


class AcceleratorEngine(HostThread):
    """The engine of any accelerator torch knows: CUDA, ROCm, XPU and out-of-tree backends alike."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        # Made once: streams and events made per step leak reserved memory.
        self._streams = {"d2h": torch.Stream(device=device), "h2d": torch.Stream(device=device)}

    def _stream(self, lane: Lane) -> torch.Stream:
        # The current stream is asked for at each call: it belongs to the calling thread, and users may change it.
        return torch.accelerator.current_stream(self.device) if lane == "compute" else self._streams[lane]

    @override
    def event(self) -> torch.Event:
        return torch.Event(device=self.device)

    @override
    def record(self, event: torch.Event, lane: Lane) -> None:
        event.record(self._stream(lane))

    @override
    def wait(self, lane: Lane, event: torch.Event) -> None:
        self._stream(lane).wait_event(event)

    @override
    def host_wait(self, event: torch.Event) -> None:
        event.synchronize()

    @override
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        with self._stream(lane):
            dst.copy_(src, non_blocking=True)

    @override
    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        with self._stream(lane):
            dst.copy_(_end_to_end(sources), non_blocking=True)

    @override
    def launch(
        self, lane: Lane, function: Callable[[], object], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        with self._stream(lane):
            function()

    @override
    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    @override
    def clear_error(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.synchronize()

    @override
    def record_marks(self) -> list[Mark]:
        # Both clocks are read at one moment: the device is idle, and a lane without work runs an event at once.
        self.synchronize()
        self._epoch = self._timed_event("d2h")
        self._epoch.synchronize()
        self._epoch_seconds = time.perf_counter()
        return super().record_marks()

    @override
    def _moment(self, lane: AnyLane) -> Callable[[], float]:
        if lane == "host":
            return super()._moment(lane)
        event, epoch, seconds = self._timed_event(lane), self._epoch, self._epoch_seconds
        return lambda: seconds + epoch.elapsed_time(event) / 1e3

    def _timed_event(self, lane: Lane) -> torch.Event:
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(self._stream(lane))
        return event


def make_engine(device: torch.device) -> Engine:
    """The engine for a device."""
    if device.type == "cpu":
        return InlineEngine(device)
    try:
        return AcceleratorEngine(device)
    except (NotImplementedError, RuntimeError) as error:
        warnings.warn(
            f"torch has no streams for {device} ({error}); transfers block, and nothing overlaps with them.",
            stacklevel=2,
        )
        return InlineEngine(device)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch._utils._flatten_dense_tensors(list(tensors))
