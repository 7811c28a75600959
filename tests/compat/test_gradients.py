"""What user code sees of gradients, and what it does to them, counts as under stock Lightning."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.compat.nets import BOTH, Noted
from tests.compat.twin import ADAM_RTOL, assert_twins, ours, run
from tests.net import adamw, sgd


class Sees(Noted):
    """Looks at its gradients wherever Lightning lets it."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("on_before_backward")

    def on_after_backward(self) -> None:
        self.look("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")


@pytest.mark.parametrize("accumulate", [1, 2])
@BOTH
def test_gradients_are_there_wherever_a_plain_run_has_them(optimizer: Any, rtol: float, accumulate: int) -> None:
    own = assert_twins(
        lambda: Sees(optimizer), rtol, accumulate_grad_batches=accumulate, gradient_clip_val=0.01, max_epochs=2
    )
    looks = [note for note in own.notes if isinstance(note, tuple)]
    seen = {name for name, gradients in looks if gradients["inner.weight"] is not None}
    assert seen >= {"on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"}


class Norms(Noted):
    """Logs the norms of its gradients as the documentation shows it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.notes.append(norms)
        self.log_dict(norms)


@BOTH
def test_grad_norm(optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Norms(optimizer), rtol)
    assert [len(note) for note in own.notes if isinstance(note, dict)] == [6, 6, 6]
    assert float(own.metrics["grad_2.0_norm_total"]) > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_grad_norm_in_bf16(precision: str) -> None:
    stock, own = run(Norms), run(Norms, ours(precision))
    for name, value in stock.metrics.items():
        assert float(own.metrics[name]) == pytest.approx(float(value), rel=0.1), name


class Clips(Noted):
    """Clips in one of the ways found in user code."""

    def __init__(self, way: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer, manual=way == "manual")
        self.way = way

    def trained(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.grad is not None]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.way == "self.parameters()":
            self.notes.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.01)))
        elif self.way == "value":
            nn.utils.clip_grad_value_(self.parameters(), 1e-3)
        elif self.way == "groups":
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 0.01)
        elif self.way == "adaptive":
            for p in self.trained():
                p.grad.mul_((0.01 * p.detach().norm().clamp(min=1e-3) / (p.grad.norm() + 1e-6)).clamp(max=1))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.way == "configure":
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        elif self.way == "configure by hand":
            self.notes.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.01)))
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        optimizer.step()


WAYS = ["self.parameters()", "value", "groups", "adaptive", "configure", "configure by hand", "manual"]


@pytest.mark.parametrize("way", WAYS)
@BOTH
def test_clipping_by_the_user(way: str, optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Clips(way, optimizer), rtol)
    plain = run(lambda: Noted(optimizer, manual=False))
    assert optimizer is adamw or not torch.equal(own.weights["inner.weight"], plain.weights["inner.weight"])
    norms = [note for note in own.notes if isinstance(note, float)]
    assert all(norm > 0.01 for norm in norms)  # the true norm, and not the 0.0 of gradients that are elsewhere


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@BOTH
def test_clipping_by_the_trainer(algorithm: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Sees(optimizer), rtol, gradient_clip_val=0.001, gradient_clip_algorithm=algorithm)


class Guarded(Noted):
    """Has a batch whose gradients are not finite, and skips it."""

    def __init__(self, way: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.way = way

    def loss(self, x: Tensor) -> Tensor:
        loss = super().loss(x)
        return loss * float("nan") if len(self.losses) == 1 else loss

    def broken(self) -> bool:
        return any(p.grad is not None and not p.grad.isfinite().all() for p in self.parameters())

    def on_after_backward(self) -> None:
        if self.way == "module.zero_grad" and self.broken():
            self.zero_grad()
        elif self.way == "set to zero" and self.broken():
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0)
        elif self.way == "none" and self.broken():
            for p in self.parameters():
                p.grad = None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.way != "optimizer_step":
            return super().optimizer_step(epoch, batch_idx, optimizer, closure)
        closure()
        if self.broken():
            return optimizer.zero_grad()
        return optimizer.step()


@pytest.mark.filterwarnings("ignore:.*found no gradient in any of its")
@pytest.mark.parametrize("way", ["module.zero_grad", "set to zero", "none", "optimizer_step"])
@BOTH
def test_guards_against_nan(way: str, optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Guarded(way, optimizer), rtol)
    assert all(value.isfinite().all() for value in own.weights.values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.filterwarnings("ignore:.*found no gradient in any of its")
def test_guards_against_nan_in_bf16(precision: str) -> None:
    own = run(lambda: Guarded("module.zero_grad"), ours(precision))
    assert all(value.isfinite().all() for value in own.weights.values())
    assert "inner.weight" in own.moved


class Edits(Noted):
    """Changes gradients between backward and step."""

    def __init__(self, way: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.way = way

    def on_after_backward(self) -> None:
        weight, bias = self.inner.weight, self.outer.bias
        if self.way == "in place":
            weight.grad.mul_(0.5)
            bias.grad.add_(0.01)
        elif self.way == "through data":
            weight.grad.data.mul_(0.5)
        elif self.way == "replaced":
            weight.grad = weight.grad * 0.5
        elif self.way == "transposed":
            weight.grad = torch.arange(128.0).view(8, 16).t() / 1000
        elif self.way == "broadcast":
            bias.grad = torch.tensor(0.3).expand(4)
        elif self.way == "one removed":
            weight.grad = None
        elif self.way == "masked":
            weight.grad[0].zero_()
        elif self.way == "noise":
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        elif self.way == "of the frozen":
            self.frozen.weight.grad = torch.ones(16, 16)
        elif self.way == "swapped":
            weight.grad, self.outer.weight.grad = self.outer.weight.grad.mean() * torch.ones(16, 8), torch.ones(4, 16)


EDITS = ["in place", "through data", "replaced", "transposed", "broadcast", "one removed", "masked", "noise"]


@pytest.mark.parametrize("way", [*EDITS, "of the frozen", "swapped"])
@BOTH
def test_gradients_changed_by_hand(way: str, optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Edits(way, optimizer), rtol)
    assert ("frozen.weight" in own.moved) is (way == "of the frozen")


class Surgery(Noted):
    """Projects the gradients of two tasks onto each other, and assigns the sum."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, shared = self.optimizers(), [*self.inner.parameters()]
        first, second = self.loss(batch), self(batch).abs().mean()
        grads = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in (first, second)]
        optimizer.zero_grad()
        self.manual_backward(first + second)
        for p, a, b in zip(shared, *grads, strict=True):
            dot = (a * b).sum()
            p.grad = a + b - (dot.clamp(max=0) / (b.norm() ** 2 + 1e-9)) * b
        optimizer.step()


def test_gradients_of_two_tasks_combined() -> None:
    assert_twins(Surgery)


class Penalty(Noted):
    """Its loss holds the norm of a gradient, whose graph goes through backward twice."""

    def loss(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().loss(x) + (gradient.norm(dim=1) - 1).square().mean()


@BOTH
def test_gradient_penalty(optimizer: Any, rtol: float) -> None:
    assert_twins(partial(Penalty, optimizer), 10 * rtol)  # second derivatives carry a last bit further
    own = run(partial(Penalty, optimizer), ours("bf16-mixed"))
    assert "inner.weight" in own.moved


class ForwardOnly(Noted):
    """Writes its gradients without autograd, under no_grad, from differences of the loss."""

    def __init__(self) -> None:
        super().__init__(adamw, manual=True)

    @torch.no_grad()
    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        weight, optimizer = self.outer.weight, self.optimizers()
        optimizer.zero_grad()
        direction = torch.randn_like(weight)
        weight.add_(direction, alpha=1e-3)
        above = self.loss(batch)
        weight.sub_(direction, alpha=2e-3)
        below = self.loss(batch)
        weight.add_(direction, alpha=1e-3)
        weight.grad = direction * (above - below) / 2e-3
        optimizer.step()


def test_gradients_without_backward() -> None:
    assert_twins(ForwardOnly, ADAM_RTOL * 100)  # the estimate divides a difference of losses, 1e-7 wrong, by 2e-3
