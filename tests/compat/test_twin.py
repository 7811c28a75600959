"""The comparison of two runs finds what differs between them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.compat.twin import ADAM_RTOL, assert_refused, assert_same, assert_twins, compare, run, twins
from tests.net import Net


@pytest.fixture(scope="module")
def outcomes() -> tuple[Any, Any]:
    return twins(Net)


def _weight(outcome: Any) -> None:
    outcome.weights["inner.weight"][3, 5] += 1e-7


def _dtype(outcome: Any) -> None:
    outcome.weights["inner.weight"] = outcome.weights["inner.weight"].bfloat16().float().half()


def _kind(outcome: Any) -> None:
    outcome.tensors["inner.weight"] = ("torch.bfloat16", *outcome.tensors["inner.weight"][1:])


def _state(outcome: Any) -> None:
    outcome.optimizers[0]["state"]["outer.bias"]["momentum_buffer"][0] *= 1.001


def _class(outcome: Any) -> None:
    outcome.optimizers[0]["class"] += "Offloaded"


def _group(outcome: Any) -> None:
    outcome.optimizers[0]["groups"][0]["fused"] = True


def _call(outcome: Any) -> None:
    outcome.calls.insert(7, outcome.calls.pop(6))


def _step(outcome: Any) -> None:
    outcome.progress["step"] += 1


def _loss(outcome: Any) -> None:
    outcome.notes.pop(0)


def _metric(outcome: Any) -> None:
    outcome.metrics["loss"] = torch.tensor(1.0)


def _key(outcome: Any) -> None:
    outcome.checkpoint["masters"] = {}


def _nan(outcome: Any) -> None:
    outcome.weights["inner.bias"][0] = float("nan")


FAULTS = [_weight, _dtype, _kind, _state, _class, _group, _call, _step, _loss, _metric, _key, _nan]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__[1:])
@pytest.mark.parametrize("rtol", [0.0, ADAM_RTOL])
def test_every_difference_is_found(outcomes: tuple[Any, Any], fault: Any, rtol: float) -> None:
    stock, ours = outcomes
    assert_same(stock, ours, rtol)
    spoiled = copy.deepcopy(ours)
    fault(spoiled)
    if fault is _weight and rtol:
        assert_same(stock, spoiled, rtol)  # within it
    else:
        with pytest.raises(AssertionError):
            assert_same(stock, spoiled, rtol)


def test_a_run_that_trains_nothing_is_found() -> None:
    with pytest.raises(AssertionError, match="nothing was trained"):
        assert_twins(lambda: Net(lambda module: torch.optim.SGD(module.parameters(), lr=0.0)).eval(), max_epochs=0)


def test_another_seed_is_another_run(outcomes: tuple[Any, Any]) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.90001))

    with pytest.raises(AssertionError):
        assert_same(outcomes[0], run(Other))


def test_hooks_are_written_down(outcomes: tuple[Any, Any]) -> None:
    calls = outcomes[1].calls
    for name in ("[LightningModule]Net.on_before_optimizer_step", "[Strategy].backward"):
        assert calls.count(name) == 3


def test_nan_equals_nan() -> None:
    compare("x", torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), ADAM_RTOL)
    with pytest.raises(AssertionError):
        compare("x", [float("nan")], [1.0], 1.0)


def test_what_is_not_refused_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_refused(Net, "anything")
