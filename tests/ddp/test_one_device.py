"""Two ranks make the very steps of one device that sees the batches of both: bit for bit, whatever holds the state.

In FP32 the gradient is half of one rank's plus half of the other's, here and there, and a sum of two has no order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from lightning_cpu_offload.kernels.threads import physical_cores
from tests.ddp.driver import launch
from tests.ddp.events import Pairs
from tests.ddp.ranks import batches_of_ranks
from tests.models import NetworkModule, make_batches, quiet_trainer
from tests.reference import EPOCHS, Case, assert_identical

CASE = Case("plain", "32-true", 1, "none", "adamw")

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "threads": {"cpu_threads": None},
    "delayed": {"update": "delayed", "exact_steps": 1},
    "bfloat16": {"state_dtype": "bfloat16"},
    "float8": {"state_dtype": "float8"},
    "delayed float8": {"update": "delayed", "exact_steps": 0, "state_dtype": "float8"},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What one rank and two ranks end with, by their number."""
    folder = tmp_path_factory.mktemp("ranks")
    return {number: launch(folder / str(number), "as_one_device", OPTIONS, ranks=number) for number in (1, 2)}


def one_device(module: NetworkModule, batches: list[Any], options: dict[str, Any]) -> NetworkModule:
    precision = CPUOffloadPrecision("32-true")
    strategy = CPUOffloadStrategy(precision_plugin=precision, **{"cpu_threads": 1, **options})
    data: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    quiet_trainer(strategy=strategy, max_epochs=EPOCHS).fit(module, data)
    return module


def assert_same(found: dict[str, Any], module: NetworkModule) -> None:
    for name, weight in module.state_dict().items():
        assert torch.equal(found["weights"][name], weight), name
    assert_identical(found["state"], module.snapshot())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_are_one_device_with_both_batches(name: str, ranks: dict[int, list[dict[str, Any]]]) -> None:
    module = one_device(Pairs(CASE), batches_of_ranks(make_batches(CASE), 2), OPTIONS[name])
    for rank in ranks[2]:
        assert_same(rank[name], module)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_one_rank_is_one_device(name: str, ranks: dict[int, list[dict[str, Any]]]) -> None:
    module = one_device(NetworkModule(CASE), make_batches(CASE), OPTIONS[name])
    assert_same(ranks[1][0][name], module)


@pytest.mark.slow
def test_ranks_share_the_cores_whatever_the_launcher_says(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """`OMP_NUM_THREADS` was 1 for all of them."""
    assert ranks[1][0]["threads"]["threads"] == physical_cores()
    for rank in ranks[2]:
        assert rank["threads"]["threads"] == max(1, physical_cores() // 2)
        assert rank["exact"]["threads"] == 1


@pytest.mark.slow
def test_the_comparison_notices(ranks: dict[int, list[dict[str, Any]]]) -> None:
    module = one_device(Pairs(CASE), batches_of_ranks(make_batches(CASE), 2), {})
    with pytest.raises(AssertionError):
        assert_same(ranks[2][0]["delayed"], module)


def test_the_folder_holds_what_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such program"):
        launch(tmp_path, "no such program", ranks=1)
