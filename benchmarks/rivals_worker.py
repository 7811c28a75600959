"""Run by `rivals.py` in the rivals' environment: reads sizes and then `step` lines, answers `ok` or `error`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


def deepspeed(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """DeepSpeed's CPU Adam, built at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, **HYPER, adamw_mode=True, fp32_optimizer_states=True)


def bitsandbytes(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The AdamW of bitsandbytes with 8-bit moments, for tensors of any size."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **HYPER, min_8bit_size=1)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"deepspeed": deepspeed, "bitsandbytes": bitsandbytes}


def make_step(name: str, sizes: list[int]) -> Callable[[], float]:
    """Return what makes one step, conversions included, and returns its milliseconds."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(sum(sizes), generator=generator)
    grad = torch.randn(sum(sizes), generator=generator).bfloat16()
    grad_fp32, plane = torch.zeros_like(param), torch.zeros_like(grad)
    params = [torch.nn.Parameter(part) for part in param.split(sizes)]
    for parameter, part in zip(params, grad_fp32.split(sizes), strict=True):
        parameter.grad = part
    optimizer = OPTIMIZERS[name](params)

    def step() -> float:
        plane.copy_(grad)
        start = time.perf_counter()
        grad_fp32.copy_(plane)
        optimizer.step()
        plane.copy_(param)
        return (time.perf_counter() - start) * 1e3

    return step


def main() -> None:
    """Answer line by line until the input ends."""
    name, num_threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(num_threads)
    try:
        step = make_step(name, json.loads(sys.stdin.readline()))
        print("ok", flush=True)
        for _ in sys.stdin:
            print("ok", step(), flush=True)
    except Exception as error:
        print("error", type(error).__name__, str(error).replace("\n", " ")[:300], flush=True)


if __name__ == "__main__":
    main()
