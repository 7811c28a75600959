"""The ways to make an optimizer step on the host that `host_step.py` times, on memory they share.

Each starts from a BF16 gradient in the plane and FP32 masters, and leaves a BF16 weight in the plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload.kernels import MOMENTS, ThreadPool, adamw

HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}
OURS_HYPER: dict[str, Any] = {**HYPER, "beta1": 0.9, "beta2": 0.999, "decoupled": True, "step": 100}
CHUNK = 1 << 22
"""Parameters that the package steps with one call: what a staging buffer of 8 MiB holds."""

READ_WRITE_BYTES = 24
"""What `read_and_write` moves for a parameter."""


@dataclass(frozen=True)
class Way:
    """One row of the table.

    Attributes:
        name: What it is.
        least_bytes: What a step with its states must move for a parameter at least.
        step: Makes the step.
    """

    name: str
    least_bytes: int
    step: Callable[[], Any]


def gpt_sizes(num_params: int) -> list[int]:
    """Return the sizes of the tensors of a GPT with twelve or more layers and that many parameters in all."""
    width = max(64, round(math.sqrt(num_params / 144) / 64) * 64)
    layer = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    layer += [4 * width**2, 4 * width, 4 * width**2, width]
    sizes: list[int] = []
    while (left := num_params - sum(sizes)) > 0:
        sizes.append(min(left, layer[len(sizes) % len(layer)]))
    return sizes


SHAPES: dict[str, Callable[[int], list[int]]] = {"one tensor": lambda n: [n], "GPT": gpt_sizes}


class Workload:
    """FP32 weights and moments, a BF16 plane and FP32 gradients: 20 bytes a parameter, shared by most ways."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.num_params = sizes, sum(sizes)
        generator = torch.Generator().manual_seed(0)
        self.param = torch.randn(self.num_params, generator=generator)
        self.grad = torch.randn(self.num_params, generator=generator).bfloat16()
        self.exp_avg = torch.full_like(self.param, 0.01)
        self.exp_avg_sq = torch.full_like(self.param, 1e-3)
        self.grad_fp32 = torch.zeros_like(self.param)
        self.plane = self.grad.clone()

    def restore_gradient(self) -> None:
        """Put the gradient back where a step has left the weight."""
        self.plane.copy_(self.grad)

    def read_and_write(self) -> None:
        """Read and write the three FP32 arrays twice, nothing else; the second moments are positive again then."""
        for _ in range(2):
            for array in (self.param, self.exp_avg, self.exp_avg_sq):
                array.neg_()

    def ours(self, threads: ThreadPool) -> Way:
        """This package's step with FP32 moments."""
        arrays = [self.param.numpy(), self._words(), self.exp_avg.numpy(), self.exp_avg_sq.numpy()]

        def step() -> None:
            for start in range(0, self.num_params, CHUNK):
                param, plane, *moments = (array[start : start + CHUNK] for array in arrays)
                adamw(param, plane, plane, *moments, **OURS_HYPER, threads=threads)

        return Way("this package", 28, step)

    def ours_reduced(self, state_dtype: str, least_bytes: int, threads: ThreadPool) -> Way:
        """This package's step with moments of fewer bytes, in memory of their own."""
        moments, arrays = MOMENTS[state_dtype](self.num_params), (self.param.numpy(), self._words())

        def step() -> None:
            for start in range(0, self.num_params, CHUNK):
                param, plane = (array[start : start + CHUNK] for array in arrays)
                moments.step(param, plane, plane, first=start, **OURS_HYPER, threads=threads)

        return Way(f"this package, {state_dtype} moments", least_bytes, step)

    def torch_adamw(self, name: str, one_optimizer: bool = True, **options: Any) -> Way:
        """Torch's AdamW on the same memory, between the two conversions."""
        params = [torch.nn.Parameter(weight) for weight in self.param.split(self.sizes)]
        groups = [params] if one_optimizer else [[param] for param in params]
        optimizers = [torch.optim.AdamW(group, **HYPER, **options) for group in groups]
        owners = optimizers * len(params) if one_optimizer else optimizers
        others = (self.grad_fp32, self.exp_avg, self.exp_avg_sq)
        for param, owner, *parts in zip(params, owners, *(x.split(self.sizes) for x in others), strict=True):
            param.grad, exp_avg, exp_avg_sq = parts
            owner.state[param] = {"step": torch.tensor(99.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        def step() -> None:
            self.grad_fp32.copy_(self.plane)
            for optimizer in optimizers:
                optimizer.step()
            self.plane.copy_(self.param)

        return Way(name, 28, step)

    def torchao_bfloat16(self) -> Way:
        """What torchao's CPUOffloadOptimizer does for BF16 parameters: no masters, moments in BF16, all rounded."""
        weight = self.param.bfloat16()
        params = [torch.nn.Parameter(part) for part in weight.split(self.sizes)]
        for param, grad in zip(params, self.plane.split(self.sizes), strict=True):
            param.grad = grad
        optimizers = [torch.optim.AdamW([param], **HYPER, fused=True) for param in params]

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        return Way("torchao offload, BF16 without masters", 14, step)

    def _words(self) -> Any:
        words: Tensor = self.plane.view(torch.int16)
        return words.numpy().view(np.uint16)


def ways_of(work: Workload, num_threads: int, slow: bool) -> list[Way]:
    """Return every way that runs in this process, the package's own first."""
    threads = ThreadPool(num_threads)
    ways = [
        work.ours(threads),
        work.ours_reduced("bfloat16", 20, threads),
        work.ours_reduced("float8", 16, threads),
        work.torch_adamw("torch AdamW(fused=True), two conversions", fused=True),
        work.torch_adamw("torchao offload, FP32: a fused AdamW each", one_optimizer=False, fused=True),
        work.torchao_bfloat16(),
    ]
    if slow:
        ways.append(work.torch_adamw("torch AdamW(foreach=True), two conversions", foreach=True))
        ways.append(work.torch_adamw("torch AdamW(), two conversions"))
    return ways
