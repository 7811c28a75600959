"""Train `configs/gpt_small.yaml` with FP32, BF16 and 8-bit moments and compare the final validation losses.

    python benchmarks/gpt_small_states.py [--states NAME ...] [--seeds N ...] [--json PATH] [WORD ...]

A run takes some minutes. Each adds its losses to the JSON file as soon as it has ended, and one that is there already
is not made again, so that the runs may be made in several goes. Further words go to the command line, as
`--trainer.max_steps=20` for a try. The table is of all runs in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

from machine import describe_machine

from lightning_cpu_offload.cli import OffloadCLI, validation_loss
from lightning_cpu_offload.offload.moments import STATE_DTYPES, moment_bytes

CONFIG = Path(__file__).resolve().parents[1] / "configs/gpt_small.yaml"
Run = dict[str, Any]


def train(state: str, seed: int, words: list[str]) -> Run:
    """Return the validation losses before and after a run, and its number of steps."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")
        cli = OffloadCLI(
            [
                "fit",
                f"--config={CONFIG}",
                "--trainer.strategy=lightning_cpu_offload.CPUOffloadStrategy",
                f"--trainer.strategy.state_dtype={state}",
                f"--trainer.default_root_dir={folder}",
                f"--trainer.logger.save_dir={folder}",
                "--trainer.enable_progress_bar=false",
                f"--seed_everything={seed}",
                *words,
            ]
        )
    run = {"state_dtype": state, "seed": seed, "words": words, "steps": cli.trainer.global_step}
    return {**run, "before": cli.recorder.loss_before, "after": validation_loss(cli.trainer)}


def table(runs: list[Run]) -> str:
    """Losses by kind of moments; differences from FP32 are of the mean over the seeds that both have."""
    rows = ["moments    bytes  seeds  final validation loss  over float32  each seed"]
    reference = {run["seed"]: run["after"] for run in runs if run["state_dtype"] == "float32"}
    for state in STATE_DTYPES:
        losses = {run["seed"]: run["after"] for run in runs if run["state_dtype"] == state}
        if not losses:
            continue
        both = sorted(losses.keys() & reference.keys())
        over = "-"
        if both:
            ratio = statistics.fmean(losses[s] for s in both) / statistics.fmean(reference[s] for s in both)
            over = f"{100 * (ratio - 1):+.2f} %"
        each = " ".join(f"{losses[seed]:.4f}" for seed in sorted(losses))
        mean = statistics.fmean(losses.values())
        rows.append(f"{state:9} {moment_bytes(state):6.2f} {len(losses):6} {mean:22.4f} {over:>13}  {each}")
    return "\n".join(rows)


def main() -> None:
    """Make the runs that are not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", nargs="+", choices=STATE_DTYPES, default=STATE_DTYPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, default=Path("gpt_small_states.json"), help="file that runs are added to")
    args, words = parser.parse_known_args()
    result: dict[str, Any] = {"machine": describe_machine(), "runs": []}
    if args.json.exists():
        result = json.loads(args.json.read_text())
    runs = result["runs"]
    for seed in args.seeds:
        for state in args.states:
            if not any((run["state_dtype"], run["seed"], run["words"]) == (state, seed, words) for run in runs):
                runs.append(train(state, seed, words))
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table([run for run in runs if run["words"] == words]))


if __name__ == "__main__":
    main()
