"""Copies and pickles of all that takes part, and the other namespace of Lightning."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import OffloadMonitor
from tests.compat.logged import Logged, scheduled, trainer
from tests.compat.twin import assert_same, assert_twins, compare, ours, run
from tests.net import PRECISIONS, batches

COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


def all_callbacks(folder: Path) -> list[pl.Callback]:
    """Some of each kind: with weights, with files, with a schedule."""
    return [
        WeightAveraging(),
        StochasticWeightAveraging(0.05, 1),
        ModelCheckpoint(folder, monitor="val_loss", save_last=True),
        EarlyStopping("val_loss", patience=9),
        LearningRateMonitor(),
        OffloadMonitor(),
    ]


class Copies(pl.Callback):
    """Copies everything at some moment, and keeps what the copies hold."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make: Callable[[Any], Any] | None = make
        self.held: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.make is not None:
            self.held.append(self.look(self.make, trainer, pl_module))

    def look(self, make: Callable[[Any], Any], trainer: pl.Trainer, pl_module: Any) -> Any:
        """State of copies of the module, the optimizer, the schedule, the callbacks, the loops and the Trainer."""
        module = make(pl_module)
        optimizer = make(trainer.optimizers[0])
        return [
            module.state_dict(),
            optimizer.state_dict(),
            [type(optimizer).__qualname__, type(module).__qualname__],
            make(trainer.lr_scheduler_configs[0].scheduler).state_dict(),
            [(type(own).__name__, own.state_dict()) for own in map(make, trainer.callbacks) if own is not self],
            make(trainer.fit_loop).state_dict(),
            make(trainer).global_step,
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"make": None, "held": []}


@pytest.mark.parametrize("name", COPIES)
class TestCopies:
    def test_made_in_the_middle_of_training_hold_what_stocks_hold(self, tmp_path: Path, name: str) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            pl_trainer.fit(module, batches(), batches())
            (copies,) = (callback for callback in pl_trainer.callbacks if isinstance(callback, Copies))
            return copies.held, copies.look(COPIES[name], pl_trainer, module)

        for folder in ("stock", "ours"):
            (tmp_path / folder).mkdir()
        folders = iter(("stock", "ours"))
        held = []
        for strategy in ("auto", ours()):
            folder = tmp_path / next(folders)
            callbacks = [*all_callbacks(folder), Copies(COPIES[name])]
            outcome = run(
                lambda: Logged(scheduled),
                strategy,
                callbacks=lambda made=callbacks: made,
                drive=drive,
                trainer=trainer,
                logger=True,
                default_root_dir=folder,
                max_epochs=2,
                limit_val_batches=1.0,
            )
            held.append(_without_paths(outcome.notes[-1], str(tmp_path)))
        compare("held", held[1], held[0])

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_do_not_disturb_training(self, name: str, precision: str) -> None:
        def program(callbacks: list[pl.Callback]) -> Any:
            return run(lambda: Logged(scheduled), ours(precision), callbacks=lambda: callbacks, max_epochs=2)

        assert_same(program([]), program([Copies(COPIES[name])]), ignore=["calls"])

    def test_of_a_fitted_module_train_on_as_in_stock(self, name: str) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            pl_trainer.fit(module, batches())
            twin = COPIES[name](module)
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(twin, batches())
            return twin.state_dict(), pl_trainer.optimizers[0].state_dict()

        assert_twins(lambda: Logged(scheduled), drive=drive)

    def test_of_a_trainer_fit_as_the_original(self, name: str) -> None:
        """Made before and after a fit of the original; each trains a module of its own."""

        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            early = COPIES[name](pl_trainer)
            pl_trainer.fit(module, batches())
            late = COPIES[name](pl_trainer)
            late.fit_loop.max_epochs = 2
            states = []
            for copied in (early, late):
                other = Logged(scheduled)
                copied.fit(other, batches())
                states.append((other.state_dict(), copied.optimizers[0].state_dict(), copied.global_step))
            return states

        assert_twins(lambda: Logged(scheduled), drive=drive)


def _without_paths(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_paths(item, folder)
            for key, item in value.items()
            if folder not in str(key) and not (isinstance(item, (str, dict)) and folder in str(item))
        }
    if isinstance(value, (list, tuple)):
        return [_without_paths(item, folder) for item in value]
    return value


def _module_of(ns: Any) -> Any:
    """A module of another namespace, with a backbone."""

    class Small(ns.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.head = nn.Linear(8, 2)
            self.losses: list[Tensor] = []

        def step(self, batch: Tensor) -> Tensor:
            return self.head(torch.tanh(self.backbone(batch))).square().mean()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.step(batch)
            self.losses.append(loss.detach().clone())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.step(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    return Small()


OTHERS: dict[str, Callable[[Any], Any]] = {
    "EMA": lambda ns: ns.EMAWeightAveraging(decay=0.8),
    "SWA": lambda ns: ns.StochasticWeightAveraging(0.05, 1),
    "pruning": lambda ns: ns.ModelPruning("l1_unstructured", use_lottery_ticket_hypothesis=False),
    "finetuning": lambda ns: ns.BackboneFinetuning(1, verbose=False),
    "accumulation": lambda ns: ns.GradientAccumulationScheduler({1: 2}),
    "early stopping": lambda ns: ns.EarlyStopping("val_loss", patience=1, min_delta=1.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_callbacks_of_the_other_namespace_work_as_under_its_stock(name: str) -> None:
    def other(**options: Any) -> Any:
        defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        return pytorch_lightning.Trainer(**{**defaults, **quiet, **options})

    def drive(pl_trainer: Any, module: Any) -> Any:
        assert type(pl_trainer.strategy).__mro__[0].__name__ in ("SingleDeviceStrategy", "CPUOffloadStrategy")
        pl_trainer.fit(module, batches(), batches())
        return pl_trainer.validate(module, batches(), verbose=False)

    assert_twins(
        lambda: _module_of(pytorch_lightning),
        callbacks=lambda: [OTHERS[name](pytorch_lightning.callbacks)],
        drive=drive,
        trainer=other,
        max_epochs=3,
        limit_val_batches=1.0,
    )


class Worker(torch.utils.data.Dataset):
    """Samples made in forked workers, which look at the module they inherited."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        shapes = [value.shape for value in self.module.state_dict().values()]
        return torch.full((8,), float(index + len(shapes)))


def test_forked_workers_may_hold_the_module() -> None:
    def drive(pl_trainer: pl.Trainer, module: Any) -> None:
        loader = DataLoader(Worker(module), batch_size=4, num_workers=1, multiprocessing_context="fork")
        pl_trainer.fit(module, loader, batches())

    assert_twins(Logged, drive=drive, max_epochs=2, limit_val_batches=1.0)
