"""What the monitor logs of a step, by name and without the prefix `offload/`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from lightning_cpu_offload.callbacks.recording import Span, busy
from lightning_cpu_offload.estimate.hardware import host_rate
from lightning_cpu_offload.estimate.work import state_bytes
from lightning_cpu_offload.offload.gradients import HostGradient

if TYPE_CHECKING:
    from lightning_cpu_offload.offload.attach import Attachment
    from lightning_cpu_offload.offload.pipeline import StepReport


@cache
def kernel_rate(num_threads: int) -> float:
    """Bytes per second that the kernel reads and writes alone on this machine; measured once in a process."""
    return host_rate(num_threads)


def is_fused(offload: Attachment) -> bool:
    """Whether the kernel makes every step."""
    return all(optimizer.is_fused for optimizer in offload.optimizers)


def costs(offload: Attachment, report: StepReport, limit: float | None) -> dict[str, float]:
    """What a step moved, how long it took, and how fast the host was.

    Args:
        offload: What was stepped.
        report: Of the step, which has landed.
        limit: Bytes per second the kernel reaches alone; None: not known.
    """
    record = {
        "host_step_ms": report.host_ms,
        "arrival_wait_ms": report.wait_ms,
        "exposed_wait_ms": report.total_ms,
        "d2h_bytes": float(report.d2h_bytes),
        "h2d_bytes": float(report.h2d_bytes),
        "skipped_steps": float(offload.skipped_steps),
    }
    if is_fused(offload) and report.host_ms and report.h2d_bytes:
        # Every weight that was stepped has been sent back.
        stepped = offload.num_parameters * report.h2d_bytes / offload.weight_bytes
        gradient_bytes = report.d2h_bytes or 4 * stepped  # those on the host are sums in FP32
        state = state_bytes(offload.host.state_dtype) if offload.host is not None else state_bytes()
        rate = (state * stepped + gradient_bytes + report.h2d_bytes) / report.host_ms * 1e3
        record["host_gb_per_s"] = rate / 1e9
        if limit is not None:
            record["host_percent_of_limit"] = 100 * rate / limit
    return record


def host_bytes(offload: Attachment) -> dict[str, float]:
    """Bytes held on the host, in total and by purpose."""
    by_name = {f"host_bytes/{name}": float(nbytes) for name, nbytes in offload.memory.bytes_by_name.items()}
    return {"host_bytes": float(offload.memory.nbytes), **by_name}


def device_bytes(offload: Attachment, module: torch.nn.Module, device: torch.device) -> dict[str, float]:
    """Bytes on the device by category, between backward and the step."""
    gradients = (parameter.grad for parameter in module.parameters())
    kept = sum(g.nbytes for g in gradients if g is not None and not isinstance(g, HostGradient) and not g.is_sparse)
    record = {"device_bytes/weights": float(offload.weight_bytes), "device_bytes/gradients": float(kept)}
    if device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated"):  # torch 2.9
        other = torch.accelerator.memory_allocated(device) - offload.weight_bytes - kept
        record["device_bytes/other"] = float(other)
        record["device_peak_bytes"] = float(torch.accelerator.max_memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
    return record


def rates(recorded: Sequence[Span], report: StepReport) -> dict[str, float]:
    """How long each lane worked in a recording, and how fast bytes moved."""
    record = {}
    for what in ("forward", "backward"):
        record[f"{what}_ms"] = busy(recorded, "compute", what) * 1e3
    for lane, nbytes in (("d2h", report.d2h_bytes), ("h2d", report.h2d_bytes)):
        seconds = busy(recorded, lane)
        record[f"{lane}_ms"] = seconds * 1e3
        if seconds and nbytes:
            record[f"{lane}_gb_per_s"] = nbytes / seconds / 1e9
    return record
