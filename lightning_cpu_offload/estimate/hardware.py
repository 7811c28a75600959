"""How fast this machine is: the host step measured, the device and its link where there is one, else as stated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lightning_cpu_offload import kernels
from lightning_cpu_offload.estimate.work import Rates, state_bytes
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.transfer import Engine, make_engine

STATED = {"flops": 35e12, "d2h": 24e9, "h2d": 24e9, "host": 40e9, "device": 570e9}
"""A desktop with a current 12 GB card on PCIe 4.0: what is taken where nothing was measured or given."""

_PARAMETERS = 8 << 20  # 224 MB of state and gradients: far more than any cache
_COPY_BYTES = 64 << 20
_PRODUCT_SIZE = 4096
_ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """Rates and where each one comes from.

    Attributes:
        rates: The rates.
        sources: For each of them `"measured"`, `"given"` or `"stated"`.
    """

    rates: Rates
    sources: dict[str, str]


def hardware(
    given: Mapping[str, float | None], device: torch.device | None = None, threads: int | None = None
) -> Measured:
    """The rates of this machine.

    Args:
        given: Rates by their names in `Rates`, which are then not measured.
        device: An accelerator to measure; None: the one torch finds, if any.
        threads: Of the host step; None: as many as the offload takes.

    Raises:
        ValueError: A name that is no rate, or a rate that is not positive.
    """
    if unknown := set(given) - set(STATED):
        raise ValueError(f"rates={sorted(unknown)}: must be among {', '.join(STATED)}. Correct the names.")
    values: dict[str, float] = dict(STATED)
    sources = dict.fromkeys(values, "stated")
    chosen = {name: rate for name, rate in given.items() if rate is not None}
    measured: dict[str, float] = {}
    if "host" not in chosen and kernels.available():
        measured["host"] = host_rate(threads)
    device = accelerator() if device is None else device
    if device is not None and not {"flops", "d2h", "h2d", "device"} <= set(chosen):
        measured.update(device_rates(device))
    for source, found in (("measured", measured), ("given", chosen)):
        values.update(found)
        sources.update(dict.fromkeys(found, source))
    return Measured(Rates(**values), sources)


def accelerator() -> torch.device | None:
    """The accelerator that torch finds, or None."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def host_rate(threads: int | None = None, parameters: int = _PARAMETERS) -> float:
    """Bytes per second that the AdamW kernel reads and writes, over arrays that no cache holds.

    Args:
        threads: As for `ThreadPool`.
        parameters: How many it steps.
    """
    pool = ThreadPool(threads)
    param, exp_avg, exp_avg_sq = np.zeros((3, parameters), np.float32)
    plane = np.zeros(parameters, np.uint16)
    kernels.warm_up()

    def step() -> None:
        kernels.adamw(
            param,
            plane,
            plane,
            exp_avg,
            exp_avg_sq,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            decoupled=True,
            step=1,
            threads=pool,
        )

    try:
        return (state_bytes() + 2 * plane.itemsize) * parameters / _median_seconds(step)
    finally:
        pool.shutdown()


def device_rates(device: torch.device) -> dict[str, float]:
    """Rates of an accelerator and of its link, each way through page-locked memory where the machine allows it."""
    engine = make_engine(device)
    host = _staging(device)
    vector = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    other = torch.zeros_like(vector)
    matrix = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(matrix)
    return {
        "d2h": _COPY_BYTES / _engine_seconds(engine, lambda: engine.copy("d2h", host, vector)),
        "h2d": _COPY_BYTES / _engine_seconds(engine, lambda: engine.copy("h2d", vector, host)),
        "device": 2 * _COPY_BYTES / _engine_seconds(engine, lambda: other.copy_(vector)),
        "flops": 2 * _PRODUCT_SIZE**3 / _engine_seconds(engine, lambda: torch.mm(matrix, matrix, out=product)),
    }


def pinned_limit(most: int = 4 << 30, step: int = 256 << 20) -> int:
    """Bytes that can be page-locked at once, found by doing it; at most `most`, in steps of `step`."""
    memory = HostMemory()
    held: list[torch.Tensor] = []
    try:
        while len(held) * step < most:
            held.append(memory.staging(step, pin=True))
    except RuntimeError:
        pass  # refused: this is the limit
    return len(held) * step


def _staging(device: torch.device) -> torch.Tensor:
    memory = HostMemory()
    try:
        return memory.staging(_COPY_BYTES, pin=device.type != "cpu")
    except RuntimeError:
        return memory.staging(_COPY_BYTES, pin=False)


def _engine_seconds(engine: Engine, work: Callable[[], object]) -> float:
    def finished() -> None:
        work()
        engine.synchronize()

    engine.synchronize()
    return _median_seconds(finished)


def _median_seconds(work: Callable[[], object]) -> float:
    work()  # the first time touches pages and compiles
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
