"""Lanes that work at the same time, each doing one thing after the other.

A lane is a queue in which order is fixed when work is handed in, as with device streams and a worker thread. So
the schedule needs no event loop: work begins when its lane is free and all it waits for has happened.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple

Lane = Literal["compute", "d2h", "host", "h2d", "net"]
LANES: tuple[Lane, ...] = ("compute", "d2h", "host", "h2d")
"""Those of one machine."""


class Task(NamedTuple):
    """What a lane does from `start` to `end`, in seconds."""

    lane: Lane
    name: str
    start: float
    end: float


class Timeline:
    """Work on lanes, in the order it was handed in.

    Attributes:
        tasks: All work so far.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._free: dict[Lane, float] = defaultdict(float)

    def add(self, lane: Lane, name: str, seconds: float, *after: float) -> float:
        """Queue work on a lane and return when it ends.

        Args:
            lane: Who does it.
            name: What it is, for pictures.
            seconds: How long it takes.
            after: Moments before which it may not begin.
        """
        start = max(self._free[lane], *after, 0.0)
        self._free[lane] = start + seconds
        self.tasks.append(Task(lane, name, start, start + seconds))
        return start + seconds

    def busy(self, lane: Lane, since: float, until: float) -> float:
        """Seconds between two moments in which a lane works."""
        spans = (min(task.end, until) - max(task.start, since) for task in self.tasks if task.lane == lane)
        return sum(span for span in spans if span > 0)
