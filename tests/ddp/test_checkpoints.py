"""A checkpoint of several ranks is that of one device: the same file, whoever wrote it and whoever goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.ddp.driver import launch
from tests.ddp.programs import Run
from tests.models import NetworkModule, make_batches, quiet_trainer
from tests.reference import EPOCHS, Case, Snapshot, assert_identical

RUNS = {
    "adamw": Run(Case("tied", "bf16-mixed", 1, "norm", "adamw")),
    "float8": Run(Case("groups", "bf16-true", 2, "none", "adamw"), {"state_dtype": "float8"}),
    "delayed": Run(Case("odd", "32-true", 1, "none", "adamw"), {"update": "delayed", "exact_steps": 1}),
    "sgd": Run(Case("plain", "bf16-mixed", 1, "none", "sgd")),
}

Results = list[dict[str, dict[str, Snapshot]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Results:
    """What two ranks saved."""
    return launch(folder, "checkpoints", RUNS)


@pytest.fixture(scope="module")
def of_one_device(folder: Path) -> dict[str, tuple[Path, Snapshot]]:
    """What one device saves, after one epoch."""
    found = {}
    for name, run in RUNS.items():
        module = NetworkModule(run.case)
        trainer = alone(run, offloaded(run), max_epochs=1)
        trainer.fit(module, data(run))
        path = folder / f"{name}.ckpt"
        trainer.save_checkpoint(path)
        found[name] = path, module.snapshot()
    return found


def offloaded(run: Run) -> CPUOffloadStrategy:
    precision: Any = run.case.precision
    return CPUOffloadStrategy(cpu_threads=1, precision_plugin=CPUOffloadPrecision(precision), **run.options)


def alone(run: Run, strategy: Any, **options: Any) -> pl.Trainer:
    case = run.case
    return quiet_trainer(
        strategy=strategy,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_value,
        **{"max_epochs": EPOCHS, **options},
    )


def data(run: Run) -> Any:
    return torch.utils.data.DataLoader(make_batches(run.case), batch_size=None)  # type: ignore[arg-type]


def in_file(path: Path) -> Snapshot:
    checkpoint = torch.load(path, weights_only=True)
    weights = {name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items()}
    return Snapshot(weights, checkpoint["optimizer_states"][0])


class Begin(pl.Callback):
    """The state with which training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.state = module.snapshot()


def begin_alone(run: Run, strategy: Any, path: Path) -> Snapshot:
    begin = Begin()
    alone(run, strategy, callbacks=[begin]).fit(NetworkModule(run.case), data(run), ckpt_path=path)
    return begin.state


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("when", ["within", "after"])
def test_the_file_holds_what_all_ranks_have(name: str, when: str, saved: Results, folder: Path) -> None:
    for rank in saved:
        assert_identical(in_file(folder / name / f"{when}.ckpt"), rank[name]["saved"])


@pytest.mark.slow
def test_tied_weights_are_written_once(saved: Results, folder: Path) -> None:
    state = torch.load(folder / "adamw" / "within.ckpt", weights_only=True)["state_dict"]
    assert state["network.head.weight"].data_ptr() == state["network.embedding.weight"].data_ptr()
    for path in (folder / "adamw").glob("*.ckpt"):
        assert all(type(value) is Tensor for value in torch.load(path, weights_only=True)["state_dict"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_device_goes_on_from_two_ranks(name: str, saved: Results, folder: Path) -> None:
    run = RUNS[name]
    assert_identical(begin_alone(run, offloaded(run), folder / name / "within.ckpt"), saved[0][name]["saved"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_plain_trainer_goes_on_from_two_ranks(name: str, saved: Results, folder: Path) -> None:
    assert_identical(begin_alone(RUNS[name], "auto", folder / name / "within.ckpt"), saved[0][name]["saved"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_go_on_from_one_device_and_from_two_ranks(
    ranks: int, saved: Results, of_one_device: dict[str, tuple[Path, Snapshot]], folder: Path
) -> None:
    theirs = {f"one {name}": (RUNS[name], path) for name, (path, _) in of_one_device.items()}
    ours = {f"two {name}": (run, folder / name / "within.ckpt") for name, run in RUNS.items()}
    results = launch(folder / str(ranks), "resume", {**theirs, **ours}, ranks=ranks, torchrun=ranks == 4)
    for result in results:
        for name in RUNS:
            assert_identical(result[f"one {name}"]["begin"], of_one_device[name][1])
            assert_identical(result[f"two {name}"]["begin"], saved[0][name]["saved"])
            if ranks == 2 and name != "delayed":  # a late step is begun anew, as on one device
                assert_identical(result[f"two {name}"]["end"], saved[0][name]["whole"])
