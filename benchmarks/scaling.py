"""Predict the step of 1 to 128 data-parallel ranks under `strategy="cpu_offload_ddp"`, from sizes and rates alone.

    python benchmarks/scaling.py [--network GB/s] [--latency-us T] [--to-owner] [--pcie ...] [--json PATH]

Nothing is run. Each rank computes its own micro-batches (weak scaling), steps 1/N of the parameters on its host and has
its own memory bandwidth there; `lightning_cpu_offload/estimate/ranks.py` says how the network is shared. Efficiency is
the throughput of N ranks over N times that of one rank of the same strategy; `beside AdamW` is the same over N times
that of one device with AdamW on it, which for a model whose optimizer does not fit cannot be had.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from step_time import MODELS, add_machine, gpt_units, rates_of, write

from lightning_cpu_offload.estimate.ranks import Network, partitioned_time
from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.time import step_time
from lightning_cpu_offload.estimate.work import Rates, Window
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, SLOT_BYTES

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)


def predict(window: Window, rates: Rates, staging: Staging, network: Network) -> list[dict[str, Any]]:
    """One row for each number of ranks."""
    alone = partitioned_time(window, rates, staging, replace(network, ranks=1))
    on_device = step_time(window, rates, staging, "device").seconds
    rows = []
    for ranks in RANKS:
        joined = replace(network, ranks=ranks)
        seconds = partitioned_time(window, rates, staging, joined)
        rows.append(
            {
                "ranks": ranks,
                "ms": seconds * 1e3,
                "efficiency": alone / seconds,
                "beside_device": on_device / seconds,
                "network_bytes_per_parameter": joined.bytes_per_parameter(),
            }
        )
    return rows


def parse() -> argparse.Namespace:
    """The machines on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=float, default=10.0, help="GB/s of each rank, each way")
    parser.add_argument("--latency-us", type=float, default=5.0, help="microseconds of an operation for each rank")
    parser.add_argument("--to-owner", action="store_true", help="gradients summed up on their owner alone; not built")
    add_machine(parser)
    return parser.parse_args()


def main() -> None:
    """Print the tables, and write JSON if asked to."""
    args = parse()
    rates = rates_of(args)
    staging = Staging(SLOT_BYTES, RING_DEPTH)
    network = Network(1, args.network * 1e9, args.latency_us * 1e-6, to_owner=args.to_owner)
    print("| model | window of a rank | ranks | step, ms | efficiency | beside AdamW on the device |")
    print("|---|---|--:|--:|--:|--:|")
    found = []
    for model in args.models:
        units = gpt_units(MODELS[model], args.tokens)
        for accumulate in (16, 1):
            window = Window(units, accumulate, clip=True)
            for row in predict(window, rates, staging, network):
                found.append({"model": model, "accumulate": accumulate, **row})
                shares = f"{100 * row['efficiency']:.1f} % | {100 * row['beside_device']:.1f} %"
                print(f"| {model} | {accumulate} x {args.tokens} | {row['ranks']} | {row['ms']:.0f} | {shares} |")
    write(args, found)


if __name__ == "__main__":
    main()
