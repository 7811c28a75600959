"""Train the 458M model on a GPU in every way there is, each in a process of its own, and compare time and memory.

    python benchmarks/gpu.py [--accumulate 1 16] [--ways NAME ...] [--seconds N] [--budget N] [--save FOLDER]

Needs torch, Lightning and numba, no network and no data: the tokens are random. A way that does not run says why, also
where the time for all of them is spent; what is asked most often comes first. The limits beside the times: what a copy
each way over the bus, and the host kernel, move per second when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.namespaces import pl
from lightning_cpu_offload.recipes.gpt import GPT

SIZE = {"num_layers": 24, "d_model": 1152, "num_heads": 16, "vocab_size": 32000, "context_length": 512, "tied": False}
SMALL = {"num_layers": 2, "d_model": 64, "num_heads": 2, "vocab_size": 256, "context_length": 64, "tied": False}
WARM_UP, NOT_COUNTED = 2, 1

DELAYED: dict[str, Any] = {"update": "delayed", "exact_steps": 0}

WAYS: dict[str, dict[str, Any] | None] = {
    "AdamW on the device, FP32": None,
    "cpu_offload": {},
    "cpu_offload, gradients on the host": {"gradients": "host"},
    "cpu_offload, delayed": DELAYED,
    "cpu_offload, a quarter on the device": {"device_fraction": 0.25},
    "cpu_offload, 8-bit moments": {"state_dtype": "float8"},
    "DeepSpeed ZeRO-Offload": None,
    "cpu_offload, no clipping": {},
    "cpu_offload, BF16 moments": {"state_dtype": "bfloat16"},
    "cpu_offload, gradients on the host, 8-bit moments": {"gradients": "host", "state_dtype": "float8"},
    "cpu_offload, delayed, 8-bit moments": {**DELAYED, "state_dtype": "float8"},
}
"""Options of the strategy; None: not this package's."""


class Clock(pl.Callback):
    """Notes when each optimizer step begins, and what the offload reports of it."""

    def __init__(self, accumulate: int, device: torch.device) -> None:
        self.accumulate = accumulate
        self.device = device
        self.times: list[float] = []
        self.reports: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """The begin of an accumulation window, by the device's own reckoning."""
        if batch_idx % self.accumulate == 0:
            if self.device.type != "cpu":
                torch.accelerator.current_stream().synchronize()
            self.times.append(time.perf_counter())
            offload = getattr(trainer.strategy, "offload", None)
            if offload is not None:
                self.reports.append(vars(offload.report).copy())


def train(way: str, accumulate: int, steps: int, small: bool) -> dict[str, Any]:
    """Train in this process and return milliseconds per step and peaks of memory in bytes."""
    size = SMALL if small else SIZE
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(**size, activation_checkpointing=True, loss_chunks=8, warmup_steps=10, max_steps=1000)
    ids = torch.randint(size["vocab_size"], (size["context_length"] + 1,))
    data: Any = torch.utils.data.DataLoader([(ids[:-1], ids[1:])] * (steps * accumulate), batch_size=1)
    clock = Clock(accumulate, device)
    strategy, precision = strategy_of(way)
    trainer = pl.Trainer(
        strategy=strategy,
        precision=precision,
        accelerator="auto",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=None if "no clipping" in way else 1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    clock.on_train_batch_start(trainer, model, None, 0)
    times = [1e3 * (stop - start) for start, stop in zip(clock.times, clock.times[1:], strict=False)]
    reports = clock.reports[NOT_COUNTED + 1 :]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": statistics.median(times[NOT_COUNTED:]),
        "parts": {name: statistics.median(report[name] for report in reports) for name in (reports or [{}])[0]},
        "device_peak_bytes": device_peak(device),
        "host_peak_bytes": host_peak(),
    }


def strategy_of(way: str) -> tuple[Any, Any]:
    """Strategy and precision of a way."""
    if way == "AdamW on the device, FP32":
        return "auto", "bf16-mixed"
    if way == "DeepSpeed ZeRO-Offload":
        return "deepspeed_stage_2_offload", "bf16-true"
    return CPUOffloadStrategy(**WAYS[way]), "bf16-true"  # type: ignore[arg-type]


def device_peak(device: torch.device) -> int | None:
    """Most bytes allocated on the device so far; None where torch does not tell."""
    if device.type == "cpu" or not hasattr(torch.accelerator, "max_memory_allocated"):
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return int(torch.accelerator.max_memory_allocated())


def host_peak() -> int | None:
    """Most bytes of resident memory so far."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def run(way: str, arguments: argparse.Namespace, accumulate: int, seconds: float) -> dict[str, Any]:
    """Train in a process of its own, for so many seconds at most: memory of one way is not that of another."""
    if seconds <= 0:
        return {"error": f"not run: {arguments.budget} s for all ways are over"}
    command = [sys.executable, __file__, "--one", way, "--accumulate", str(accumulate), "--steps", str(arguments.steps)]
    command += ["--small"] if arguments.small else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"parameters"')]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no result"])[-1][:200]}
    return dict(json.loads(lines[-1]))


def table(results: dict[str, dict[str, Any]], limits: dict[str, Any]) -> str:
    """The results as Markdown, with the limits below."""
    head = "| way | accumulate | step, ms | host kernel, ms | waited, ms | device peak, MB | host peak, MB |"
    rows = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for name, result in results.items():
        way, accumulate = name.rsplit(" x", 1)
        if "error" in result:
            rows.append(f"| {way} | {accumulate} | {result['error']} | | | | |")
            continue
        numbers = [result["step_ms"], result["parts"].get("host_ms"), result["parts"].get("total_ms")]
        numbers += [result[key] and result[key] / 1e6 for key in ("device_peak_bytes", "host_peak_bytes")]
        cells = ["" if number is None else f"{number:,.0f}" for number in numbers]
        rows.append(f"| {way} | {accumulate} | {' | '.join(cells)} |")
    rows += ["", "Limits: " + ", ".join(f"{name} {value / 1e9:,.1f} GB/s" for name, value in limits.items()) + "."]
    return "\n".join(rows)


def bandwidths() -> dict[str, float]:
    """Bytes per second of copies each way, of the device's memory, and of the host kernel."""
    from lightning_cpu_offload.estimate.hardware import device_rates, host_rate

    device = torch.accelerator.current_accelerator()
    rates = {} if device is None else device_rates(device)
    return {**{name: rates[name] for name in ("d2h", "h2d", "device") if name in rates}, "host kernel": host_rate()}


def main() -> None:
    """Run every way, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each way")
    parser.add_argument("--seconds", type=int, default=60, help="limit for each way")
    parser.add_argument("--budget", type=int, default=300, help="seconds for all ways together")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see whether it runs")
    parser.add_argument("--save", type=Path, help="folder for the results as JSON and Markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(arguments.one, arguments.accumulate[0], arguments.steps, arguments.small)))
        return
    results, deadline = {}, time.monotonic() + arguments.budget
    for way in arguments.ways:
        for accumulate in arguments.accumulate:
            seconds = min(arguments.seconds, deadline - time.monotonic())
            results[f"{way} x{accumulate}"] = run(way, arguments, accumulate, seconds)
            print(f"{way} x{accumulate}: {results[f'{way} x{accumulate}']}", flush=True)
    limits, machine = bandwidths(), describe_machine()
    device = torch.accelerator.current_accelerator()
    machine["device"] = torch.cuda.get_device_name() if device is not None and device.type == "cuda" else str(device)
    text = table(results, limits)
    print(text)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        stem = arguments.save / f"gpu_{str(machine['device']).lower().replace(' ', '-')}_{machine['date']}"
        stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "limits": limits, "results": results}))
        stem.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
