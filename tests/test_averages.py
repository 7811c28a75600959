"""Averaging, pruning and momentum teachers: callbacks that exchange or rewrite weights while training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging

from tests.net import (
    BF16_UNIT,
    PRECISIONS,
    Net,
    adamw,
    assert_equal,
    fit,
    still,
    weights,
)


def swap_by_copying(net: Net) -> Callable[[], None]:
    """As many averaging callbacks do: keep copies, write into the parameters, copy back."""
    kept = {name: parameter.data.clone() for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        parameter.data.copy_(torch.full_like(parameter, 0.7))

    def back() -> None:
        for name, parameter in net.named_parameters():
            parameter.data.copy_(kept[name])

    return back


def swap_by_rebinding(net: Net) -> Callable[[], None]:
    kept = {name: parameter.data for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        parameter.data = torch.full(parameter.shape, 0.7)

    def back() -> None:
        for name, parameter in net.named_parameters():
            parameter.data = kept[name]

    return back


def swap_by_loading(net: Net) -> Callable[[], None]:
    kept = weights(net)
    net.load_state_dict({name: torch.full_like(value, 0.7) for name, value in kept.items() if value.ndim}, strict=False)

    def back() -> None:
        net.load_state_dict(kept)

    return back


@pytest.mark.parametrize("swap", [swap_by_copying, swap_by_rebinding, swap_by_loading])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("save", [False, True], ids=["unsaved", "saved between"])
def test_what_is_exchanged_and_put_back_leaves_no_trace(
    swap: Callable[[Net], Callable[[], None]], precision: str, save: bool
) -> None:
    back: list[Callable[[], None]] = []

    def start(trainer: pl.Trainer, module: Net) -> None:
        back.append(swap(module))
        if save:
            for name, value in module.state_dict().items():
                if name.endswith(("weight", "bias")):
                    # 0.7 in FP32, or its rounding where it went through BF16
                    torch.testing.assert_close(value, torch.full_like(value, 0.7), rtol=BF16_UNIT, atol=0)

    def end(trainer: pl.Trainer, module: Net) -> None:
        back.pop()()

    net, undisturbed = Net(adamw), Net(adamw)
    for module, hooks in ((net, {"on_train_epoch_start": start, "on_validation_end": end}), (undisturbed, {})):
        if hooks:
            hooks = {"on_validation_start": start, "on_validation_end": end}
        fit(module, precision, max_epochs=2, validate=True, num_sanity_val_steps=0, **hooks)
    assert_equal(weights(net), weights(undisturbed))


AVERAGES: dict[str, Callable[..., pl.Callback]] = {
    "SWA": lambda lr=0.05: StochasticWeightAveraging(swa_lrs=lr, swa_epoch_start=2),
    "EMA": lambda lr=0.05: EMAWeightAveraging(decay=0.5),
}


class TestCallbacks:
    @pytest.mark.parametrize("name", AVERAGES)
    def test_averages_equal_stock(self, name: str) -> None:
        states = []
        for precision in ("32-true", None):
            net = Net()
            fit(net, precision, max_epochs=4, callbacks=[AVERAGES[name]()])
            states.append(weights(net))
        assert_equal(*states)

    @pytest.mark.parametrize("name", AVERAGES)
    def test_averages_of_equal_weights_are_the_weights(self, name: str) -> None:
        net = Net(still)
        before = weights(net)
        fit(net, max_epochs=4, callbacks=[AVERAGES[name](1e-20)])
        for tensor in ("inner.weight", "inner.bias", "frozen.weight"):
            # The callbacks average what they read from the parameters: BF16 numbers.
            torch.testing.assert_close(weights(net)[tensor], before[tensor], rtol=BF16_UNIT, atol=0)

    @pytest.mark.parametrize("permanent", [False, True])
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
    def test_pruning(self, precision: str, permanent: bool) -> None:
        states = []
        for own in (precision, None):
            net = Net(still)
            pruning = ModelPruning(
                "l1_unstructured",
                amount=0.5,
                parameters_to_prune=[(net.inner, "weight"), (net.frozen, "weight")],
                make_pruning_permanent=permanent,
                verbose=0,
            )
            fit(net, own, callbacks=[pruning])
            states.append({k: v for k, v in weights(net).items() if not k.startswith("norm")})
        ours, stock = states
        assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in stock.items()}
        for name, value in stock.items():
            assert torch.equal(ours[name] == 0, value == 0), name
            torch.testing.assert_close(ours[name], value, rtol=0 if precision == "32-true" else BF16_UNIT, atol=0)

    @pytest.mark.parametrize("lines", ["parameters", "state_dict"])
    def test_momentum_teacher_learns(self, lines: str) -> None:
        """Its steps are far smaller than the distance between BF16 numbers."""

        class Student(Net):
            def __init__(self) -> None:
                super().__init__(still)
                self.teacher = copy.deepcopy(self.inner).requires_grad_(False)
                with torch.no_grad():
                    for parameter in self.teacher.parameters():
                        parameter.add_(0.25)

            def on_train_batch_end(self, *_: Any) -> None:
                pairs = [(self.teacher.state_dict(), self.inner.state_dict())]
                if lines == "parameters":
                    pairs = [(dict(self.teacher.named_parameters()), dict(self.inner.named_parameters()))]
                for own, student in pairs:
                    for name, value in own.items():
                        value.data.mul_(0.999).add_(student[name].data, alpha=0.001)

        ours, stock = Student(), Student()
        fit(ours, number=20)
        fit(stock, None, number=20)
        moved = 0.25 * (1 - 0.999**20)
        for name in ("weight", "bias"):
            # It follows the student's BF16 weights, up to 2e-3 of them off, by 2 % of the way.
            expected = stock.teacher.get_parameter(name)
            torch.testing.assert_close(ours.teacher.get_parameter(name), expected, rtol=0, atol=0.02 * moved)
