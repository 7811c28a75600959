"""Peak memory of a training step under one choice, from the course that one run of it took.

What computes the gradients is the same whatever becomes of them, so one run on fakes serves every choice: here the
gradients of its course stay, or join those of the micro-batch before, or leave.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_cpu_offload.estimate.allocator import reserved_peak
from lightning_cpu_offload.estimate.tracker import GRADIENTS, IN_FLIGHT, Change, Freed, Gradient, Left, Made, Renamed

Gradients = Literal["device", "host"]


@dataclass(frozen=True)
class Keeping:
    """What becomes of gradients.

    Attributes:
        gradients: Where they live until the step.
        in_flight_bytes: Gradients that may wait on the device for their way out, for `gradients="host"`.
        accumulating: Whether the window has more than one micro-batch, so that gradients of the one before are there.
    """

    gradients: Gradients = "device"
    in_flight_bytes: int = 64 << 20
    accumulating: bool = True


class Replay:
    """Memory over a course of events.

    Args:
        keeping: What becomes of gradients.

    Attributes:
        peak: The most bytes at once.
        by_category: What they were.
    """

    def __init__(self, keeping: Keeping) -> None:
        self.peak = 0
        self.by_category: dict[str, int] = {}
        self._keeping = keeping
        self._place: tuple[str, Any, str] | None = None
        self._total = 0
        self._current: Counter[str] = Counter()
        self._blocks: dict[int, tuple[str, int]] = {}
        self._trace: list[tuple[int, int]] = []
        self._taken: set[int] = set()  # blocks of gradients, which are freed here and not by the course
        self._kept: set[int] = set()  # parameters that have a gradient on the device
        self._in_flight: deque[int] = deque()

    @property
    def operation(self) -> str:
        """Where the peak is: the phase, the operation, and the parameter in whose neighbourhood it stood."""
        if self._place is None:
            return ""
        phase, operation, near = self._place
        return f"{phase}: {operation}" + (f" near {near}" if near else "")

    @property
    def reserved(self) -> int:
        """The most bytes a caching allocator holds over the course."""
        return max(self.peak, reserved_peak(self._trace))

    def run(self, events: Iterable[Change]) -> Replay:
        """Go through a course."""
        for event in events:
            match event:
                case Made(block, nbytes, category, place):
                    self._make(block, nbytes, category, place)
                case Freed(block):
                    if block not in self._taken:
                        self._drop(block)
                case Renamed(block, category):
                    if block not in self._taken:
                        self._rename(block, category)
                case Left(parameter, nbytes):
                    self._leave(parameter, nbytes)
                case Gradient(parameter, block):
                    if block not in self._taken:
                        self._take(parameter, block)
        return self

    def _make(self, block: int, nbytes: int, category: str, place: tuple[str, Any, str]) -> None:
        self._blocks[block] = category, nbytes
        self._trace.append((block, nbytes))
        self._current[category] += nbytes
        self._total += nbytes
        if self._total > self.peak:
            self.peak, self._place = self._total, place
            self.by_category = {name: held for name, held in self._current.items() if held}

    def _drop(self, block: int) -> None:
        category, nbytes = self._blocks.pop(block)
        self._trace.append((block, -nbytes))
        self._current[category] -= nbytes
        self._total -= nbytes

    def _rename(self, block: int, category: str) -> None:
        before, nbytes = self._blocks[block]
        self._blocks[block] = category, nbytes
        self._current[before] -= nbytes
        self._current[category] += nbytes

    def _leave(self, parameter: int, nbytes: int) -> None:
        """What the micro-batch before has left: all gradients, or those that backward made last, on their way."""
        on_host = self._keeping.gradients == "host"
        if not self._keeping.accumulating or (on_host and self._flying() >= self._keeping.in_flight_bytes):
            return
        block = -1 - parameter  # not of the course
        self._make(block, nbytes, GRADIENTS, ("forward", "", ""))
        self._take(parameter, block)

    def _take(self, parameter: int, block: int) -> None:
        self._taken.add(block)
        if self._keeping.gradients == "host":
            # The link may be the slowest: as much as the cap allows is taken to be still on its way.
            self._rename(block, IN_FLIGHT)
            self._in_flight.append(block)
            while len(self._in_flight) > 1 and self._flying() > self._keeping.in_flight_bytes:
                self._drop(self._in_flight.popleft())
        elif parameter in self._kept:
            self._drop(block)  # added to the one that is there
        else:
            self._kept.add(parameter)
            self._rename(block, GRADIENTS)

    def _flying(self) -> int:
        return sum(self._blocks[block][1] for block in self._in_flight)
