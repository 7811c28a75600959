"""Odd things in the middle of training on two ranks: nothing hangs, nothing is silently wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_cpu_offload import CPUOffloadDDPStrategy
from tests.ddp.driver import launch
from tests.ddp.events import PLAIN
from tests.models import make_network
from tests.reference import assert_identical


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("happenings")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return launch(folder, "happenings")


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Spoiled", "SpoiledAfterwards"])
def test_all_ranks_skip_the_step_of_a_gradient_that_is_not_finite_on_one(kind: str, ranks: list[Any]) -> None:
    (number, message, weights), (others_number, _, others) = (rank[kind] for rank in ranks)
    assert (number, others_number, message) == (2, 2, "")  # in each of two epochs
    assert all(weight.isfinite().all() for weight in weights.values())
    assert_same_weights(weights, others)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "delayed"])
def test_one_rank_alone_reads_no_masters_and_does_not_hang(update: str, ranks: list[Any]) -> None:
    heard, message = ranks[0][f"alone {update}"]
    assert message == ""
    for what in ("module", "part", "optimizer"):
        assert heard[what].startswith("RuntimeError")
        assert "gathered()" in heard[what]
    assert heard["step"] == heard["weights"] == ""
    assert ranks[1][f"alone {update}"] == ({}, "")


@pytest.mark.slow
def test_what_cannot_be_stepped_in_parts_is_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["static graph"].startswith("ValueError: accumulate_grad_batches=2: with static_graph=True")
        assert rank["amsgrad"].startswith("RuntimeError")
        assert "amsgrad" in rank["amsgrad"]
        assert "norm.bias" in rank["unfrozen"]
        assert "find_unused_parameters" in rank["unfrozen"]


@pytest.mark.slow
@pytest.mark.parametrize("traceless", [False, True])
def test_writes_into_weights_reach_masters_on_every_rank(traceless: bool, ranks: list[Any]) -> None:
    weights, others = (rank[f"clamped {traceless}"] for rank in ranks)
    assert_same_weights(weights, others)
    bound = torch.tensor(0.2).bfloat16()  # what is rounded to it was not written to, and its master stays
    assert all(weight.abs().max().bfloat16() <= bound for name, weight in weights.items() if "gain" not in name)
    assert any(float(weight.abs().max()) > 0.199 for name, weight in weights.items() if "gain" not in name)


@pytest.mark.slow
def test_after_an_exception_nothing_is_asked_of_others(ranks: list[Any]) -> None:
    initial = {f"network.{name}": value for name, value in make_network("plain").state_dict().items()}
    for rank in ranks:
        message, weights = rank["raised"]
        assert message == "ValueError: enough"
        assert rank["saved after it"].startswith("RuntimeError")
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            # One step of 0.01 away from the beginning, and rounded to BF16 where another rank has the master.
            assert (weight - initial[name]).abs().max() <= 0.0101 + 2**-8 * initial[name].abs().max()


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_heard_on_all(ranks: list[Any], folder: Path) -> None:
    assert ranks[0]["full disk"].startswith("OSError")
    assert ranks[1]["full disk"].startswith("RuntimeError: rank 0 could not write")
    assert not (folder / "full.ckpt").exists()
    assert (folder / "room.ckpt").exists()
    assert_identical(ranks[0]["room"], ranks[1]["room"])


@pytest.mark.slow
def test_averages_are_of_masters(ranks: list[Any]) -> None:
    trail, left = ranks[0]["averaged"]
    average = {name: value.clone() for name, value in make_network("plain").named_parameters()}
    for count, step in enumerate(trail):
        for name, value in average.items():
            new = step.entries[f"weight/{name}"]
            average[name] = new if count == 0 else value + (new - value) * 0.5
    for name, value in average.items():
        # Each of six averages rounds once more than here, or once less.
        torch.testing.assert_close(left[f"network.{name}"], value, rtol=1e-6, atol=1e-7)
    assert_same_weights(left, ranks[1]["averaged"][1])


@pytest.mark.slow
def test_validation_reduces_what_is_logged(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["validated"]["rank"] == 0.5
        assert rank["validated"]["loss"] == ranks[0]["validated"]["loss"]


@pytest.mark.slow
def test_validating_after_fit_leaves_all_that_can_be_saved(folder: Path, ranks: list[Any]) -> None:
    assert [rank["saved after validate"] for rank in ranks] == ["", ""]
    fitted, validated = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("fitted", "validated"))
    assert_same_weights(validated["state_dict"], fitted["state_dict"])
    (optimizer,), (before,) = validated["optimizer_states"], fitted["optimizer_states"]
    assert len(before["state"]) > 0
    for index, state in before["state"].items():
        assert_same_weights(optimizer["state"][index], state)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    launch(tmp_path, "dies", check=False, timeout=150)
    assert not list(tmp_path.glob("dies.*.pt"))
    assert "rank 0 of 2 ends by RuntimeError" in (tmp_path / "dies.log").read_text()
    assert time.monotonic() - began < 140


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gradients": "host"}, "gradients"),
        ({"gradients": "auto"}, "gradients"),
        ({"update": "early"}, "early"),
        ({"device_fraction": 0.3}, "device_fraction"),
        ({"device_memory": "1GiB"}, "device_memory"),
        ({"device": "cpu"}, "device"),
        ({"model_averaging_period": 4}, "model_averaging_period"),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 10)}, "ddp_comm_state"),
        ({"update": "sometimes"}, "sometimes"),
        ({"cpu_threads": 0}, "cpu_threads"),
    ],
)
def test_refuses_what_it_does_not_do(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CPUOffloadDDPStrategy(**options)


def test_takes_the_defaults_of_one_device_and_the_options_of_ddp() -> None:
    strategy = CPUOffloadDDPStrategy(gradients="device", find_unused_parameters=True)
    assert strategy._ddp_kwargs == {
        "gradient_as_bucket_view": True,
        "init_sync": False,
        "find_unused_parameters": True,
    }
    assert PLAIN.optimizer == "adamw"
