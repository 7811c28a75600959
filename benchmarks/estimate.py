"""What an estimate itself costs: seconds and memory of `estimate` for models of three sizes.

    python benchmarks/estimate.py [--rounds N] [--json PATH]

Each estimate is a process of its own, from the first import to the last line printed; the host rate is measured in it
as usual. It runs alone and with one thread. Processor time is the figure to look at where other work runs; the wall
clock is what a user waits. Linux and macOS only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

MODELS = {
    "458M": [],
    "3B": ["--model.num_layers=32", "--model.d_model=2688", "--model.num_heads=21", "--model.vocab_size=50304"],
    "8B": ["--model.num_layers=38", "--model.d_model=4096", "--model.num_heads=32"],
}
LIMIT_S, LIMIT_BYTES = 10.0, 2e9
ROOT = Path(__file__).resolve().parents[1]


def measure(options: list[str]) -> dict[str, float]:
    """One estimate: seconds on the clock, seconds of processors, and the most memory in bytes."""
    command = [sys.executable, "-m", "lightning_cpu_offload", "estimate", "--config", "configs/gpt_458m.yaml"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise RuntimeError(f"estimate {' '.join(options)}: ended with status {status}. Run it by hand to see why.")
    nbytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"wall_s": wall, "processor_s": used.ru_utime + used.ru_stime, "peak_bytes": float(nbytes)}


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="estimates of each model; the median is printed")
    parser.add_argument("--json", type=Path, help="file to write every figure to")
    args = parser.parse_args()
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['physical_cores']} cores, torch {machine['torch']}\n")
    print("| model | on the clock, s | limit, s | processors, s | peak memory, GB | limit, GB |")
    print("|---|--:|--:|--:|--:|--:|")
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, options in MODELS.items():
        rows[name] = [measure(options) for _ in range(args.rounds)]
        wall, processor, peak = (statistics.median(row[key] for row in rows[name]) for key in rows[name][0])
        memory = f"{peak / 1e9:.2f} | {LIMIT_BYTES / 1e9:.0f}"
        print(f"| {name} | {wall:.1f} | {LIMIT_S:.0f} | {processor:.1f} | {memory} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
