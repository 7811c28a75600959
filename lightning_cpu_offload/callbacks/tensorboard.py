"""What the monitor shows in TensorBoard beyond scalars: a page of charts, and the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_cpu_offload.callbacks.timeline import Drawn, timeline_image

_CHARTS = {
    "How long a step takes, ms": ("step_ms",),
    "The offload's part, ms": ("exposed_wait_ms", "host_step_ms", "arrival_wait_ms"),
    "The device's part, ms (steps with a timeline)": ("forward_ms", "backward_ms", "d2h_ms", "h2d_ms"),
    "How fast bytes move, GB/s": ("host_gb_per_s", "d2h_gb_per_s", "h2d_gb_per_s"),
    "Host step, percent of what the kernel reaches alone": ("host_percent_of_limit",),
    "Memory of the device, bytes": ("device_bytes/.*", "device_peak_bytes"),
    "Memory of the host, bytes": ("host_bytes/.*",),
    "Norm of the gradients": ("grad_norm",),
    "Steps skipped": ("skipped_steps",),
}


def custom_layout() -> dict[str, dict[str, list[Any]]]:
    """The page, as `SummaryWriter.add_custom_scalars` takes it; tags are regular expressions there."""
    charts = {
        title: ["Multiline", [f"offload/{name}$" for name in names]]  # else `step_ms` would match longer names too
        for title, names in _CHARTS.items()
    }
    charts["Throughput"] = ["Multiline", ["(tokens|samples)/s$"]]
    charts["Loss"] = ["Multiline", [".*loss.*"]]
    return {"cpu_offload": charts}


def lay_out(loggers: Iterable[Any]) -> None:
    """Give every TensorBoard log the page."""
    for writer in _writers(loggers):
        writer.add_custom_scalars(custom_layout())


def show_timeline(loggers: Iterable[Any], recorded: Sequence[Drawn], step: int, title: str) -> None:
    """Put a timeline into every TensorBoard log, at `step`; nothing where matplotlib is not installed."""
    writers = list(_writers(loggers))
    image = timeline_image(recorded, title) if writers else None
    if image is None:
        return
    import numpy as np

    for writer in writers:
        writer.add_image("offload/timeline", np.asarray(image)[..., :3], step, dataformats="HWC")


def _writers(loggers: Iterable[Any]) -> Iterable[Any]:
    for logger in loggers:
        writer = getattr(logger, "experiment", None)
        if hasattr(writer, "add_custom_scalars") and hasattr(writer, "add_image"):
            yield writer
