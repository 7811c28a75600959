"""What this machine is, as far as offload is concerned, and what to change."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from lightning_cpu_offload import kernels
from lightning_cpu_offload.estimate.hardware import accelerator, device_rates, host_rate, pinned_limit
from lightning_cpu_offload.kernels import physical_cores
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, SLOT_BYTES
from lightning_cpu_offload.precision import cpu_has_fast_bf16

GIB = 2**30
SLOW_HOST = 20e9
"""Bytes per second below which the host step outlasts a window of 16 x 512 tokens on a current card."""

SLOW_LINK = 6e9
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Finding:
    """One thing about the machine.

    Attributes:
        name: What was looked at.
        value: What was found.
        advice: What to change; empty if nothing.
        serious: Whether offload does not work, or not as it should, until that is changed.
    """

    name: str
    value: str
    advice: str = ""
    serious: bool = False


def examine() -> Iterator[Finding]:
    """Everything that can be found out here, in the order to read it."""
    yield from _processor()
    yield from _memory()
    yield from _software()
    yield from _device()
    yield from _system()


def _processor() -> Iterator[Finding]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    yield Finding("CPU", models[0] if models else platform.processor() or platform.machine())
    yield Finding("cores", f"{physical_cores()} to use, {os.cpu_count()} hardware threads in the machine")
    if flags:
        found = [name for name in INSTRUCTIONS if name in flags]
        yield Finding("instructions", " ".join(found) or "none of " + " ".join(INSTRUCTIONS))
    fast = cpu_has_fast_bf16()
    advice = "" if fast else "Nothing, unless the CPU is what you train on: it then computes in FP32."
    yield Finding("BF16 products on the CPU", "fast" if fast else "slow", advice)


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    room = f"at 12 bytes each, {memory.available / 12 / 1e6:,.0f}M parameters"
    yield Finding("RAM", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free: {room}")
    if kernels.available():
        rate = host_rate()
        slow = rate < SLOW_HOST
        advice = "Use every memory channel, and give the process its cores (taskset, container quota)." if slow else ""
        yield Finding("host step", f"{rate / 1e9:.1f} GB/s, {28 / rate * 1e12:.0f} ms per 1000M parameters", advice)


def _software() -> Iterator[Finding]:
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in ("lightning", "pytorch_lightning", "numba"):
        try:
            versions.append(f"{name} {importlib.import_module(name).__version__}")
        except ImportError:
            continue
    yield Finding("versions", ", ".join(versions))
    if kernels.available():
        yield Finding("kernel", "one pass, compiled by numba")
    else:
        advice = "pip install numba: the step takes about twice as long without it."
        yield Finding("kernel", f"torch operations ({kernels.IMPORT_ERROR})", advice, serious=True)


def _device() -> Iterator[Finding]:
    device = accelerator()
    if device is None:
        advice = "For a GPU, install the torch build that is made for it; without one, training runs on the CPU."
        yield Finding("device", "none that torch sees", advice)
        return
    yield Finding("device", str(device))
    rates = device_rates(device)
    yield Finding("products", f"{rates['flops'] / 1e12:.1f} TFLOP/s in BF16")
    yield Finding("device memory", f"{rates['device'] / 1e9:.0f} GB/s")
    slow = min(rates["d2h"], rates["h2d"]) < SLOW_LINK
    advice = "Put the card into a slot with 16 lanes, and look at its power saving." if slow else ""
    yield Finding("link", f"{rates['d2h'] / 1e9:.1f} GB/s to the host, {rates['h2d'] / 1e9:.1f} GB/s back", advice)
    ring, limit = RING_DEPTH * SLOT_BYTES, pinned_limit()
    advice = "" if limit >= ring else f"Raise the limit of locked memory (ulimit -l): the ring takes {ring >> 20} MiB."
    value = f"{limit / GIB:.2f} GiB can be, as far as was tried"
    yield Finding("page-locked memory", value, advice, serious=limit < ring)


def _system() -> Iterator[Finding]:
    release = platform.release().lower()
    advice = ""
    if sys.platform == "win32":
        advice = "Windows page-locks about half of RAM at most; gradients need no more than the ring."
    elif "microsoft" in release:
        advice = (
            "WSL2 sees half of RAM unless .wslconfig says more, and page-locks 1 to 2 GB: leave update='exact', whose "
            "ring is small. A refusal may read 'out of memory' with an empty card."
        )
    yield Finding("system", platform.platform(), advice)


def main(args: list[str]) -> int:
    """Print all findings; returns the exit status: 1 if something serious is to be changed."""
    parser = argparse.ArgumentParser(prog="lightning-cpu-offload doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    as_json = parser.parse_args(args).json
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.name:{width}}  {finding.value}")
            if finding.advice:
                print(f"{'':{width}}  {'! ' if finding.serious else '> '}{finding.advice}")
    return int(any(finding.serious for finding in findings))
