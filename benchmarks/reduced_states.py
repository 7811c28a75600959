"""Train two small models with FP32, BF16 and 8-bit moments and compare the losses.

    python benchmarks/reduced_states.py [--steps N] [--seeds N] [--json PATH]

The same batches and first weights for each kind of moments; what is compared is the mean loss of the last tenth of
the steps. The first task predicts the next symbol of a random Markov chain with a transformer, the second the class
that a random network gives to random points with a perceptron.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cpu_offload.kernels import MOMENTS, ThreadPool, adamw

THREADS = ThreadPool(1)
HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
LEARNING_RATE = 3e-3
Step = Callable[..., None]


class Transformer(nn.Module):
    """Two layers, 64 wide, over 12 symbols."""

    def __init__(self, symbols: int = 12, width: int = 64, length: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next symbol at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x) + self.place[: x.shape[1]], mask, is_causal=True))


def markov_batches(generator: torch.Generator, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences in which each symbol depends on the two before it."""
    table = torch.softmax(2.5 * torch.randn(12, 12, 12, generator=generator), dim=-1)
    for _ in range(steps):
        x = torch.randint(12, (16, 49), generator=generator)
        for i in range(2, x.shape[1]):
            x[:, i] = torch.multinomial(table[x[:, i - 2], x[:, i - 1]], 1, generator=generator)[:, 0]
        yield x[:, :-1], x[:, 1:]


def teacher_batches(generator: torch.Generator, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points and the classes that a random network gives them."""
    first, second = torch.randn(32, 64, generator=generator), torch.randn(64, 10, generator=generator)
    for _ in range(steps):
        x = torch.randn(128, 32, generator=generator)
        yield x, (torch.tanh(x @ first / 2) @ second).argmax(-1)


def perceptron() -> nn.Module:
    """Three layers, 128 wide."""
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Iterator[tuple[Tensor, Tensor]]]]] = {
    "transformer": (Transformer, markov_batches),
    "perceptron": (perceptron, teacher_batches),
}


def float32_step(size: int) -> Step:
    """Return a step with moments in FP32."""
    exp_avg, exp_avg_sq = np.zeros((2, size), np.float32)

    def step(param: Any, plane: Any, **options: Any) -> None:
        adamw(param, plane, plane, exp_avg, exp_avg_sq, **options)

    return step


def reduced_step(kind: str) -> Callable[[int], Step]:
    """Return what makes a step with moments of that kind."""

    def make(size: int) -> Step:
        moments = MOMENTS[kind](size)
        return lambda param, plane, **options: moments.step(param, plane, plane, first=0, **options)

    return make


STATES: dict[str, Callable[[int], Step]] = {"float32": float32_step, **{kind: reduced_step(kind) for kind in MOMENTS}}


def train(task: str, state: str, seed: int, steps: int) -> list[float]:
    """Return the loss of every step."""
    make_model, make_batches = TASKS[task]
    torch.manual_seed(seed)
    model = make_model()
    params = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in params])
    sizes = [p.numel() for p in params]
    for p, part in zip(params, flat.split(sizes), strict=True):
        p.data = part.view_as(p)
    take_step, losses = STATES[state](flat.numel()), []
    for count, (x, y) in enumerate(make_batches(torch.Generator().manual_seed(seed), steps), start=1):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        gradients = torch.autograd.grad(loss, params)
        plane = torch.cat([g.flatten() for g in gradients]).bfloat16().float().numpy()
        rate = LEARNING_RATE * min(1, count / 20) * (1 - count / (steps + 1))
        take_step(flat.numpy(), plane, lr=rate, step=count, threads=THREADS, **HYPER)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, print the losses and their ratios, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write every loss to")
    args = parser.parse_args()
    losses = {
        task: {state: [train(task, state, seed, args.steps) for seed in range(args.seeds)] for state in STATES}
        for task in TASKS
    }
    tail = max(1, args.steps // 10)
    print(f"{args.steps} steps, {args.seeds} seeds: mean loss of the last {tail} steps, and over float32's in percent")
    for task, runs in losses.items():
        ends = {state: [statistics.fmean(run[-tail:]) for run in seeds] for state, seeds in runs.items()}
        for state, end in ends.items():
            difference = 100 * (statistics.fmean(end) / statistics.fmean(ends["float32"]) - 1)
            each = " ".join(f"{value:.4f}" for value in end)
            print(f"{task:12} {state:9} {statistics.fmean(end):.4f} {difference:+6.2f} %   seeds {each}")
    if args.json is not None:
        args.json.write_text(json.dumps({"steps": args.steps, "losses": losses}) + "\n")


if __name__ == "__main__":
    main()
