"""One step, recorded: when each lane worked on what.

The engine marks where work begins and ends on a lane. A lane does one thing after the other, so a mark that begins
something and the next one of its lane, if that one ends it, are a span; what was under way when the recording began
or ended has no span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_cpu_offload.offload.transfer import Mark


class Span(NamedTuple):
    """What a lane did from `start` to `end`, in seconds from the beginning of the recording.

    Attributes:
        lane: `"compute"`, `"d2h"`, `"host"` or `"h2d"`.
        what: `"forward"` or `"backward"`; the number of a chunk; or `"gradients"` and `"add"` for gradients that leave
            during backward and are added up.
        start: When it began.
        end: When it ended.
    """

    lane: str
    what: object
    start: float
    end: float


def spans(marks: Iterable[Mark]) -> list[Span]:
    """What the marks of a recording say, once all of it has happened; the first span begins at 0."""
    begun: dict[str, tuple[object, float]] = {}
    found = []
    for lane, what, moment in marks:
        now = moment()
        if what is not None:
            begun[lane] = what, now
        elif lane in begun:
            name, start = begun.pop(lane)
            found.append(Span(lane, name, start, now))
    first = min((span.start for span in found), default=0.0)
    return [span._replace(start=span.start - first, end=span.end - first) for span in found]


def busy(recorded: Sequence[Span], lane: str, what: object = None) -> float:
    """Seconds a lane worked, on one thing or (None) on all."""
    return sum(span.end - span.start for span in recorded if span.lane == lane and what in (None, span.what))
