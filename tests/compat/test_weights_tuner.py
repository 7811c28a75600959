"""Searches that train and then put everything back: learning rate and batch size."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from tests.compat.logged import Logged, folder_of, scheduled, trainer
from tests.compat.twin import RUN_RTOL, assert_same, assert_twins, ours, run
from tests.net import PRECISIONS, adamw, sgd


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """Batch-size search collects garbage at each trial: half a second with all that is imported by now."""
    gc.freeze()
    yield
    gc.unfreeze()


class Sized(Logged):
    """Has what searches want: a learning rate, a batch size, and a loader made with it.

    Attributes:
        too_large: Batches from this size on do not fit, which shows in the middle of backward.
    """

    too_large = 1000

    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.batch_size = 8  # of 2 samples batch norm makes plus and minus one, and Adam steps of rounding errors
        self.lr = 0.02
        self.inner.weight.register_hook(self._maybe_fail)

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        optimizer = made["optimizer"] if isinstance(made, dict) else made
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return made

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(64, 8, generator=generator), batch_size=self.batch_size, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def _maybe_fail(self, gradient: Tensor) -> None:
        if self.batch_size >= self.too_large:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Small(Sized):
    too_large = 16


def search_rate(pl_trainer: pl.Trainer, module: Any) -> Any:
    """Search, then train; what was found and what was put back are compared too."""
    before = dict(module.state_dict())
    found = Tuner(pl_trainer).lr_find(module, num_training=20)
    assert found is not None
    _assert_untouched(module, before)
    pl_trainer.fit(module)
    assert module.lr == found.suggestion() != 0.02
    return found.results, module.lr


def search_size(pl_trainer: pl.Trainer, module: Any, mode: str = "power") -> Any:
    before = dict(module.state_dict())
    size = Tuner(pl_trainer).scale_batch_size(module, mode=mode, steps_per_trial=2, init_val=2, max_trials=3)
    _assert_untouched(module, before)
    pl_trainer.fit(module)
    return size


def _assert_untouched(module: Any, before: dict[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def in_folder(tmp_path: Path, drive: Any) -> Any:
    """The drive, with search checkpoints written to a folder of the twin's own."""

    def inside(pl_trainer: pl.Trainer, module: Any) -> Any:
        pl_trainer._default_root_dir = str(folder_of(pl_trainer, tmp_path))
        result = drive(pl_trainer, module)
        assert not list(tmp_path.rglob("*.ckpt")), "the search leaves its checkpoint behind"
        return result

    return inside


OPTIMIZERS = {"sgd": (sgd, 0.0), "scheduled": (scheduled, 0.0), "adamw": (adamw, RUN_RTOL)}


class TestLearningRate:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_search_finds_and_restores_what_stock_does(self, tmp_path: Path, name: str) -> None:
        optimizer, rtol = OPTIMIZERS[name]
        assert_twins(lambda: Sized(optimizer), rtol, drive=in_folder(tmp_path, search_rate), max_epochs=3)

    def test_finder_callback_restores_before_training(self, tmp_path: Path) -> None:
        assert_twins(
            Sized,
            callbacks=lambda: [LearningRateFinder(num_training_steps=10)],
            drive=in_folder(tmp_path, lambda pl_trainer, module: pl_trainer.fit(module)),
        )

    def test_finder_in_later_epochs_restores_the_middle_of_training(self, tmp_path: Path) -> None:
        assert_twins(Sized, callbacks=lambda: [Again()], drive=in_folder(tmp_path, lambda t, m: t.fit(m)), max_epochs=3)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_search_restores_masters_exactly(self, tmp_path: Path, precision: str) -> None:
        """A search that trained with another rate has not happened."""
        drive = in_folder(tmp_path, _search_and_fit)
        searched = run(Sized, ours(precision), drive=drive)
        straight = run(Sized, ours(precision), drive=lambda pl_trainer, module: pl_trainer.fit(module))
        assert_same(straight, searched, ignore=["calls", "notes"])


class Again(LearningRateFinder):
    """Searches again before the second epoch."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=5, update_attr=False)

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def _search_and_fit(pl_trainer: pl.Trainer, module: Any) -> None:
    Tuner(pl_trainer).lr_find(module, num_training=20, update_attr=False)
    pl_trainer.fit(module)


class TestBatchSize:
    @pytest.mark.parametrize("mode", ["power", "binsearch"])
    @pytest.mark.parametrize("make", [Sized, Small])
    def test_search_finds_and_restores_what_stock_does(self, tmp_path: Path, mode: str, make: Any) -> None:
        """`Small` runs out of memory in the middle of a backward pass, when half of the gradients are there."""
        own = assert_twins(make, drive=in_folder(tmp_path, lambda t, m: search_size(t, m, mode)))
        assert own.notes[-1] > 2

    def test_finder_callback(self, tmp_path: Path) -> None:
        assert_twins(
            Small,
            callbacks=lambda: [BatchSizeFinder(steps_per_trial=1, max_trials=3)],
            drive=in_folder(tmp_path, lambda pl_trainer, module: pl_trainer.fit(module)),
        )

    @pytest.mark.parametrize("method", ["validate", "test"])
    def test_search_for_evaluation(self, tmp_path: Path, method: str) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            loader = {"dataloaders": None} if method == "validate" else {}
            module.test_dataloader = module.val_dataloader
            return Tuner(pl_trainer).scale_batch_size(module, method=method, max_trials=2, **loader)

        assert_twins(Sized, drive=in_folder(tmp_path, drive), trains=False, limit_val_batches=1.0)


def test_search_restores_the_users_optimizers(tmp_path: Path) -> None:
    """The finder puts other optimizers into the strategy for its run."""
    kept: list[Any] = []

    def drive(pl_trainer: pl.Trainer, module: Any) -> list[str]:
        pl_trainer.fit(module)
        kept.append(pl_trainer.optimizers)
        Tuner(pl_trainer).lr_find(module, num_training=5)
        return [type(optimizer).__name__ for optimizer in pl_trainer.optimizers]

    assert_twins(Sized, drive=in_folder(tmp_path, drive), trainer=trainer, max_epochs=2)
