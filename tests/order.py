"""What is ordered before what: vector clocks over the two threads and the three lanes, and who touches which bytes.

Two accesses to the same bytes, one of them a write, must be ordered by launches, events and finished tasks, whatever
the schedule happened to be. What is not ordered is a race, even in a run whose numbers are right.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Agent = Literal["thread", "host", "compute", "d2h", "h2d"]
"""Who acts: the training thread, the host lane's thread, or a lane of the device."""

Clock = dict[Agent, int]
Span = tuple[int, int]
"""First byte and one past the last."""

PAGE = 1 << 10
"""Accesses are kept by pages, so that only those nearby are compared."""


@dataclass(frozen=True)
class Access:
    """Some agent touched some bytes at a time of its own clock.

    Attributes:
        span: The bytes.
        agent: Who.
        time: When, by the agent's own clock.
        launched: When the training thread asked for it; None if it did not.
        writes: Whether it changed them.
        what: Name and call site.
    """

    span: Span
    agent: Agent
    time: int
    launched: int | None
    writes: bool
    what: str


class Order:
    """The happens-before relation of one run.

    Attributes:
        conflicts: Unordered accesses, with both call sites.
    """

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self._clocks: dict[Agent, Clock] = defaultdict(dict)
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._device = Places()
        self._host = Places()

    def now(self, agent: Agent) -> Clock:
        """All that is ordered before the agent's next act."""
        return dict(self._clocks[agent])

    def tick(self, agent: Agent) -> int:
        """The time of the agent's next act, by its own clock."""
        clock = self._clocks[agent]
        clock[agent] = clock.get(agent, 0) + 1
        return clock[agent]

    def join(self, agent: Agent, clock: Clock) -> None:
        """What the agent does from now on comes after all that `clock` knows."""
        own = self._clocks[agent]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def touch(self, agent: Agent, reads: Iterable[Span], writes: Iterable[Span], what: str) -> None:
        """The agent touches bytes."""
        time = self.tick(agent)
        launched = self._clocks["thread"].get("thread", 0)
        for spans, is_write in ((reads, False), (writes, True)):
            for span in spans:
                if span[0] < span[1]:
                    self._touch(Access(span, agent, time, launched, is_write, what))

    def transfer(self, host: Sequence[Span], device: Sequence[Span]) -> None:
        """A copy between these: it shows on which side they are."""
        for span in host:
            self._host.add(span)
        for span in device:
            self._device.add(span)

    def operation(
        self, agent: Literal["thread", "host"], reads: list[Span], writes: list[Span], what: str, waits: bool
    ) -> None:
        """A torch operation that a thread calls: a kernel of the compute lane, or work of the thread itself.

        What lies on which side is known once it has been copied to the other one or the host lane has worked on it.
        An operation with a device operand is a kernel; with both, or if it `waits`, the training thread waits for it.
        What the host lane's thread does to device memory happens on no lane: its stream need not be the module's.
        """
        spans = [*reads, *writes]
        on_device = [span in self._device for span in spans]
        on_host = [span in self._host for span in spans]
        if agent == "host" and not any(on_device):
            for span in spans:
                self._host.add(span)
        if agent == "host" or (any(on_host) and not any(on_device)):
            self.touch(agent, reads, writes, what)
            return
        self.join("compute", self._clocks[agent])
        mixed = {span for span, host, device in zip(spans, on_host, on_device, strict=True) if host and not device}
        self.touch("compute", (s for s in reads if s not in mixed), (s for s in writes if s not in mixed), what)
        if waits or mixed:
            self.join(agent, self._clocks["compute"])
            self.touch(agent, (s for s in reads if s in mixed), (s for s in writes if s in mixed), what)

    def allocated(self, span: Span) -> None:
        """The bytes are new: what was there is gone, and came before."""
        for page in _pages(span):
            if accesses := self._accesses.get(page):
                self._accesses[page] = [access for access in accesses if not overlap(access.span, span)]
        self._device.drop(span)
        self._host.drop(span)

    def _touch(self, new: Access) -> None:
        clock = self._clocks[new.agent]
        for page in _pages(new.span):
            kept = []
            for old in self._accesses[page]:
                if overlap(old.span, new.span):
                    ordered = old.agent == new.agent or old.time <= clock.get(old.agent, 0) or self._by_launch(old, new)
                    if not ordered and (old.writes or new.writes):
                        self._conflict(old, new)
                    covered = new.span[0] <= old.span[0] and old.span[1] <= new.span[1]
                    if ordered and covered and (new.writes or (not old.writes and old.agent == new.agent)):
                        continue
                kept.append(old)
            kept.append(new)
            self._accesses[page] = kept

    def _by_launch(self, old: Access, new: Access) -> bool:
        """Whether the old access was the training thread's own work, taken for a kernel, and so came before."""
        if old.agent != "compute" or old.span in self._device or old.launched is None:
            return False
        return old.launched <= self._clocks[new.agent].get("thread", 0)

    def _conflict(self, old: Access, new: Access) -> None:
        verbs = {False: "reads", True: "writes"}
        report = f"{new.agent} {verbs[new.writes]} at {new.what} what {old.agent} {verbs[old.writes]} at {old.what}"
        if report not in self.conflicts:
            self.conflicts.append(report)


class Places:
    """A set of byte ranges."""

    def __init__(self) -> None:
        self._spans: dict[int, set[Span]] = defaultdict(set)

    def add(self, span: Span) -> None:
        """Take in a range."""
        for page in _pages(span):
            self._spans[page].add(span)

    def drop(self, span: Span) -> None:
        """Forget all ranges that overlap."""
        for page in _pages(span):
            if spans := self._spans.get(page):
                self._spans[page] = {other for other in spans if not overlap(other, span)}

    def __contains__(self, span: Span) -> bool:
        """Whether some range overlaps."""
        begin, end = span
        for page in _pages(span):
            for first, last in self._spans.get(page, ()):
                if first < end and begin < last:
                    return True
        return False


def span_of(tensor: Tensor) -> Span:
    """The bytes from the first element of a tensor to its last one."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def call_site(quiet: Sequence[str]) -> str:
    """File and line of the innermost frame that is neither torch's nor one of these files'."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in quiet
        or frame.f_code.co_filename == __file__
        or "/torch/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _pages(span: Span) -> range:
    return range(span[0] // PAGE, (span[1] - 1) // PAGE + 1)


def overlap(one: Span, other: Span) -> bool:
    """Whether two ranges share a byte."""
    return one[0] < other[1] and other[0] < one[1]
