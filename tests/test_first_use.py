"""Every kernel that a fit calls was called by the warm-up with the same types: no step waits for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy, kernels
from lightning_cpu_offload.namespaces import pl
from tests.models import quiet_trainer

MODULES = [import_module(f"{kernels.__name__}.{name}") for name in ("adamw", "fingerprint", "gradients", "moments")]
"""Where kernels are called."""

Call = tuple[Any, ...]
"""The name of a kernel and the numba types of its arguments: what makes a compiled kernel of its own."""


class Calls:
    """Notes calls of kernels: those of `warm_up`, and all others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warm_up: Callable[..., float] = kernels.warm_up) -> None:
        self.warm: set[Call] = set()
        self.later: set[Call] = set()
        self._current = self.later
        self._warm_up = warm_up
        monkeypatch.setattr(kernels, "warm_up", self.warm_up)
        for module in MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, Dispatcher) and value.targetoptions.get("nogil"):
                    monkeypatch.setattr(module, name, self._noting(name, value))

    def warm_up(self, **options: Any) -> float:
        self._current = self.warm
        try:
            return self._warm_up(**options)
        finally:
            self._current = self.later

    def _noting(self, name: str, kernel: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._current.add((name, *map(numba.typeof, args)))
            return kernel(*args)

        return call


class Mixed(pl.LightningModule):
    """BF16 and FP32 weights, in two groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(300, 300), nn.LayerNorm(300)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(self.linear(batch)).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.linear.parameters()}, {"params": self.norm.parameters(), "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)


def fit(precision: str, **options: Any) -> None:
    trainer = quiet_trainer(
        max_steps=3, precision=precision, gradient_clip_val=1.0, strategy=CPUOffloadStrategy(**options)
    )
    trainer.fit(Mixed(), torch.utils.data.DataLoader(torch.randn(12, 300), batch_size=4))


PRECISIONS = ["bf16-mixed", "bf16-true", "32-true"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("grads", ["device", "host"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8"])
def test_the_warm_up_meets_every_kernel_of_a_fit(
    precision: str, grads: str, state_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    fit(precision, gradients=grads, state_dtype=state_dtype)
    assert calls.later
    assert calls.later <= calls.warm


def test_few_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    for host_gradients in (False, True):
        for state_dtype in ("float32", *kernels.MOMENTS):
            calls.warm.clear()
            kernels.warm_up(host_gradients=host_gradients, state_dtype=state_dtype)
            assert len(calls.warm) <= 8


def test_a_warm_up_for_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = kernels.warm_up
    calls = Calls(monkeypatch, lambda **options: warm_up())
    fit("bf16-mixed", gradients="host")
    assert {call[0] for call in calls.later - calls.warm} == {"_accumulate_shares", "_update_shares"}
