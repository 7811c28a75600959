"""Time the whole training step of `configs/gpt_small.yaml` on the CPU: this package, a loop by hand, stock Lightning.

    python benchmarks/fit_step.py [--steps N] [--rounds N] [--threads N] [--save FOLDER]

An optimizer step is four batches, clipping, the step and the schedule. In each round every way trains a fresh model
on the same batches; the first steps of a round do not count. The loop by hand holds FP32 masters, steps them with
this package's kernel and sends the weights back: what the strategy does, without Lightning and without its care.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine, file_stem
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.kernels import ThreadPool, adamw, physical_cores, warm_up
from lightning_cpu_offload.namespaces import pl
from lightning_cpu_offload.recipes import GPT
from lightning_cpu_offload.recipes.gpt import parameter_groups, warmup_cosine

LIMIT = 1.05
"""What the strategy's step may take at most, as a multiple of the loop by hand."""

OURS, BY_HAND = "Trainer(strategy='cpu_offload')", "loop by hand"
ACCUMULATE, NOT_COUNTED = 4, 2
SIZE: dict[str, Any] = {"num_layers": 4, "d_model": 192, "num_heads": 3, "vocab_size": 256, "context_length": 256}
RATE, DECAY, WARMUP = 3e-3, 0.1, 20
Batches = DataLoader[tuple[Tensor, Tensor]]


@dataclass
class Row:
    """One way and the milliseconds of its optimizer steps, a list for each round."""

    name: str
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Median of each round."""
        return [statistics.median(times) for times in self.rounds]


class Clock(pl.Callback):
    """Notes the time at the first batch of every optimizer step, and the dtypes of the weights in training."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.dtypes: dict[str, torch.dtype] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if batch_idx % ACCUMULATE == 0:
            self.times.append(time.perf_counter())
        self.dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}


def steps_of(times: list[float]) -> list[float]:
    """Return the milliseconds between the noted times, without those that do not count."""
    return [1e3 * (stop - start) for start, stop in itertools.pairwise(times)][NOT_COUNTED:]


def make_model() -> GPT:
    """Return the same model each time."""
    torch.manual_seed(0)
    return GPT(**SIZE, learning_rate=RATE, warmup_steps=WARMUP, weight_decay=DECAY)


def make_batches(steps: int) -> Batches:
    """Return what is needed for `steps` optimizer steps, each batch 4 windows of 256 ids."""
    ids = torch.randint(256, (steps * ACCUMULATE, 4, 257), generator=torch.Generator().manual_seed(0))
    pairs: Any = [(window[:, :-1], window[:, 1:]) for window in ids]
    return DataLoader(pairs, batch_size=None)


def fit(batches: Batches, **options: Any) -> Clock:
    """Train with Lightning."""
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(make_model(), batches)
    return clock


def offload(num_threads: int) -> CPUOffloadStrategy:
    """Return the strategy; one serves one fit."""
    return CPUOffloadStrategy(cpu_threads=num_threads)


class Part:
    """Parameters of one group and dtype, end to end: weights as the model sees them, masters and moments in FP32."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, weight_decay: float) -> None:
        self.parameters, self.weight_decay = parameters, weight_decay
        self.master = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.weights, self.plane = self.master.to(dtype), torch.zeros_like(self.master, dtype=dtype)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        parts = self.weights.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)

    def step(self, lr: float, step: int, threads: ThreadPool) -> None:
        """Gradients into the plane, step, weights out of it."""
        torch.cat([parameter.grad.flatten() for parameter in self.parameters], out=self.plane)
        words = self.plane.dtype == torch.bfloat16
        plane = self.plane.view(torch.int16).numpy().view(np.uint16) if words else self.plane.numpy()
        adamw(
            self.master.numpy(),
            plane,
            plane,
            self.exp_avg.numpy(),
            self.exp_avg_sq.numpy(),
            lr=lr,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=self.weight_decay,
            decoupled=True,
            step=step,
            threads=threads,
        )
        self.weights.copy_(self.plane)


def train_by_hand(batches: Batches, dtypes: dict[str, torch.dtype], num_threads: int) -> list[float]:
    """Train with a plain loop; return the times of the steps' beginnings."""
    model, threads, times = make_model(), ThreadPool(num_threads), []
    dtype_of = {parameter: dtypes[name] for name, parameter in model.named_parameters()}
    parts = []
    for group in parameter_groups(model, DECAY):
        for dtype in dict.fromkeys(dtypes.values()):
            if mine := [parameter for parameter in group["params"] if dtype_of[parameter] == dtype]:
                parts.append(Part(mine, dtype, group["weight_decay"]))
    steps = len(batches) // ACCUMULATE
    for index, (inputs, targets) in enumerate(batches):
        if index % ACCUMULATE == 0:
            times.append(time.perf_counter())
        with forward_context(dtypes):
            loss = model.head(model.body(inputs), targets)
        (loss / ACCUMULATE).backward()
        if (index + 1) % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            done = index // ACCUMULATE
            for part in parts:
                part.step(RATE * warmup_cosine(done, WARMUP, steps, 0.1), done + 1, threads)
            model.zero_grad()
    return times


def forward_context(dtypes: dict[str, torch.dtype]) -> contextlib.AbstractContextManager[Any]:
    """Return autocast where the strategy has BF16 weights, and nothing where it computes in FP32."""
    if torch.bfloat16 in dtypes.values():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    return contextlib.nullcontext()


def measure(steps: int, rounds: int, num_threads: int) -> list[Row]:
    """Time the three ways in turns."""
    batches = make_batches(steps + NOT_COUNTED + 1)
    dtypes = fit(make_batches(2), strategy=offload(num_threads)).dtypes
    precision: Any = "bf16-mixed" if torch.bfloat16 in dtypes.values() else "32-true"
    ways: dict[str, Callable[[], list[float]]] = {
        BY_HAND: lambda: train_by_hand(batches, dtypes, num_threads),
        OURS: lambda: fit(batches, strategy=offload(num_threads)).times,
        f"stock Lightning, AdamW on the device, {precision}": lambda: fit(batches, precision=precision).times,
    }
    rows = {name: Row(name) for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rows[name].rounds.append(steps_of(way()))
    return list(rows.values())


def ratio(row: Row, by_hand: Row) -> float:
    """Return the median of the ratios of the rounds' medians."""
    return statistics.median(own / hand for own, hand in zip(row.medians, by_hand.medians, strict=True))


def table(rows: list[Row]) -> str:
    """Return our ratio to the loop by hand with its limit, then all ratios, paired by round, and times as a table."""
    ratios = {row.name: ratio(row, rows[0]) for row in rows}
    lines = [f"* {OURS} over the {BY_HAND}: {ratios[OURS]:.3f} (limit {LIMIT})\n"]
    lines += ["| way | by hand = 1 | ms a step | least | most |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        times = [taken for times in row.rounds for taken in times]
        spread = f"{statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f}"
        lines.append(f"| {row.name} | {ratios[row.name]:.3f} | {spread} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="timed optimizer steps of each way in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_cores(), help="torch's and the kernel's threads")
    parser.add_argument("--save", type=Path, help="folder to write every measured time and the table to")
    args, machine = parser.parse_args(), describe_machine()
    torch.set_num_threads(args.threads)
    warm_up()
    title = ", ".join(f"{key} {value}" for key, value in machine.items()) + f", threads {args.threads}\n"
    rows = measure(args.steps, args.rounds, args.threads)
    print(title, table(rows), sep="\n")
    if args.save is not None:
        stem = args.save / file_stem("fit_step", machine)
        result = {"machine": machine, "threads": args.threads, "rows": [asdict(row) for row in rows]}
        stem.with_suffix(".json").write_text(json.dumps(result) + "\n")
        stem.with_suffix(".md").write_text("\n".join([title, table(rows)]))


if __name__ == "__main__":
    main()
