"""The reference is proven against stock Lightning where both agree; the comparisons are proven to fail."""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.models import make_batches, reference_loop, train_reference, train_with_lightning
from tests.reference import (
    EPOCHS,
    Case,
    ReferenceLoop,
    Snapshot,
    all_cases,
    assert_close,
    assert_identical,
    assert_same_losses,
    follow,
    pairwise,
    within_a_step,
)

CHOICES: dict[str, list[Any]] = {
    "structure": ["plain", "tied", "frozen", "unused", "groups", "odd"],
    "precision": ["32-true", "bf16-mixed", "bf16-true"],
    "accumulate": [1, 2, 3, 16],
    "clip": ["none", "norm", "value"],
    "optimizer": ["sgd", "adamw"],
}
Spoil = Callable[[dict[str, Any]], None]
BATCHNORM = [Case("batchnorm", precision, optimizer="adamw") for precision in ("32-true", "bf16-mixed")]


class StockLightning(ReferenceLoop):
    """What stock Lightning does: FP32 weights under "bf16-mixed", and no FP32 masters under "bf16-true"."""

    def device_dtype(self, owner: nn.Module, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if self.case.precision == "bf16-mixed" else super().device_dtype(owner, tensor)

    def initial_master(self, parameter: Tensor) -> Tensor:
        master = super().initial_master(parameter)
        return master.bfloat16() if self.case.precision == "bf16-true" else master


@pytest.mark.parametrize("case", [*sorted(pairwise(**CHOICES), key=str), *BATCHNORM], ids=str)
def test_reference_equals_stock_lightning_bit_for_bit(case: Case) -> None:
    module = train_with_lightning(case, precision=case.precision)
    loop = train_reference(case, StockLightning)
    assert_same_losses(module.losses, loop.losses)
    ours, expected = module.snapshot(), loop.snapshot()
    if case.precision == "bf16-true":
        for snapshot in (ours, expected):  # the one buffer, which stock Lightning leaves rounded
            snapshot.entries.pop("weight/gain", None)
    assert_identical(ours, expected)


def test_nothing_here_imports_the_package() -> None:
    for path in [*Path(__file__).parent.glob("*.py"), Path(models.__file__)]:
        imported = re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), flags=re.MULTILINE)
        assert imported
        assert not [name for name in imported if name.startswith("lightning_cpu")]


def test_pairwise_meets_every_pair() -> None:
    chosen = pairwise(**CHOICES)
    assert len(chosen) < len(all_cases(**CHOICES)) / 10
    for first, second in combinations(CHOICES, 2):
        met = {(getattr(case, first), getattr(case, second)) for case in chosen}
        assert len(met) == len(CHOICES[first]) * len(CHOICES[second])


def add_one_ulp(entries: dict[str, Any]) -> None:
    weight = entries["weight/outer.weight"]
    weight[3, 7] = torch.nextafter(weight[3, 7], torch.tensor(torch.inf))


def add_a_few_ulp(entries: dict[str, Any]) -> None:
    entries["state/2/exp_avg"][5] *= 1 + 4e-6


def put_nan(entries: dict[str, Any]) -> None:
    entries["weight/norm.bias"][0] = torch.nan


def lose_a_moment(entries: dict[str, Any]) -> None:
    del entries["state/1/exp_avg_sq"]


def step_an_unused_parameter(entries: dict[str, Any]) -> None:
    entries["state/6/step"] = torch.tensor(1.0)


def miscount(entries: dict[str, Any]) -> None:
    entries["state/0/step"] += 1


def forget_the_schedule(entries: dict[str, Any]) -> None:
    entries["group/0/lr"] = 0.01


def round_a_weight(entries: dict[str, Any]) -> None:
    entries["weight/norm.weight"] = entries["weight/norm.weight"].bfloat16()


def flatten_a_moment(entries: dict[str, Any]) -> None:
    entries["state/0/exp_avg"] = entries["state/0/exp_avg"].flatten()


SPOILS = [
    add_a_few_ulp,
    put_nan,
    lose_a_moment,
    step_an_unused_parameter,
    miscount,
    forget_the_schedule,
    round_a_weight,
    flatten_a_moment,
]


@pytest.fixture
def trained() -> tuple[Snapshot, Snapshot]:
    """The same state twice."""
    loop = train_reference(Case(optimizer="adamw"))
    return loop.snapshot(), loop.snapshot()


@pytest.mark.parametrize("spoil", [add_one_ulp, *SPOILS])
def test_exact_comparison_fails(trained: tuple[Snapshot, Snapshot], spoil: Spoil) -> None:
    ours, expected = trained
    assert_identical(ours, expected)
    spoil(ours.entries)
    with pytest.raises(AssertionError):
        assert_identical(ours, expected)


@pytest.mark.parametrize("spoil", SPOILS)
def test_step_comparison_fails(trained: tuple[Snapshot, Snapshot], spoil: Spoil) -> None:
    ours, expected = trained
    tolerance = within_a_step(before=expected, rtol=1e-6)
    add_one_ulp(ours.entries)
    assert_close(ours, expected, tolerance)
    spoil(ours.entries)
    with pytest.raises(AssertionError):
        assert_close(ours, expected, tolerance)


def test_loss_comparison_fails() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    assert_same_losses(losses, losses)
    for wrong in (losses[:1], losses[::-1], [loss.bfloat16() for loss in losses]):
        with pytest.raises(AssertionError):
            assert_same_losses(wrong, losses)


def test_lockstep_comparison_fails() -> None:
    case = Case(precision="32-true", optimizer="adamw")
    trail = train_with_lightning(case, watched=True).trail
    batches = make_batches(case)
    follow(reference_loop(case), batches, EPOCHS, trail, rtol=0)
    for wrong in (trail[:-1], [*trail, trail[-1]], [trail[0], *trail]):
        with pytest.raises(AssertionError):
            follow(reference_loop(case), batches, EPOCHS, wrong, rtol=1e-6)
    add_a_few_ulp(trail[1].entries)
    with pytest.raises(AssertionError, match="state/2/exp_avg: 1 of 24"):
        follow(reference_loop(case), batches, EPOCHS, trail, rtol=1e-6)
