"""The answer to "does it fit, and how slow will it be": a table, a verdict, and both as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning_cpu_offload.estimate.choices import CONTEXT_BYTES, Row
from lightning_cpu_offload.estimate.hardware import Measured

MB, GIB = 1e6, 2**30


@dataclass(frozen=True)
class Estimate:
    """What every way of training a module needs.

    Attributes:
        module: Name of its class.
        parameters: How many are trained.
        rows: The ways, stock AdamW first.
        hardware: What times were computed from.
        accumulate: Micro-batches of an optimizer step.
        vram: Bytes the device has; None: not asked.
        ram: Bytes the host has; None: not asked.
        configured: Name of the row that is what the strategy was given; None: no strategy of this package.
        reason: Why the step could not be run on fakes; empty if it was.
        notes: What else to know.
    """

    module: str
    parameters: int
    rows: tuple[Row, ...]
    hardware: Measured
    accumulate: int
    vram: int | None = None
    ram: int | None = None
    configured: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    def lacks(self, row: Row) -> list[str]:
        """What a way needs beyond what there is; empty if it fits."""
        lacking = []
        if self.vram is not None and row.device_bytes > self.vram:
            lacking.append(f"device {_gib(row.device_bytes)} of {_gib(self.vram)}")
        if self.ram is not None and row.host_bytes > self.ram:
            lacking.append(f"host {_gib(row.host_bytes)} of {_gib(self.ram)}")
        return lacking

    @property
    def fitting(self) -> list[Row]:
        """The ways that fit, the fastest first."""
        fits = [row for row in self.rows if not self.lacks(row)]
        return sorted(fits, key=lambda row: row.step.seconds if row.step is not None else math.inf)

    @property
    def largest(self) -> int:
        """Parameters of the largest model that fits in some way, its layers and their work scaled alike."""
        return max(int(self.parameters * self._room(row)) for row in self.rows)

    def _room(self, row: Row) -> float:
        fixed = row.host.get("process", 0) + row.host.get("ring", 0)
        device = (self.vram - CONTEXT_BYTES) / row.device.reserved if self.vram is not None else math.inf
        host = (self.ram - fixed) / max(1, row.host_bytes - fixed) if self.ram is not None else math.inf
        room = min(device, host)
        return max(0.0, room) if math.isfinite(room) else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        fastest = self.fitting[0].name if self.fitting else None
        return {
            "module": self.module,
            "parameters": self.parameters,
            "accumulate": self.accumulate,
            "vram": self.vram,
            "ram": self.ram,
            "rates": asdict(self.hardware.rates),
            "rates_from": self.hardware.sources,
            "rows": [self._row_to_dict(row) for row in self.rows],
            "fits": bool(self.fitting),
            "fastest": fastest,
            "configured": self.configured,
            "largest_parameters": self.largest if self.vram is not None or self.ram is not None else None,
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def _row_to_dict(self, row: Row) -> dict[str, Any]:
        step = row.step
        return {
            "name": row.name,
            "device_peak": row.device.peak,
            "device_by_category": row.device.by_category,
            "device_peak_at": row.device.operation,
            "device_allocator_slack": row.device.reserved - row.device.peak,
            "device_context": CONTEXT_BYTES,
            "device_bytes": row.device_bytes,
            "host_by_category": row.host,
            "host_bytes": row.host_bytes,
            "pinned_bytes": row.pinned_bytes,
            "checkpoint_bytes": row.checkpoint_bytes,
            "step_seconds": None if step is None else step.seconds,
            "step_busy_seconds": None if step is None else step.busy,
            "step_exposed_seconds": None if step is None else step.exposed,
            "lacks": self.lacks(row),
            "activations_missing": row.by_shapes,
        }

    def __str__(self) -> str:
        batches = "micro-batch" if self.accumulate == 1 else "micro-batches"
        lines = [f"{self.module}: {self.parameters:,} trained parameters, {self.accumulate} {batches} per step"]
        if self.reason:
            lines += [
                f"The training step does not run on tensors without data ({self.reason}).",
                "Device figures hold weights and gradients alone; activations come on top of them.",
            ]
        lines += [*self.notes, "", *self._table(), "", *self._peaks(), *self._hosts(), *self._rates(), *self._verdict()]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        width = max(len(row.name) for row in self.rows)
        head = f"{'':{width}}  {'device MB':>9} {'host MB':>8} {'pinned MB':>9} {'checkpoint MB':>13} {'step ms':>8}"
        budgets = self.vram is not None or self.ram is not None
        lines = [head + ("  fits" if budgets else "")]
        for row in self.rows:
            step = "?" if row.step is None else _figure(row.step.seconds * 1e3)
            device, host = _figure(row.device_bytes / MB), _figure(row.host_bytes / MB)
            pinned, checkpoint = _figure(row.pinned_bytes / MB), _figure(row.checkpoint_bytes / MB)
            lacking = ", ".join(self.lacks(row))
            verdict = ("  no: " + lacking if lacking else "  yes") if budgets else ""
            lines.append(f"{row.name:{width}}  {device:>9} {host:>8} {pinned:>9} {checkpoint:>13} {step:>8}{verdict}")
        return lines

    @property
    def _own(self) -> Row:
        """The row whose parts are shown: what is configured, or what is the default."""
        return next((row for row in self.rows if row.name == self.configured), self.rows[1])

    def _peaks(self) -> list[str]:
        lines = []
        for row in (self.rows[0], self._own):
            parts = {**row.device.by_category, "allocator": row.device.reserved - row.device.peak}
            parts["context"] = CONTEXT_BYTES
            lines.append(f"device, {row.name}: {_parts(parts)}; peak at {row.device.operation}")
        return lines

    def _hosts(self) -> list[str]:
        return [f"host, {self._own.name}: {_parts(self._own.host)}"]

    def _rates(self) -> list[str]:
        rates, sources = self.hardware.rates, self.hardware.sources
        figures = {
            "products": (f"{rates.flops / 1e12:.1f} TFLOP/s", "flops"),
            "device to host": (f"{rates.d2h / 1e9:.1f} GB/s", "d2h"),
            "host to device": (f"{rates.h2d / 1e9:.1f} GB/s", "h2d"),
            "host step": (f"{rates.host / 1e9:.1f} GB/s", "host"),
            "device memory": (f"{rates.device / 1e9:.0f} GB/s", "device"),
        }
        described = (f"{name} {value} ({sources[key]})" for name, (value, key) in figures.items())
        return ["times from: " + ", ".join(described)]

    def _verdict(self) -> list[str]:
        if self.vram is None and self.ram is None:
            return []
        fitting, lines = self.fitting, []
        if self.configured == self._own.name:
            lacking = ", ".join(self.lacks(self._own))
            lines.append(f"As configured, {self.configured}: " + (f"does not fit, {lacking}." if lacking else "fits."))
        largest = f"The largest model of this shape that fits has about {_figure(self.largest / 1e6)}M parameters."
        if not self.largest:
            largest = "No model of this shape fits, however small."
        if not fitting:
            closest = min(self.rows[1:], key=lambda row: (row.device_bytes, row.host_bytes))
            return [
                *lines,
                f"Nothing fits. The least memory takes {closest.name}: {', '.join(self.lacks(closest))}.",
                largest,
            ]
        fastest = fitting[0]
        unless = ", if activations fit too" if fastest.by_shapes else ""
        lines.append(f"{len(fitting)} of {len(self.rows)} ways fit{unless}; the fastest of them: {fastest.name}.")
        return [*lines, largest]


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_figure(nbytes / MB)}" for name, nbytes in parts.items() if nbytes) + " MB"


def _figure(value: float) -> str:
    """With a decimal where there would be few digits without it."""
    return f"{value:.0f}" if value >= 10 or not value else f"{value:.1f}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
