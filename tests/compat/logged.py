"""For tests of callbacks and Trainer features: a module that logs, a Trainer that writes, files read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from tests.net import Net, batches, sgd

FP32 = "32-true"

Drive = Callable[[pl.Trainer, Any], Any]


class Logged(Net):
    """Logs its losses, so that callbacks can monitor them.

    Args:
        optimizer: As for `Net`.
        options: As for `Net`.

    Attributes:
        notes: Compared between the twins: whatever a test puts there.
    """

    def __init__(self, optimizer: Any = sgd, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.notes: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Shaped(Logged):
    """Says what its inputs look like, and has hyperparameters."""

    def __init__(self, width: int = 8, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters("width")
        self.example_input_array = torch.ones(2, width)

    def on_train_batch_end(self, *_: Any) -> None:
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram("inner", self.inner.weight, self.global_step)


def scheduled(module: Any, interval: str = "step") -> Any:
    """SGD whose learning rate falls."""
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _falling)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


per_epoch = partial(scheduled, interval="epoch")


def trainer(**options: Any) -> pl.Trainer:
    """A Trainer on the CPU that may log, save and show what it is told to, in `default_root_dir`."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **options})


def mostly_slow(names: Iterable[Any], *fast: Any) -> list[Any]:
    """The names as parameters of a test: all but some of them are for the long run, being many rather than slow."""
    names = list(names)
    assert set(fast) <= set(names)
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def folder_of(trainer: pl.Trainer, tmp_path: Path) -> Path:
    """A folder for one of the twins alone."""
    folder = tmp_path / ("stock" if type(trainer.strategy).__name__ == "SingleDeviceStrategy" else "ours")
    folder.mkdir(exist_ok=True)
    return folder


def files_in(folder: Path) -> dict[str, Any]:
    """Every checkpoint below a folder by its relative path, loaded as plain tensors and primitives."""
    loaded = {}
    for path in sorted(folder.rglob("*.ckpt")):
        content = torch.load(path, weights_only=True)
        for state in content.get("callbacks", {}).values():  # where files stand differs between the twins
            for key in [key for key, value in state.items() if str(folder.parent) in str(value)]:
                del state[key]
        loaded[str(path.relative_to(folder))] = content
    return loaded


def saved_in_folder(tmp_path: Path, drive: Drive) -> Drive:
    """The drive in a folder of the twin's own; the checkpoints it leaves there are compared."""

    def inside(pl_trainer: pl.Trainer, module: Any) -> Any:
        folder = folder_of(pl_trainer, tmp_path)
        for callback in pl_trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = str(folder)
        result = drive(pl_trainer, module)
        files = files_in(folder)
        assert files, "no checkpoint was written"
        return result, files, _best(pl_trainer, folder)

    return inside


def _best(pl_trainer: pl.Trainer, folder: Path) -> list[Any]:
    found: list[Any] = []
    for callback in pl_trainer.checkpoint_callbacks:
        for name in ("best_model_path", "last_model_path", "best_k_models", "best_model_score", "kth_value"):
            value = getattr(callback, name, None)
            if isinstance(value, dict):
                value = {key.replace(str(folder), ""): score for key, score in value.items()}
            found.append(value.replace(str(folder), "") if isinstance(value, str) else value)
    return found


def fit_four(pl_trainer: pl.Trainer, module: Any) -> None:
    """Four batches, so that a window of accumulation may end in the middle."""
    pl_trainer.fit(module, batches(4), batches())


def fit_twice(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Fit, and fit on for as many epochs again."""
    trainer.fit(module, batches(), batches())
    assert trainer.max_epochs
    trainer.fit_loop.max_epochs = 2 * trainer.max_epochs
    trainer.fit(module, batches(), batches())


def _falling(step: int) -> float:
    return 1 / (1 + step)
