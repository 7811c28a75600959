"""Optimizers of every kind, stepped in every way, do under the strategy what they do under stock Lightning.

In FP32 the two must agree bit for bit, whatever is done with the optimizer: only where its arithmetic runs differs.
The one-pass AdamW and Adam round in their own order, and are compared with a tolerance.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.net import (
    Net,
    adamw,
    assert_as_stock,
    assert_close_to_stock,
    assert_equal,
    fit,
    weights,
)

Optimizer = torch.optim.Optimizer


class Given(Net):
    """Its gradients do not depend on its weights, so that a difference in the last bit stays one."""

    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)


STEPS_RTOL = 1e-6
"""Five steps of about ten roundings each, of 6e-8, most of which cancel."""


def test_assert_close_to_stock_can_fail() -> None:
    betas = iter([(0.9, 0.999), (0.9, 0.999004)])
    with pytest.raises(AssertionError, match="exp_avg_sq"):
        assert_close_to_stock(lambda: Given(partial(adamw, lr=0.0, betas=next(betas))), STEPS_RTOL, number=5)


OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "nesterov": True, "momentum": 0.5, "weight_decay": 0.01},
    "LBFGS": {"lr": 0.5, "max_iter": 4},
    "Muon": {"lr": 0.1},
}
"""For those of torch's optimizers that need or deserve more than a learning rate."""

OWN_TESTS = ("Optimizer", "Adam", "AdamW", "SparseAdam")

TORCH_OPTIMIZERS = [
    name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)
]


def of_torch(name: str, module: nn.Module) -> Optimizer:
    """One of torch's optimizers over what it accepts of the module."""
    parameters = [parameter for parameter in module.parameters() if parameter.ndim == 2 or name != "Muon"]
    kind: Any = getattr(torch.optim, name)
    return kind(parameters, **OPTIONS.get(name, {"lr": 0.01}))


@pytest.mark.parametrize("name", [name for name in TORCH_OPTIMIZERS if name not in OWN_TESTS])
def test_each_of_torch_is_stock_bit_for_bit(name: str) -> None:
    assert_as_stock(lambda: Net(partial(of_torch, name)), max_epochs=2)


ADAMS = [
    {},
    {"weight_decay": 0.125},
    {"maximize": True},
    {"foreach": True},
    {"fused": True},
    {"lr": torch.tensor(0.01)},
    {"betas": (0.8, 0.99), "eps": 1e-4},
]


@pytest.mark.parametrize("options", ADAMS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_is_stock_to_the_last_bits(kind: type[Optimizer], options: dict[str, Any]) -> None:
    def make() -> Net:
        return Given(lambda module: kind(module.parameters(), **{"lr": 0.01, **options}))

    assert_close_to_stock(make, STEPS_RTOL, number=5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_amsgrad_is_stock_bit_for_bit(kind: type[Optimizer]) -> None:
    assert_as_stock(lambda: Net(lambda module: kind(module.parameters(), lr=0.01, amsgrad=True)))


class OwnAdamW(torch.optim.AdamW):
    """Decays its learning rate by itself."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
        return loss


class StepsTwice(torch.optim.SGD):
    """Calls the closure itself, and the step of its base without one, twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        super().step()
        return loss


class KeepsParameters(torch.optim.Optimizer):
    """Puts new storage in place of its parameters, and keeps the list of them from the beginning."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.held = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.held:
            if parameter.grad is not None:
                parameter.data = parameter - 0.1 * parameter.grad
        return loss


@pytest.mark.parametrize("kind", [StepsTwice, KeepsParameters, OwnAdamW])
def test_own_optimizers_are_stock_bit_for_bit(kind: Any) -> None:
    options = {"lr": 0.05} if kind is not KeepsParameters else {}
    assert_as_stock(lambda: Net(lambda module: kind(module.parameters(), **options)))


class Embedded(Net):
    """An embedding with sparse gradients beside the rest, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__(manual=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.embedding = nn.Embedding(10, 8, sparse=True)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch + self.embedding(torch.tensor([1, 2, 2, batch_idx + 5])))
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        others = [parameter for parameter in self.parameters() if parameter is not self.embedding.weight]
        return torch.optim.SparseAdam([self.embedding.weight], lr=0.01), torch.optim.SGD(others, lr=0.1)


def test_sparse_gradients() -> None:
    ours = assert_as_stock(Embedded)
    assert ours.embedding.weight.grad is None
    for precision in ("bf16-mixed", "bf16-true"):
        net = Embedded()
        before = weights(net)["embedding.weight"]
        fit(net, precision)
        moved = (net.embedding.weight != before).any(1).nonzero().flatten().tolist()
        assert moved == [1, 2, 5, 6, 7]


class Skips(Net):
    """Has no loss for some batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)

    skipped = (0, 2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1)])
def test_training_step_that_returns_none(skipped: tuple[int, ...], accumulate: int) -> None:
    def make() -> Net:
        net = Skips()
        net.skipped = skipped
        return net

    assert_as_stock(make, number=4, accumulate_grad_batches=accumulate)


class ClearsByItself(Net):
    """Clears gradients on a road of its own, or not at every step, or never."""

    def __init__(self, road: str) -> None:
        super().__init__()
        self.road = road

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self.road == "optimizer":
            optimizer.zero_grad()
        elif self.road == "to zero":
            optimizer.zero_grad(set_to_none=False)
        elif self.road == "module":
            self.zero_grad()
        elif self.road == "lightning":
            self.optimizers().zero_grad()
        elif self.road == "by hand":
            for parameter in self.parameters():
                parameter.grad = None
        elif self.road == "every other" and batch_idx % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize("road", ["optimizer", "to zero", "module", "lightning", "by hand", "every other", "never"])
def test_clearing_gradients(road: str) -> None:
    assert_as_stock(lambda: ClearsByItself(road), number=5)


def test_several_backward_calls() -> None:
    class Repeats(Net):
        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()

    assert_as_stock(Repeats)


def test_gradients_set_by_hand() -> None:
    """Transposed and broadcast gradients, too."""

    class Sets(Net):
        def on_after_backward(self) -> None:
            self.inner.weight.grad = torch.arange(128.0).view(8, 16).t() / 1000
            self.outer.bias.grad = torch.tensor(0.3).expand(4)

    assert_as_stock(Sets)


def test_parameter_outside_the_module() -> None:
    class Outside(Net):
        def __init__(self) -> None:
            super().__init__(lambda module: torch.optim.SGD([*module.parameters(), *module.others], lr=0.1))
            self.others = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.float64))]

        def loss(self, x: Tensor) -> Tensor:
            return (self(x) * self.others[0] * self.others[1].float()).square().mean()

    assert_as_stock(Outside)


def test_parameters_of_other_dtypes_are_stepped_as_they_are() -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.precise = nn.Parameter(torch.full((4, 4), 0.1, dtype=torch.float64))
            self.empty = nn.Parameter(torch.empty(0, 3))

        def loss(self, x: Tensor) -> Tensor:
            return (self(x).double() @ self.precise).square().mean().float() + self.empty.sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*no optimizer")
        ours = assert_as_stock(Mixed)
    assert ours.precise.dtype == torch.float64


def test_class_and_attributes_of_the_optimizer_stay() -> None:
    kept: list[Optimizer] = []

    def make(module: nn.Module) -> Optimizer:
        kept.append(adamw(module))
        return kept[0]

    net = Net(make)
    before = set(torch.optim.AdamW.__subclasses__())
    trainer = fit(net)
    (optimizer,) = trainer.optimizers
    assert optimizer is kept[0]
    assert type(optimizer) is torch.optim.AdamW
    assert vars(optimizer).keys() == vars(adamw(net)).keys()
    # Lightning's own wrapper makes a subclass for each optimizer; a second one named "AdamW" would shadow torch's.
    assert {cls.__name__ for cls in set(torch.optim.AdamW.__subclasses__()) - before} <= {"LightningAdamW"}


def test_stock_trainers_afterwards_are_not_touched() -> None:
    fit(Net(adamw))
    first, second = Net(), Net()
    fit(first, None)
    fit(second, None)
    assert_equal(weights(first), weights(second))
    optimizer = adamw(Net())
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.optim.AdamW.step.hooked


class TestWarnings:
    def test_nothing_reaches_any_master(self) -> None:
        class Detached(Net):
            def loss(self, x: Tensor) -> Tensor:
                return torch.ones((), requires_grad=True) * 2

        with pytest.warns(UserWarning, match=r"SGD\.step\(\) found no gradient in any of its 6 parameters"):
            fit(Detached())

    def test_parameter_in_no_optimizer(self) -> None:
        seen: list[torch.dtype] = []

        def make(module: Net) -> Optimizer:
            return torch.optim.SGD(module.inner.parameters(), lr=0.1)

        def look(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            seen.append(module.outer.weight.dtype)
            assert module.outer.weight.grad is not None

        with pytest.warns(UserWarning, match=r"outer|norm"):
            fit(Net(make), on_train_batch_end=look)
        assert set(seen) == {torch.float32}

    def test_another_library_may_step_what_lightning_does_not(self) -> None:
        class Two(Net):
            def __init__(self) -> None:
                super().__init__(lambda module: torch.optim.SGD(module.inner.parameters(), lr=0.1))
                self.second = torch.optim.SGD(self.outer.parameters(), lr=0.1)

            def on_train_batch_end(self, *_: Any) -> None:
                self.second.step()
                self.second.zero_grad()

        with pytest.warns(UserWarning, match="no optimizer"):
            assert_as_stock(Two)
