"""Several ranks train what one process would: against a plain torch loop on the batches of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ddp.driver import launch
from tests.ddp.programs import Run
from tests.ddp.ranks import FirstRankOnly, RanksLoop, RecordedMean, SumsRanks, batches_of_ranks
from tests.models import make_batches, reference_loop
from tests.reference import EPOCHS, Case, assert_identical, follow

STEP_RTOL = 1e-6
"""Of the kernel against torch's AdamW, as on one device: both reduce with a single sum, which has no order."""

FP32 = "32-true"
UNUSED = {"find_unused_parameters": True}

RUNS = {
    "adamw": Run(Case("plain", FP32, 1, "none", "adamw")),
    "adamw norm": Run(Case("groups", FP32, 3, "norm", "adamw")),
    "adamw value": Run(Case("frozen", FP32, 2, "value", "adamw")),
    "adam": Run(Case("tied", FP32, 2, "norm", "adam_l2")),
    "sgd": Run(Case("plain", FP32, 1, "none", "sgd")),
    "sgd norm": Run(Case("tied", FP32, 2, "norm", "sgd")),
    "sgd bf16": Run(Case("groups", "bf16-true", 2, "value", "sgd")),
    "rmsprop mixed": Run(Case("plain", "bf16-mixed", 1, "norm", "rmsprop")),
    "unused": Run(Case("unused", FP32, 1, "none", "adamw"), UNUSED),
    "unused accumulated": Run(Case("unused", "bf16-mixed", 3, "norm", "adamw"), UNUSED),
    "unused sgd": Run(Case("unused", "bf16-true", 1, "none", "sgd"), UNUSED),
    "mixed": Run(Case("plain", "bf16-mixed", 1, "norm", "adamw")),
    "bf16": Run(Case("odd", "bf16-true", 3, "norm", "adamw")),
    "bf16 tied": Run(Case("tied", "bf16-true", 1, "none", "adamw")),
    "bf16 value": Run(Case("groups", "bf16-true", 1, "value", "adamw")),
    "static graph": Run(Case("plain", "bf16-true", 1, "norm", "adamw"), {"static_graph": True}),
}


FOUR = ("adamw norm", "adam", "sgd", "unused accumulated", "bf16", "bf16 value")
"""What four ranks train as well."""


def assert_as_reference(results: list[dict[str, Any]], run: Run, kind: type[RanksLoop] = RanksLoop) -> None:
    ranks = len(results)
    kind.num_ranks = ranks
    loop = reference_loop(run.case, kind)
    if isinstance(loop, RecordedMean):
        loop.recorded = iter(results[0]["gradients"])
    exact = run.case.optimizer in ("sgd", "rmsprop")
    follow(
        loop, batches_of_ranks(make_batches(run.case), ranks), EPOCHS, results[0]["trail"], 0 if exact else STEP_RTOL
    )
    for rank, result in enumerate(results):
        assert [float(loss) for loss in loop.losses[rank::ranks]] == result["losses"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw of each run."""
    by_rank = launch(tmp_path_factory.mktemp("two"), "cases", list(RUNS.values()))
    return {name: [result[index] for result in by_rank] for index, name in enumerate(RUNS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_the_reference(name: str, two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert_as_reference(two_ranks[name], RUNS[name])


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The same, of four ranks that torchrun starts."""
    by_rank = launch(tmp_path_factory.mktemp("four"), "cases", [RUNS[name] for name in FOUR], ranks=4, torchrun=True)
    return {name: [result[index] for result in by_rank] for index, name in enumerate(FOUR)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_the_reference(name: str, four_ranks: dict[str, list[dict[str, Any]]]) -> None:
    results = four_ranks[name]
    assert_as_reference(results, RUNS[name], RecordedMean)
    for result in results[1:]:
        for ours, theirs in zip(results[0]["trail"], result["trail"], strict=True):
            assert_identical(ours, theirs)


@pytest.mark.slow
def test_the_comparison_of_gradients_notices(four_ranks: dict[str, list[dict[str, Any]]]) -> None:
    results = [dict(result) for result in four_ranks["adamw norm"]]
    spoiled = [{name: gradient * (1 + 1e-4) for name, gradient in step.items()} for step in results[0]["gradients"]]
    results[0]["gradients"] = spoiled
    with pytest.raises(AssertionError):
        assert_as_reference(results, RUNS["adamw norm"], RecordedMean)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_have_the_same(name: str, two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    first, second = two_ranks[name]
    for ours, theirs in zip(first["trail"], second["trail"], strict=True):
        assert_identical(ours, theirs)
    assert_identical(first["state"], first["trail"][-1])
    assert_identical(second["state"], first["trail"][-1])
    for key, weight in second["left"].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, first["left"][key])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ranks_share_the_chunks_of_adam_alone(name: str, two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    (total, first), (_, second) = (result["chunks"] for result in two_ranks[name])
    spread = RUNS[name].case.optimizer.startswith("adam")
    assert total > len(two_ranks[name])  # one rank steps several
    assert first + second == (total if spread else 2 * total)
    assert abs(first - second) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SumsRanks, FirstRankOnly])
def test_the_comparison_notices(kind: type[RanksLoop], two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    with pytest.raises(AssertionError):
        assert_as_reference(two_ranks["adamw"], RUNS["adamw"], kind)


def test_batches_are_dealt_as_the_sampler_deals_them(tmp_path: Path) -> None:
    for ranks in (2, 3, 4):
        samplers = [
            torch.utils.data.DistributedSampler(range(5), ranks, rank, shuffle=False)  # type: ignore[arg-type]
            for rank in range(ranks)
        ]
        assert batches_of_ranks(range(5), ranks) == [list(step) for step in zip(*samplers, strict=True)]
