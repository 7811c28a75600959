"""Time the optimizer step on the host, side by side with other libraries' and with the limit that memory sets.

    python benchmarks/host_step.py [--params N ...] [--threads N ...] [--rounds N] [--save FOLDER]

Each way starts from a BF16 gradient and FP32 masters and ends with a BF16 weight. The ways take turns within one
run, once each in every round, so that a change in the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import describe_machine, file_stem, milliseconds
from rivals import RIVALS, Rival, RivalError
from ways import READ_WRITE_BYTES, SHAPES, Workload, ways_of

from lightning_cpu_offload.kernels import MOMENTS, physical_cores, warm_up

AIMS = {
    "DeepSpeed CPUAdam, two conversions": 2.1,
    "torch AdamW(fused=True), two conversions": 2.2,
}
"""What other ways take at least, as a multiple of ours: on all cores, for GPT-shaped 100M parameters."""

LEAST_SHARE, LEAST_GAIN = 90, 1.3
"""There, too: the percentage of the limit that ours reaches, and FP32 moments over the fastest reduced ones."""

OURS_BYTES, RIVAL_BYTES = 32, 20
"""Memory that the ways of this process take for a parameter, and what a rival's process takes."""


@dataclass
class Row:
    """What was measured of one way, in milliseconds for a step; none where it did not run, and why."""

    name: str
    least_bytes: int
    times: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass
class Case:
    """One table: so many parameters, cut like this, on so many threads; and the limit's times for one byte each."""

    params: int
    shape: str
    threads: int
    rows: list[Row]
    limit_per_byte: list[float]


def measure(num_params: int, shape: str, num_threads: int, rounds: int, slow: bool, rivals: list[str]) -> Case:
    """Time every way `rounds` times, in turns, after one round that does not count."""
    torch.set_num_threads(num_threads)
    sizes = SHAPES[shape](num_params)
    with ExitStack() as running:
        rows, steps = [], []
        work = Workload(sizes)
        for way in ways_of(work, num_threads, slow):
            rows.append(Row(way.name, way.least_bytes))
            steps.append(lambda step=way.step: timed(work, step))
        for rival in rivals:
            row = Row(RIVALS[rival], 28 if rival == "deepspeed" else 16)
            rows.append(row)
            try:
                if num_params * RIVAL_BYTES > psutil.virtual_memory().available:
                    raise RivalError("not enough memory")
                steps.append(running.enter_context(Rival(rival, sizes, num_threads)).milliseconds)
            except RivalError as error:
                row.reason = str(error)
                steps.append(None)
        limit_per_byte = take_turns(work, rows, steps, rounds)
    return Case(num_params, shape, num_threads, rows, limit_per_byte)


def timed(work: Workload, step: Callable[[], Any]) -> float:
    """Return the milliseconds of one step from a fresh gradient."""
    work.restore_gradient()
    return milliseconds(step)


def take_turns(work: Workload, rows: list[Row], steps: list[Callable[[], float] | None], rounds: int) -> list[float]:
    """Fill the rows with times; return the milliseconds that reading and writing takes for one byte a parameter."""
    limits = []
    for count in range(rounds + 1):
        for row, step in zip(rows, steps, strict=True):
            if step is not None:
                row.times.append(step())
        limits.append(milliseconds(work.read_and_write) / 2 / READ_WRITE_BYTES)
        if count == 0:
            limits.clear()
            for row in rows:
                row.times.clear()
    return limits


def ratio_to(ours: list[float], times: list[float]) -> float:
    """Return the median of the ratios of times of the same rounds."""
    return statistics.median(time / own for time, own in zip(times, ours, strict=True))


def aims(case: Case) -> list[str]:
    """Return the ratios that have an aim, a line each, with the aim beside it."""
    rows = {row.name: row for row in case.rows if row.times}
    ours, limit = case.rows[0], statistics.median(case.limit_per_byte)
    lines = [
        f"* {name} over this package: {ratio_to(ours.times, rows[name].times):.2f} (at least {least})"
        for name, least in AIMS.items()
        if name in rows
    ]
    share = 100 * ours.least_bytes * limit / statistics.median(ours.times)
    lines.append(f"* this package, % of the limit: {share:.0f} (at least {LEAST_SHARE})")
    gain = max(ratio_to(row.times, ours.times) for name, row in rows.items() if name.endswith(" moments"))
    return [*lines, f"* FP32 moments over the fastest reduced ones: {gain:.2f} (at least {LEAST_GAIN})\n"]


def table(case: Case) -> str:
    """Return the case in Markdown: ratios with their aims, then a table of times, traffic and share of the limit."""
    ours, limit = case.rows[0].times, statistics.median(case.limit_per_byte)
    lines = [f"**{case.params:,} parameters, {case.shape}, {case.threads} threads**, {len(ours)} rounds\n", *aims(case)]
    lines += ["| way | ours = 1 | ms | least | most | bytes | GB/s | % of limit |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in case.rows:
        if not row.times:
            lines.append(f"| {row.name} | not run: {row.reason} |")
            continue
        ratio = ratio_to(ours, row.times)
        median = statistics.median(row.times)
        speed, share = row.least_bytes * case.params / median / 1e6, 100 * row.least_bytes * limit / median
        lines.append(
            f"| {row.name} | {ratio:.2f} | {median:.1f} | {min(row.times):.1f} | {max(row.times):.1f} "
            f"| {row.least_bytes} | {speed:.1f} | {share:.0f} |"
        )
    lines.append(f"| limit: 28 bytes at the speed of x = -x | | {28 * limit:.1f} | | | 28 | | 100 |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [1_000_000, 10_000_000, 100_000_000, 400_000_000]
    threads = sorted({1, 2, physical_cores()} if physical_cores() > 1 else {1}, reverse=True)
    parser.add_argument("--params", type=int, nargs="+", default=sizes, help="parameters; 32 bytes of memory each")
    parser.add_argument("--threads", type=int, nargs="+", default=threads, help="threads, ours and the others'")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each way")
    parser.add_argument("--rivals", nargs="*", choices=list(RIVALS), default=list(RIVALS), help="other libraries")
    parser.add_argument("--fast", action="store_true", help="leave out torch's slow ways, foreach and default")
    parser.add_argument("--save", type=Path, help="folder to write every measured time and the tables to")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the results if asked to."""
    args, machine = parse(), describe_machine()
    for state_dtype in ("float32", *MOMENTS):
        warm_up(state_dtype=state_dtype)
    title = ", ".join(f"{key} {value}" for key, value in machine.items()) + "\n"
    print(title)
    cases = []
    for num_params, threads, shape in itertools.product(args.params, args.threads, args.shapes):
        if num_params * OURS_BYTES > psutil.virtual_memory().available:
            print(f"{num_params:,} parameters: not enough memory\n")
            continue
        case = measure(num_params, shape, threads, args.rounds, not args.fast, args.rivals)
        cases.append(case)
        print(table(case), flush=True)
    if args.save is not None:
        stem = args.save / file_stem("host_step", machine)
        stem.with_suffix(".json").write_text(
            json.dumps({"machine": machine, "cases": [asdict(c) for c in cases]}) + "\n"
        )
        stem.with_suffix(".md").write_text("\n".join([title, *map(table, cases)]))


if __name__ == "__main__":
    main()
