"""An engine that runs copies as late, or in as odd an order, as the waits allow.

Device memory is ordinary CPU memory. What is queued runs only when something waits for it, and with a seed also at
random moments. The destination of a queued write turns into NaN as soon as nothing ordered before the write still
needs the old values: whoever reads or writes there without having waited gets nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cpu_offload.offload.transfer import Engine, Lane

RANDOM_RUN = 0.15  # chance per call that some queued work runs early; with more, it runs so soon that races hide


@dataclass(eq=False)
class Work:
    """One entry of a lane: what must run before it, and what memory it touches."""

    function: Callable[[], object]
    after: list[Work]
    touches: Sequence[Tensor] = ()
    done: bool = False


@dataclass(eq=False)
class Event:
    """What was last on the lane at the last record; nothing before the first one."""

    work: Work | None = None


class DeferredEngine(Engine):
    """Lanes that run when they must.

    Args:
        seed: Of the random moments at which work also runs; None: as late as possible.
        prompt: Run the compute lane at once when it is made to wait: what follows is a Trainer's code, in line.
    """

    def __init__(self, seed: int | None = None, *, prompt: bool = False) -> None:
        self.device = torch.device("cpu")
        self._random = None if seed is None else random.Random(seed)
        self._prompt = prompt
        self._tails: dict[Lane, Work | None] = {"compute": None, "d2h": None, "h2d": None}
        self._pending: list[Work] = []  # in the order of the calls
        self._poisons: list[tuple[Tensor, list[Work]]] = []

    @override
    def event(self) -> Event:
        return Event()

    @override
    def record(self, event: Event, lane: Lane) -> None:
        event.work = self._tails[lane]
        self._run_some()

    @override
    def wait(self, lane: Lane, event: Event) -> None:
        # For what is recorded by now: a later record of the same event does not move the wait.
        if event.work is not None:
            self._queue(lane, lambda: None, also_after=event.work)
        if lane == "compute" and self._prompt:
            self.run_compute()
        self._run_some()

    @override
    def host_wait(self, event: Event) -> None:
        if event.work is not None:
            self._run(event.work)
        self._run_some()

    @override
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        self.launch(lane, lambda: dst.copy_(src), reads=[src], writes=[dst])

    @override
    def synchronize(self) -> None:
        for work in list(self._pending):
            self._run(work)

    def launch(
        self, lane: Lane, function: Callable[[], object], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Queue any work; `reads` and `writes` are what it touches, contiguous, and nothing is in both."""
        work = self._queue(lane, function, touches=[*reads, *writes])
        earlier = _unfinished(work) - {work}
        for target in writes:
            self._poisons.append((target, [other for other in earlier if _overlap(other.touches, target)]))
        self._spoil()
        self._run_some()

    def run_compute(self) -> None:
        """Run the compute lane to its end, and of the other lanes only what it was made to wait for."""
        if self._tails["compute"] is not None:
            self._run(self._tails["compute"])

    def _queue(
        self, lane: Lane, function: Callable[[], object], touches: Sequence[Tensor] = (), also_after: Work | None = None
    ) -> Work:
        after = [work for work in (self._tails[lane], also_after) if work is not None and not work.done]
        work = Work(function, after, touches)
        self._tails[lane] = work
        self._pending.append(work)
        return work

    @torch.no_grad()
    def _run(self, last: Work) -> None:
        needed = _unfinished(last)
        for work in [work for work in self._pending if work in needed]:
            work.function()
            work.done = True
            work.after.clear()
            self._pending.remove(work)
            self._spoil()

    def _run_some(self) -> None:
        while self._random is not None and self._pending and self._random.random() < RANDOM_RUN:
            self._run(self._random.choice(self._pending))

    def _spoil(self) -> None:
        ready = [target for target, earlier in self._poisons if all(work.done for work in earlier)]
        self._poisons = [item for item in self._poisons if not all(work.done for work in item[1])]
        for target in ready:
            target.detach().view(torch.uint8).fill_(0xFF)  # NaN in every floating-point dtype


def _unfinished(last: Work) -> set[Work]:
    """`last` and all that must run before it, as far as it has not run; it was queued before it, too."""
    found: set[Work] = set()
    stack = [last]
    while stack:
        work = stack.pop()
        if not work.done and work not in found:
            found.add(work)
            stack.extend(work.after)
    return found


def _overlap(tensors: Sequence[Tensor], other: Tensor) -> bool:
    begin, end = other.data_ptr(), other.data_ptr() + other.nbytes
    return any(tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes for tensor in tensors)
