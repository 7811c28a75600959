"""Every optimizer of torch, with every switch of its constructor: listed by looking, so that none is forgotten."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compat.twin import ADAM_RTOL, RUN_RTOL, assert_twins, ours, run
from tests.net import Net

Optimizer = torch.optim.Optimizer

CLASSES = {
    kind.__name__: kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}

OPTIONS: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 0.05},
    "LBFGS": {"lr": 0.5, "max_iter": 4},
    "Muon": {"lr": 0.1},
}
"""Where a learning rate of 0.01 is not enough to show, or not all."""

FUSED = ("Adam", "AdamW")
"""What the one-pass kernel steps; it rounds in its own order."""


def build(name: str, options: dict[str, Any], module: nn.Module) -> Optimizer:
    """The optimizer over what it accepts of the module's parameters."""
    accepted = [parameter for parameter in module.parameters() if name != "Muon" or parameter.ndim == 2]
    return CLASSES[name](accepted, **{"lr": 0.01, **OPTIONS.get(name, {}), **options})


class Given(Net):
    """Its gradients do not depend on its weights, so that a difference in the last bit stays one."""

    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)


class Sparse(Net):
    """Embeddings whose gradients are sparse, and nothing else trained."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(optimizer)
        self.requires_grad_(False)
        self.embedding = nn.Embedding(10, 8, sparse=True)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x + self.embedding(torch.tensor([1, 2, 2, len(self.losses)])))


def check(name: str, options: dict[str, Any]) -> None:
    """The optimizer trains as under stock Lightning: bit for bit, or to the last bits where the kernel steps."""
    kind = Sparse if name == "SparseAdam" else Given if name in FUSED else Net
    if name == "SparseAdam":
        assert_twins(lambda: Sparse(lambda net: CLASSES[name](net.embedding.parameters(), **{"lr": 0.1, **options})))
    else:
        exact = name not in FUSED or options.get("amsgrad")
        assert_twins(lambda: kind(partial(build, name, options)), 0.0 if exact else ADAM_RTOL, max_epochs=2)


@pytest.mark.parametrize("name", CLASSES)
def test_each_class(name: str) -> None:
    check(name, {})


def switches(name: str) -> list[str]:
    """The constructor's arguments that are switched on and off."""
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool) or p.name in ("foreach", "fused")]


OF_A_DEVICE = ("capturable", "differentiable")
"""Switches with tests of their own: torch itself refuses them for parameters on the CPU, or for leaves."""

SWITCHED = [(name, switch) for name in CLASSES for switch in switches(name) if switch not in OF_A_DEVICE]

NEEDED = {"nesterov": {"momentum": 0.9}}
"""What a switch cannot do without."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "switch"), SWITCHED, ids=lambda value: value)
def test_each_switch(name: str, switch: str) -> None:
    defaults = inspect.signature(CLASSES[name]).parameters
    check(name, {**(NEEDED.get(switch, {}) if "momentum" in defaults else {}), switch: not defaults[switch].default})


def test_switches_are_found() -> None:
    assert {"amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable"} <= set(switches("AdamW"))
    assert {"LBFGS", "Adagrad", "SparseAdam", "Adafactor", "RMSprop", "SGD", "Rprop", "ASGD", "AdamW"} <= set(CLASSES)


CAPTURABLE = [name for name in CLASSES if "capturable" in switches(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_is_for_the_device(name: str) -> None:
    """It works on a GPU in a plain run, so it must work here; the settings stay as the user gave them."""
    kind = Given if name in FUSED else Net
    plain = run(lambda: kind(partial(build, name, {})))
    own = run(lambda: kind(partial(build, name, {"capturable": True})), ours())
    for weight, value in plain.weights.items():
        torch.testing.assert_close(own.weights[weight], value, rtol=RUN_RTOL, atol=1e-6)
    assert own.moved == plain.moved
    assert all(group["capturable"] for group in own.optimizers[0]["groups"])


DIFFERENTIABLE = [name for name in CLASSES if "differentiable" in switches(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable_is_refused_by_torch_as_ever(name: str) -> None:
    for strategy in ("auto", ours()):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            run(lambda: Net(partial(build, name, {"differentiable": True})), strategy)


TENSOR_LR = [name for name in CLASSES if "Tensor" in str(inspect.signature(CLASSES[name]).parameters["lr"].annotation)]


@pytest.mark.parametrize("name", TENSOR_LR)
def test_learning_rate_in_a_tensor(name: str) -> None:
    check(name, {"lr": torch.tensor(0.02)})


@pytest.mark.parametrize("name", [*FUSED, "NAdam", "RAdam"])
def test_decay_of_both_kinds(name: str) -> None:
    for decoupled in (False, True):
        options = (
            {"weight_decay": 0.1} if name == "AdamW" else {"weight_decay": 0.1, "decoupled_weight_decay": decoupled}
        )
        check(name, options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_iter": 1},
        {"max_iter": 20},
        {"max_iter": 6, "line_search_fn": "strong_wolfe"},
        {"history_size": 2},
    ],
    ids=str,
)
def test_lbfgs_with_many_closures(options: dict[str, Any]) -> None:
    own = assert_twins(lambda: Net(partial(build, "LBFGS", options)), max_epochs=2)
    assert own.progress["step"] == 6
    assert options.get("max_iter") == 1 or len(own.notes) > 2 * 6


def test_state_made_in_a_constructor() -> None:
    def make(module: nn.Module) -> Optimizer:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.3)
        assert all(float(state["sum"].min()) == pytest.approx(0.3) for state in optimizer.state.values())
        return optimizer

    assert_twins(lambda: Net(make))
    own = run(lambda: Net(make), ours("bf16-true"))
    sums = [state["sum"] for state in own.optimizers[0]["state"].values()]
    assert {(total.dtype, total.device.type) for total in sums} == {(torch.float32, "cpu")}


def test_muon_beside_adamw() -> None:
    class Both(Given):
        def __init__(self) -> None:
            super().__init__(manual=True)

        def optimize(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            matrices = [self.inner.weight, self.outer.weight]
            others = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
            return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.01)

    assert_twins(Both, ADAM_RTOL)
