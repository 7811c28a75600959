"""Time one optimizer step over ten thousand small tensors and over one large one of as many elements.

    python benchmarks/many_tensors.py [--tensors N] [--elements N] [--rounds N] [--threads N]

What is timed is `optimizer.step()` of an attached AdamW on a CPU "device", gradients already there: what the user of
a model with many small parameters waits for.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from machine import describe_machine, milliseconds
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.kernels import physical_cores
from lightning_cpu_offload.namespaces import pl

LIMIT = 1.5
"""What many tensors may cost at most, as a multiple of one."""


class Vectors(pl.LightningModule):
    """As many elements in one tensor and in many, stepped by hand in turns by an optimizer each."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.ParameterList([torch.randn(tensors * elements)])
        self.many = nn.ParameterList(torch.randn(elements) for _ in range(tensors))
        self.times: dict[str, list[float]] = {"one": [], "many": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Step each once, timed."""
        optimizers: Any = self.optimizers()
        for (name, times), optimizer in zip(self.times.items(), optimizers, strict=True):
            for parameter in getattr(self, name):
                parameter.grad = torch.full_like(parameter, 0.1)
            times.append(milliseconds(optimizer.step))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW for each."""
        return [torch.optim.AdamW(self.one), torch.optim.AdamW(self.many)]


def measure(tensors: int, elements: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step but the first, of one tensor and of many."""
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
    return {name: times[1:] for name, times in module.times.items()}


def main() -> None:
    """Measure and print the ratio first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--elements", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=physical_cores())
    args = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()), f"threads {args.threads}\n")
    times = measure(args.tensors, args.elements, args.rounds, args.threads)
    ratio = statistics.median(many / one for one, many in zip(times["one"], times["many"], strict=True))
    print(f"{args.tensors:,} tensors of {args.elements:,} over one of {args.tensors * args.elements:,}: ", end="")
    print(f"{ratio:.2f} (limit {LIMIT})")
    one, many = (statistics.median(times[name]) for name in ("one", "many"))
    print(f"above one, for each tensor: {(many - one) / args.tensors * 1e3:.1f} microseconds")
    for name, found in times.items():
        print(f"{name:5}{statistics.median(found):9.1f} ms, {min(found):.1f} to {max(found):.1f}")


if __name__ == "__main__":
    main()
