"""Time the optimizer step on the host, side by side with torch's and with the limit that memory sets.

    python benchmarks/host_step.py [--params N] [--threads N] [--rounds N] [--json PATH]

Each way starts from a BF16 gradient and FP32 masters and moments and ends with a BF16 weight. The ways take
turns within one run, so that a change in the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from lightning_cpu_offload.kernels import ThreadPool, adamw, physical_cores, warm_up

BYTES_PER_PARAM = 28
"""The least one step moves: FP32 weight and moments in and out, BF16 gradient in, BF16 weight out."""

RMW_BYTES_PER_PARAM = 24
TENSOR_SIZE = 1 << 22
"""Parameters in one tensor, as in a transformer with matrices of 2048 x 2048."""

OURS = "this package: one pass"
LIMIT = "limit: 28 bytes at the speed of x = -x"
HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


@dataclass
class Timing:
    """What was measured of one way; the limit's times are scaled from the 24 bytes it moves to 28."""

    name: str
    milliseconds: list[float]

    @property
    def median(self) -> float:
        """Median time of a step in milliseconds."""
        return statistics.median(self.milliseconds)


class Workload:
    """FP32 weights and moments, a BF16 plane and FP32 gradients: 24 bytes a parameter, shared by every way."""

    def __init__(self, num_params: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.param = torch.randn(num_params, generator=generator)
        self.grad = torch.randn(num_params, generator=generator).bfloat16()
        self.exp_avg = torch.full_like(self.param, 0.01)
        self.exp_avg_sq = torch.full_like(self.param, 1e-3)
        self.grad_fp32 = torch.zeros_like(self.param)
        self.plane = self.grad.clone()

    def restore_gradient(self) -> None:
        """Put the gradient back where a step has left the weight."""
        self.plane.copy_(self.grad)

    def one_pass(self, threads: ThreadPool) -> Callable[[], None]:
        """Return this package's step, one call for each tensor."""
        plane = self.plane.view(torch.int16).numpy().view(np.uint16)
        arrays = [self.param.numpy(), plane, self.exp_avg.numpy(), self.exp_avg_sq.numpy()]
        options = {**HYPER, "beta1": 0.9, "beta2": 0.999, "decoupled": True, "step": 100}

        def step() -> None:
            for start in range(0, self.param.numel(), TENSOR_SIZE):
                parts = [array[start : start + TENSOR_SIZE] for array in arrays]
                adamw(*parts, **options, threads=threads)

        return step

    def torch_step(self, **options: Any) -> Callable[[], None]:
        """Return torch's AdamW on the same memory, between the two conversions."""
        params = [torch.nn.Parameter(weight) for weight in self.param.split(TENSOR_SIZE)]
        optimizer = torch.optim.AdamW(params, **HYPER, **options)
        others = (self.grad_fp32, self.exp_avg, self.exp_avg_sq)
        for param, *parts in zip(params, *(x.split(TENSOR_SIZE) for x in others), strict=True):
            param.grad, exp_avg, exp_avg_sq = parts
            optimizer.state[param] = {"step": torch.tensor(99.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        def step() -> None:
            self.grad_fp32.copy_(self.plane)
            optimizer.step()
            self.plane.copy_(self.param)

        return step

    def read_and_write(self) -> None:
        """Read and write the three FP32 arrays, nothing else."""
        for array in (self.param, self.exp_avg, self.exp_avg_sq):
            array.neg_()


def measure(num_params: int, num_threads: int, rounds: int) -> list[Timing]:
    """Time every way `rounds` times, in turns, after one round that does not count."""
    torch.set_num_threads(num_threads)
    warm_up()
    work = Workload(num_params)
    ways = {
        OURS: work.one_pass(ThreadPool(num_threads)),
        "torch AdamW(fused=True), two conversions": work.torch_step(fused=True),
        "torch AdamW(foreach=True), two conversions": work.torch_step(foreach=True),
        "torch AdamW(), two conversions": work.torch_step(),
    }
    timings = {name: Timing(name, []) for name in (*ways, LIMIT)}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            work.restore_gradient()
            timings[name].milliseconds.append(milliseconds(step))
        # Twice, so that the second moments are positive again.
        for _ in range(2):
            scaled = milliseconds(work.read_and_write) * BYTES_PER_PARAM / RMW_BYTES_PER_PARAM
            timings[LIMIT].milliseconds.append(scaled)
    for timing in timings.values():
        del timing.milliseconds[: len(timing.milliseconds) // (rounds + 1)]
    return list(timings.values())


def milliseconds(step: Callable[[], None]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def describe_machine(num_threads: int) -> dict[str, Any]:
    """Return what a reader needs to know of the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gib = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory_gib = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return {
        "cpu": models[0] if models else platform.processor(),
        "physical_cores": physical_cores(),
        "threads": num_threads,
        "memory_gib": memory_gib,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "date": datetime.date.today().isoformat(),
    }


def report(machine: dict[str, Any], num_params: int, timings: list[Timing]) -> None:
    """Print the ratios first, then times, memory traffic and the share of the limit that was reached."""
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{num_params:,} parameters, {len(timings[0].milliseconds)} rounds\n")
    ours, limit = timings[0].median, timings[-1].median
    print(f"{'':43}{'ours = 1':>9}{'ms':>8}{'least':>8}{'most':>8}{'GB/s':>7}{'% of limit':>12}")
    for timing in timings:
        spread = f"{min(timing.milliseconds):8.1f}{max(timing.milliseconds):8.1f}"
        speed = BYTES_PER_PARAM * num_params / timing.median / 1e6
        ratios = f"{timing.median / ours:9.2f}{timing.median:8.1f}"
        print(f"{timing.name:43}{ratios}{spread}{speed:7.1f}{100 * limit / timing.median:12.0f}")


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters; 24 bytes of memory each")
    parser.add_argument("--threads", type=int, default=physical_cores(), help="threads, ours and torch's")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each way")
    parser.add_argument("--json", type=Path, help="file to write every measured time to")
    args = parser.parse_args()
    machine = describe_machine(args.threads)
    timings = measure(args.params, args.threads, args.rounds)
    report(machine, args.params, timings)
    if args.json is not None:
        result = {"machine": machine, "params": args.params, "timings": [asdict(timing) for timing in timings]}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
