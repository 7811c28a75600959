"""Modules that step by themselves: Lightning's wrapper or torch's own object, with closures, one or two optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.net import (
    RUN_RTOL,
    Net,
    adamw,
    assert_as_stock,
    assert_close_to_stock,
    fit,
    sgd,
    weights,
)


def lbfgs(module: Net) -> torch.optim.Optimizer:
    """An optimizer that calls its closure several times a step, and keeps the list of its parameters."""
    return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)


class Raw(Net):
    """Steps torch's own optimizer object, as code written for plain PyTorch does."""

    def __init__(self, way: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer, manual=True)
        self.way = way

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            return loss

        optimizer = self.optimizers(use_pl_optimizer=self.way.startswith("lightning"))
        if self.way.endswith("closure"):
            optimizer.step(closure)
        elif self.way.endswith("keyword"):
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("way", ["raw", "raw closure", "raw keyword", "lightning", "lightning closure"])
class TestManual:
    def test_step_is_stock_bit_for_bit(self, way: str) -> None:
        assert_as_stock(lambda: Raw(way))

    def test_adamw_moves_the_masters(self, way: str) -> None:
        """A step far smaller than the distance between BF16 numbers arrives; stepping BF16 weights would lose it."""
        net = Raw(way, partial(adamw, lr=1e-6, weight_decay=0.0))
        before = weights(net)
        fit(net, number=1)
        moved = (weights(net)["inner.weight"] - before["inner.weight"]).abs()
        # The first step of Adam is lr for any gradient; weights near 0.3 round by 1.5e-8.
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-6), rtol=0.03, atol=0)

    def test_lbfgs(self, way: str) -> None:
        if way.endswith(("closure", "keyword")):
            ours = assert_as_stock(lambda: Raw(way, lbfgs))
            assert len(ours.losses) > 3  # its closure was called more than once a step


class Gan(Net):
    """Two optimizers that take turns, each with the other's parameters switched off."""

    def __init__(self, toggle: bool, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__(manual=True)
        self.toggle = toggle
        self.kind = optimizer

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = sign * self.loss(batch)
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, second = [*self.inner.parameters(), *self.norm.parameters()], self.outer.parameters()
        return self.kind(first, lr=0.1), self.kind(second, lr=0.05)


@pytest.mark.parametrize("toggle", [False, True])
def test_two_optimizers(toggle: bool) -> None:
    assert_as_stock(lambda: Gan(toggle))
    assert_close_to_stock(lambda: Gan(toggle, torch.optim.AdamW), RUN_RTOL)
