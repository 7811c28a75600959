"""Optimizers written outside torch: whatever they keep, wrap or look up, they train as under stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compat import foreign
from tests.compat.nets import Noted
from tests.compat.twin import ADAM_RTOL, Outcome, assert_twins, ours, run

Optimizer = torch.optim.Optimizer
Build = Callable[[Any], Optimizer]


def sgd(module: Any) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


PROGRAMS: dict[str, Build] = {
    "Lion": lambda net: foreign.Lion(net.parameters()),
    "keyed by id": lambda net: foreign.KeyedById(net.parameters()),
    "named": lambda net: foreign.Named(net.named_parameters()),
    "flat copy": lambda net: foreign.FlatCopy(net.parameters()),
    "Lookahead": lambda net: foreign.Lookahead(sgd(net)),
    "Lookahead of Adam": lambda net: foreign.Lookahead(torch.optim.Adam(net.parameters(), lr=0.01)),
    "Lookahead with state": lambda net: foreign.LookaheadOfState(sgd(net)),
    "SAM": lambda net: foreign.SAM(net.parameters(), lr=0.1, momentum=0.9),
    "SAM of Adam": lambda net: foreign.SAM(net.parameters(), torch.optim.Adam, lr=0.01),
    "by device": lambda net: foreign.ByDevice(net.parameters()),
    "averaging": lambda net: foreign.Averaging(net.parameters()),
    "two inside": lambda net: foreign.Both(net.parameters()),
    "centralised": lambda net: foreign.Decoupled(net.parameters(), lr=0.01),
    "noisy": lambda net: foreign.Noisy(net.parameters()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program(name: str) -> None:
    assert_twins(lambda: Noted(PROGRAMS[name]), max_epochs=2)


def agreement(stock: Outcome, own: Outcome) -> dict[str, float]:
    """The cosine of the angle between the ways both runs moved each weight: 1 if they moved the same way."""
    moves = {
        name: (stock.weights[name] - stock.before[name], own.weights[name] - own.before[name]) for name in stock.moved
    }
    return {
        name: float(nn.functional.cosine_similarity(*(move.flatten() for move in pair), dim=0))
        for name, pair in moves.items()
        if pair[0].is_floating_point()
    }


BY_SIGN = ("Lion", "Lookahead of Adam", "SAM of Adam", "centralised", "two inside")
"""First steps of these go by the sign of the gradient; where it is near zero, BF16 decides otherwise."""


IN_BF16 = [(name, precision) for name in PROGRAMS for precision in ("bf16-mixed", "bf16-true")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), IN_BF16)
def test_each_program_moves_bf16_weights_the_same_way(name: str, precision: str) -> None:
    """BF16 gradients differ by a part in 256; the masters must still take the steps an FP32 run takes."""
    stock, own = run(lambda: Noted(PROGRAMS[name])), run(lambda: Noted(PROGRAMS[name]), ours(precision))
    least = 0.85 if name in BY_SIGN else 0.97
    assert {weight: cosine for weight, cosine in agreement(stock, own).items() if not cosine > least} == {}


def test_agreement_can_fail() -> None:
    stock = run(lambda: Noted(sgd))
    other = run(lambda: Noted(lambda net: torch.optim.SGD(net.parameters(), lr=0.1, maximize=True)))
    assert min(agreement(stock, other).values()) < 0.5


class ClosesOverNothing(Noted):
    """Its closure leaves gradients to the optimizer to clear, as recipes for sharpness-aware steps do."""

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            return loss

        self.optimizers().step(closure)


def test_gradients_cleared_inside_the_step_stay_cleared() -> None:
    own = assert_twins(lambda: ClosesOverNothing(PROGRAMS["SAM"], manual=True))
    assert len(own.notes) == 2 * 3 + 1  # two closures a step


class TwoSteps(Noted):
    """Calls the two halves of a sharpness-aware step itself, with a backward pass between them."""

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        for half in (optimizer.first_step, optimizer.second_step):
            loss = self.loss(batch)
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            half()


def test_halves_of_a_step_called_by_hand() -> None:
    """Only the base inside is stepped by torch's `step`, and it is not the optimizer Lightning knows."""
    assert_twins(lambda: TwoSteps(PROGRAMS["SAM"], manual=True), ignore=["calls"])


class Schedulefree(Noted):
    """Exchanges weights for their average around validation and at the end, as schedule-free optimizers want it."""

    def on_train_epoch_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).train()

    def on_train_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).eval()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self.loss(batch).detach().clone())
        self.log("loss", self.losses[-1])


def test_schedule_free_exchanges_weights() -> None:
    own = assert_twins(
        lambda: Schedulefree(PROGRAMS["averaging"]), max_epochs=3, limit_val_batches=2, num_sanity_val_steps=0
    )
    assert own.metrics


class NoHooks(Optimizer):
    """Never calls the constructor of its base; a plain run fails as well, but in the middle."""

    def __init__(self, params: Any):
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state: dict[Any, Any] = {}  # type: ignore[assignment]
        self.defaults: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = foreign.evaluate(closure)
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            p.sub_(0.1 * p.grad)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": []}


class OnlyOnGpu(Optimizer):
    """Asserts what packages of GPU kernels assert; on the CPU a plain run fails as well, but in the middle."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        loss = foreign.evaluate(closure)
        raise RuntimeError("FusedLAMB: parameters must be on a CUDA device")
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoHooks, "NoHooks: its step does not run torch's optimizer hooks.*Call torch.optim.Optimizer.__init__"),
        (OnlyOnGpu, "OnlyOnGpu: it cannot step parameters in host memory.*Use one that runs on the CPU"),
    ],
)
def test_what_cannot_step_on_the_host_is_refused_before_the_first_batch(kind: Any, message: str) -> None:
    steps: list[int] = []

    class Counted(Noted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=message):
        run(lambda: Counted(lambda net: kind(net.parameters())), ours())
    assert not steps


def test_class_state_and_groups_are_those_of_the_user() -> None:
    """Also in a hook, where callbacks look at them."""

    class Looks(Noted):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            held = optimizer.param_groups[0]["params"]
            self.losses.append(torch.tensor([p is own for p, own in zip(held, self.parameters(), strict=True)]))
            assert type(optimizer) is foreign.Lion
            assert [cls for cls in foreign.Lion.__subclasses__() if cls.__name__ == "Lion"] == []

    own = assert_twins(lambda: Looks(PROGRAMS["Lion"]), ADAM_RTOL)
    assert own.optimizers[0]["class"] == "tests.compat.foreign.Lion"
