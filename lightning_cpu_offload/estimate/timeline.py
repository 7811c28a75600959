"""Lanes that work at the same time, each doing one thing after the other.

A lane is a queue in which order is fixed when work is handed in, as with device streams and a worker thread. So
the schedule needs no event loop: work begins when its lane is free and all it waits for has happened.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
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
    """Work on lanes, in the order it was handed in."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Lane, str, float, float]] = []  # plain, as there are hundreds of thousands
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
        self._free[lane] = end = start + seconds
        self._tasks.append((lane, name, start, end))
        return end

    @property
    def tasks(self) -> list[Task]:
        """All work so far."""
        return self.between(-math.inf, math.inf)

    def between(self, since: float, until: float) -> list[Task]:
        """The work of which a part lies between two moments."""
        return [Task(*task) for task in self._tasks if task[3] > since and task[2] < until]


def busy(tasks: Iterable[Task], lane: Lane, since: float, until: float) -> float:
    """Seconds between two moments in which a lane works."""
    spans = (min(task.end, until) - max(task.start, since) for task in tasks if task.lane == lane)
    return sum(span for span in spans if span > 0)
