"""What OffloadMonitor costs: processor time in its hooks against the time of a step.

`python benchmarks/monitor.py` trains the GPT of configs/gpt_small.yaml for 100 steps on its own kind of batches, with
TensorBoard, a record every 10 steps and one timeline, and prints milliseconds per step. Time in a thread's own
processor time is counted, so what else runs on the machine hardly matters for the monitor's part; it does for a step's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_cpu_offload import OffloadMonitor
from lightning_cpu_offload.recipes import GPT

HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
ACCUMULATE = 4


def timed(spent: dict[str, float], name: str, hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, with its processor time added up."""

    def run(*args: Any, **kwargs: Any) -> None:
        begin = time.thread_time()
        hook(*args, **kwargs)
        spent[name] = spent.get(name, 0.0) + time.thread_time() - begin

    return run


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    spent: dict[str, float] = {}
    monitor = OffloadMonitor(log_every_n_steps=10, timeline_every_n_steps=steps, summary=False)
    for name in HOOKS:
        setattr(monitor, name, timed(spent, name, getattr(monitor, name)))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(256, (257,), generator=generator) for _ in range(4 * ACCUMULATE * steps)]
    loader = DataLoader([(row[:-1], row[1:]) for row in rows], batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy="cpu_offload",
            devices=1,
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=1.0,
            max_steps=steps,
            logger=TensorBoardLogger(folder),
            callbacks=[monitor],
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        begin = time.perf_counter()
        trainer.fit(GPT(num_layers=4, d_model=192, num_heads=3), loader)
        step_ms = (time.perf_counter() - begin) / steps * 1e3
    total = 0.0
    for name, seconds in spent.items():
        total += seconds / steps * 1e3
        print(f"{name:26} {seconds / steps * 1e3:8.3f} ms per step")
    print(f"{'all hooks':26} {total:8.3f} ms per step, {100 * total / step_ms:.2f} % of {step_ms:.1f} ms")


if __name__ == "__main__":
    main()
