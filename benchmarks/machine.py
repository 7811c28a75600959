"""What a reader needs to know of the machine a benchmark ran on, and the stopwatch."""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_cpu_offload.kernels import physical_cores

PACKAGES = ("torch", "lightning", "numpy", "numba")


def milliseconds(step: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, versions and date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gib = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory_gib = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return {
        "cpu": models[0] if models else platform.processor(),
        "physical_cores": physical_cores(),
        "memory_gib": memory_gib,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


def file_stem(theme: str, machine: dict[str, Any]) -> str:
    """Return `theme_processor_yearmonth`, the name of a result's files."""
    cpu = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")
    return f"{theme}_{cpu}-{machine['physical_cores']}core_{machine['date'][:7].replace('-', '')}"
