"""Predict the time of an optimizer step under each policy, against AdamW on the device.

    python benchmarks/step_time.py [--pcie GB/s] [--host GB/s] [--device GB/s] [--tflops T] [--tokens N] [--json PATH]

Nothing is run: the times follow from what the model computes and moves, over the chunks of the offload's own plan
(`lightning_cpu_offload/estimate/time.py` says how). The baseline is AdamW on the device without clipping, so what
clipping costs is in the figures. For a model whose optimizer does not fit, the baseline is one that cannot be had.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.time import POLICIES, step_time
from lightning_cpu_offload.estimate.work import Rates, Unit, Window
from lightning_cpu_offload.offload.pipeline import EARLY_DEPTH, RING_DEPTH
from lightning_cpu_offload.recipes import GPT

MODELS: dict[str, dict[str, Any]] = {
    "458M": {"num_layers": 24, "d_model": 1152, "num_heads": 16, "vocab_size": 32000, "tied": False},
    "3B": {"num_layers": 32, "d_model": 2688, "num_heads": 21, "vocab_size": 50304, "tied": False},
}


def gpt_units(sizes: dict[str, Any], tokens: int) -> tuple[Unit, ...]:
    """The parameters of a GPT in forward order; matrices but the embeddings are multiplied with every token."""
    with torch.device("meta"):
        model = GPT(**sizes, context_length=1024)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return tuple(
        Unit(
            numel=parameter.numel(),
            flops=2.0 * parameter.numel() * tokens if parameter.ndim > 1 and id(parameter) not in embeddings else 0.0,
            group=int(parameter.ndim < 2),
        )
        for parameter in model.parameters()
    )


def predict(units: tuple[Unit, ...], accumulate: int, clip: bool, rates: Rates, staging: Staging) -> dict[str, Any]:
    """Milliseconds of a step under every policy that the settings allow, and the baseline's."""
    baseline = step_time(Window(units, accumulate), rates, staging, "device").seconds
    row: dict[str, Any] = {"accumulate": accumulate, "clip": clip, "baseline_ms": baseline * 1e3}
    for policy in POLICIES:
        if policy != "device" and (POLICIES[policy].clips or not clip):
            seconds = step_time(Window(units, accumulate, clip=clip), rates, staging, policy).seconds
            row[policy] = {"ms": seconds * 1e3, "overhead": seconds / baseline - 1}
    return row


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options of every prediction: a machine, one with a PCIe 4.0 card by default, and what is to be known."""
    parser.add_argument("--pcie", type=float, default=24.0, help="GB/s each way; 50 for PCIe 5.0")
    parser.add_argument("--host", type=float, default=60.0, help="GB/s of the host step")
    parser.add_argument("--device", type=float, default=570.0, help="GB/s of device memory")
    parser.add_argument("--tflops", type=float, default=35.0, help="TFLOP/s that products reach")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which to predict")
    parser.add_argument("--json", type=Path, help="file to write every figure to")


def rates_of(args: argparse.Namespace) -> Rates:
    """The rates of the machine on the command line."""
    return Rates(args.tflops * 1e12, args.pcie * 1e9, args.pcie * 1e9, args.host * 1e9, args.device * 1e9)


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, with the settings they are for, if asked to."""
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


def parse() -> argparse.Namespace:
    """What is on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_machine(parser)
    parser.add_argument("--slot-mib", type=float, default=8.0, help="MiB of a staging buffer")
    parser.add_argument("--slots", type=int, default=RING_DEPTH, help="staging buffers")
    parser.add_argument("--early-slots", type=int, default=EARLY_DEPTH, help="the same for `early`")
    parser.add_argument("--fraction", type=float, default=0.25, help="part the device steps under `partial`")
    return parser.parse_args()


def main() -> None:
    """Print the table, and write JSON if asked to."""
    args = parse()
    rates = rates_of(args)
    staging = Staging(int(args.slot_mib * 2**20), args.slots, args.early_slots, device_fraction=args.fraction)
    policies = [policy for policy in POLICIES if policy != "device"]
    print("| model | micro-batches | clipping | AdamW on the device, ms | " + " | ".join(policies) + " |")
    print("|---" * (4 + len(policies)) + "|")
    rows = []
    for name in args.models:
        units = gpt_units(MODELS[name], args.tokens)
        for accumulate in (16, 1):
            for clip in (False, True):
                row = predict(units, accumulate, clip, rates, staging)
                rows.append({"model": name, **row})
                cells = [f"{100 * row[policy]['overhead']:+.1f} %" if policy in row else "" for policy in policies]
                fixed = [name, f"{accumulate} x {args.tokens}", "norm" if clip else "", f"{row['baseline_ms']:.0f}"]
                print(f"| {' | '.join([*fixed, *cells])} |")
    write(args, rows)


if __name__ == "__main__":
    main()
