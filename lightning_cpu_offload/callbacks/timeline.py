"""Pictures of a step: lanes over time, as a figure or as a trace for Perfetto and chrome://tracing.

Both take recorded spans, and the tasks of an estimate's time model just as well: any (lane, what, start, end) in
seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("compute", "d2h", "host", "h2d")

Drawn = tuple[str, object, float, float]
"""A lane, what it did, and from when to when, in seconds."""

_MOST_EDGED = 40
"""With more bars of a kind, white edges would cover them."""

_TITLES = {"compute": "compute", "d2h": "d2h\n(gradients)", "host": "host\n(optimizer)", "h2d": "h2d\n(weights)"}
_COLORS = {"d2h": "#e69f00", "host": "#009e73", "h2d": "#56b4e9"}
_WORK_COLORS = {"forward": "#7f9bc4", "backward": "#3b5b92", "check": "#cc79a7", "step": "#009e73", "add": "#b5d99c"}


def draw_timeline(axes: Axes, recorded: Iterable[Drawn], title: str = "") -> None:
    """Draw lanes over time into a matplotlib axes.

    Args:
        axes: Where to draw; everything that is set is the axes' own.
        recorded: What to draw.
        title: Above it.
    """
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for lane, what, start, end in recorded:
        color = _WORK_COLORS.get(str(what), _COLORS.get(lane, "#888888"))
        bars.setdefault((lane, color), []).append((start * 1e3, (end - start) * 1e3))
    for (lane, color), ranges in bars.items():
        row = len(LANES) - 1 - LANES.index(lane)
        edge = 0.3 if len(ranges) < _MOST_EDGED else 0.0
        axes.broken_barh(ranges, (row - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=edge)
    axes.set_yticks(range(len(LANES)), [_TITLES[lane] for lane in reversed(LANES)])
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_step(figure: Figure, recorded: Sequence[Drawn], title: str) -> None:
    """Draw all of a recording into a matplotlib figure, and below it the optimizer's step alone, larger.

    Args:
        figure: Where to draw.
        recorded: What to draw; the step is what moves chunks by number.
        title: Above it.
    """
    step = [(start, end) for _, what, start, end in recorded if isinstance(what, int)]
    axes = figure.subplots(2 if step else 1, squeeze=False)[:, 0]
    draw_timeline(axes[0], recorded, title)
    if step:
        begin, end = min(start for start, _ in step) * 1e3, max(end for _, end in step) * 1e3
        margin = 0.03 * (end - begin)
        draw_timeline(axes[1], recorded, "its optimizer step alone")
        axes[1].set_xlim(begin - margin, end + margin)


def timeline_image(recorded: Sequence[Drawn], title: str) -> Any:
    """A step as an image, uint8[height, width, 4]; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw_step(figure, recorded, title)
    canvas.draw()
    return canvas.buffer_rgba()


def write_trace(path: str | Path, steps: Mapping[str, Sequence[Drawn]]) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open.

    Args:
        path: A JSON file, replaced if it exists; its folder is made.
        steps: What to write under each name; each gets a row of lanes.
    """
    events: list[dict[str, Any]] = []
    for process, (name, recorded) in enumerate(steps.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for thread, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}})
        for lane, what, start, end in recorded:
            label = f"chunk {what}" if isinstance(what, int) else str(what)
            place = {"pid": process, "tid": LANES.index(lane)}
            events.append({"ph": "X", "name": label, **place, "ts": start * 1e6, "dur": (end - start) * 1e6})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
