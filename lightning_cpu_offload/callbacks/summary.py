"""The table at the end of a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Summary:
    """Means over a run of what was recorded, each over the records that have it.

    Attributes:
        steps: Optimizer steps seen.
    """

    steps: int = 0
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> None:
        """Count one record."""
        for name, value in record.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
        self._last.update(record)

    def mean(self, name: str) -> float:
        """The mean of a record's entry; NaN if no record had it."""
        total, count = self._sums.get(name, (math.nan, 1))
        return total / count

    def rows(self) -> list[tuple[str, str]]:
        """What to show, by name; what was not recorded is left out."""
        skipped = int(self._last.get("skipped_steps", 0))
        rows = [("optimizer steps", f"{self.steps:,}" + (f", {skipped:,} skipped" if skipped else ""))]
        for rate in ("tokens/s", "samples/s"):
            rows += self._row(rate, "{:,.0f}", rate)
        rows += self._row("time of a step", "{:,.1f} ms", "step_ms")
        rows += self._row("  of it waiting for the offload", "{:,.1f} ms", "exposed_wait_ms")
        rows += self._row("host step", "{:,.1f} ms", "host_step_ms")
        rows += self._row("  bytes it reads and writes", "{:,.1f} GB/s", "host_gb_per_s")
        rows += self._row("  of what the kernel reaches alone", "{:,.0f} %", "host_percent_of_limit")
        for title, lane in (("gradients to the host", "d2h"), ("weights to the device", "h2d")):
            rows += self._row(title, "{:,.1f} MB a step", f"{lane}_bytes", 1e-6)
            rows += self._row("  while they move", "{:,.1f} GB/s", f"{lane}_gb_per_s")
        for place in ("host", "device"):
            held = {n.partition("/")[2]: b for n, b in self._last.items() if n.startswith(f"{place}_bytes/")}
            seen = [name for name, nbytes in held.items() if nbytes > 0.01 * sum(held.values())]
            rows += [(f"{place}: {name}", f"{held[name] / 1e6:,.1f} MB") for name in seen]
        rows += self._row("device: peak", "{:,.1f} MB", "device_peak_bytes", 1e-6)
        return rows

    def _row(self, title: str, form: str, name: str, scale: float = 1.0) -> list[tuple[str, str]]:
        mean = self.mean(name)
        return [] if math.isnan(mean) else [(title, form.format(mean * scale))]


def show(rows: list[tuple[str, str]], title: str) -> None:
    """Print a table: with rich where it is installed, else as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(rows, title))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plain(rows: list[tuple[str, str]], title: str) -> str:
    """The table as text, values flush right."""
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join([title, *(f"{name:{names}}  {value:>{values}}" for name, value in rows)])
