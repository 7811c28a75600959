"""Time one optimizer step over ten thousand small tensors and over one large one of as many elements.

    python benchmarks/many_tensors.py [--tensors N] [--elements N] [--rounds N] [--threads N]

What is timed is `optimizer.step()` of an attached AdamW on a CPU "device", gradients already there: what the user of
a model with many small parameters waits for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from machine import describe_machine
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.kernels import physical_cores
from lightning_cpu_offload.namespaces import pl


class Vectors(pl.LightningModule):
    """Parameters of one size that are given the same gradient and stepped by hand, a number of times."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.vectors = nn.ParameterList(torch.randn(elements) for _ in range(tensors))
        self.times: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Step once, timed."""
        optimizer: Any = self.optimizers()
        for vector in self.vectors:
            vector.grad = torch.full_like(vector, 0.1)
        start = time.perf_counter()
        optimizer.step()
        self.times.append((time.perf_counter() - start) * 1e3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def measure(tensors: int, elements: int, rounds: int, threads: int) -> list[float]:
    """Return the milliseconds of each step but the first."""
    module = Vectors(tensors, elements)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=CPUOffloadStrategy(cpu_threads=threads),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(rounds + 1)))
    return module.times[1:]


def main() -> None:
    """Measure and print the ratio first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--elements", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=physical_cores())
    args = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()), f"threads {args.threads}\n")
    one = measure(1, args.tensors * args.elements, args.rounds, args.threads)
    many = measure(args.tensors, args.elements, args.rounds, args.threads)
    print(f"{args.tensors:,} tensors of {args.elements:,} over one of {args.tensors * args.elements:,}: ", end="")
    print(f"{statistics.median(many) / statistics.median(one):.2f}")
    for name, times in (("one", one), ("many", many)):
        print(f"{name:5}{statistics.median(times):9.1f} ms, {min(times):.1f} to {max(times):.1f}")


if __name__ == "__main__":
    main()
