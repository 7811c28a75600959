"""What a run needs, against what is free, before any of it is allocated.

Pure functions over numbers and over the files in which Linux keeps them: what is read can be put in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Bytes from which on a limit of a cgroup or of a process is none; version 1 says 2**63 less a page."""

OPTIONS = {
    "host": (
        "state_dtype='bfloat16' or 'float8', whose moments take 4 or 2 bytes per parameter where FP32's take 8",
        "an optimizer with less state (SGD with momentum: 8 bytes per parameter where AdamW has 12)",
        "a smaller model, or fewer trained parameters (requires_grad_(False))",
        "a higher memory limit of the container, or other programs closed",
    ),
    "pinned": ('pin_memory="auto" or False', "a higher limit of locked memory (ulimit -l)"),
    "device": (
        "precision='bf16-true', whose weights take 2 bytes where FP32 takes 4",
        "gradients='host', which leaves only the weights there",
        "a smaller device_fraction or device_memory, if one is given",
        "a smaller batch with accumulate_grad_batches, or activation checkpointing",
        "a smaller model, or other programs on the device closed",
    ),
}
"""What makes a run fit that lacks memory of a kind."""


@dataclass(frozen=True)
class Bytes:
    """Amounts of memory by kind, in bytes; `math.inf` as what is free where nothing is known.

    Attributes:
        host: Ordinary memory of the process: masters, optimizer state, staging.
        pinned: The part of it that is page-locked.
        device: Memory of the accelerator: weights, gradients. 0 where the device is the CPU.
    """

    host: float = 0
    pinned: float = 0
    device: float = 0


def needs(
    *,
    weight_bytes: int,
    numel: int,
    state_bytes: int,
    gradients_on_host: bool = False,
    staging_bytes: int = 0,
    pin: bool = False,
    rest_bytes: int = 0,
    resident_bytes: int = 0,
    held_bytes: int = 0,
    on_cpu: bool = False,
) -> Bytes:
    """What a plan allocates above what is in use already, activations aside.

    Args:
        weight_bytes: Of the trained parameters on the device; their gradients take as much.
        numel: Trained parameters whose masters are on the host.
        state_bytes: What the optimizers keep on the host besides masters.
        gradients_on_host: Whether gradients are summed up there, in FP32, and not on the device.
        staging_bytes: Size of the staging buffers.
        pin: Whether they are page-locked.
        rest_bytes: Device bytes of what no optimizer steps.
        resident_bytes: Masters and optimizer state kept on the device.
        held_bytes: Host bytes of the module's own tensors, which are let go of once their masters are made.
        on_cpu: Whether the "device" is the CPU: its bytes are then host bytes.
    """
    device = weight_bytes * (1 if gradients_on_host else 2) + rest_bytes + resident_bytes
    masters = 4 * numel
    later = state_bytes + (4 * numel if gradients_on_host else 0)
    host = staging_bytes + max(masters, masters + later - held_bytes)
    if on_cpu:
        return Bytes(host=host + device - rest_bytes)  # what is not stepped is there already
    return Bytes(host=host, pinned=staging_bytes if pin else 0, device=device)


def available(device: torch.device, root: Path = _ROOT) -> Bytes:
    """What is free now, as far as the system tells.

    Args:
        device: Where the module computes.
        root: Below which `proc` and `sys` are.
    """
    return Bytes(host=free_host(root), pinned=free_pinned(), device=free_device(device))


def require_fits(needed: Bytes, free: Bytes, *, pin_required: bool = False) -> None:
    """Refuse a run that cannot fit, before it has begun.

    Args:
        needed: By the plan.
        free: Now.
        pin_required: Whether memory that cannot be page-locked is an error rather than a reason to do without.

    Raises:
        MemoryError: With what is needed and free of the first kind that lacks, and what would make it fit.
    """
    kinds = ("host", "device", "pinned") if pin_required else ("host", "device")
    for kind in kinds:
        want, have = getattr(needed, kind), getattr(free, kind)
        if want > have:
            options = "; ".join(OPTIONS[kind])
            raise MemoryError(
                f"{kind} memory: {_gib(want)} are needed, {_gib(have)} are free, {_gib(want - have)} are lacking. "
                f"What would help: {options}. check_memory=False tries all the same."
            )


def free_host(root: Path = _ROOT) -> float:
    """Bytes of memory this process can still take: of the machine, and of every cgroup it is in."""
    return min([_of_machine(root), *_of_cgroups(root)])


def free_pinned() -> float:
    """Bytes this process may page-lock by the limit of the system; drivers of accelerators may refuse earlier."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft in (resource.RLIM_INFINITY, -1) or soft >= _UNLIMITED else float(soft)


def free_device(device: torch.device) -> float:
    """Bytes free on an accelerator, what torch has reserved but does not use among them."""
    if device.type == "cpu":
        return math.inf
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError, AssertionError):  # older torch; backends without it
        return math.inf
    return float(free + cached)


def _of_machine(root: Path) -> float:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return _of_other_systems() if root == _ROOT else math.inf
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    return float(found.get("MemAvailable", math.inf))


def _of_other_systems() -> float:
    try:
        import psutil
    except ImportError:
        return math.inf
    return float(psutil.virtual_memory().available)


def _of_cgroups(root: Path) -> Iterator[float]:
    """What is left of each limit: of the process's own groups and of those above them."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root / "sys/fs/cgroup/memory", path, *names)


def _left(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[float]:
    folder = mount / path.lstrip("/")
    while True:
        granted, used = _number(folder / limit), _number(folder / usage)
        if granted is not None and used is not None and granted < _UNLIMITED:
            yield max(0.0, granted - used + _entry(folder / "memory.stat", reclaimable))
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _entry(path: Path, name: str) -> int:
    """A line of `memory.stat`: file pages the kernel drops before it refuses anybody memory."""
    try:
        entries = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get(name, 0))


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
