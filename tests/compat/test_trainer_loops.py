"""How long the Trainer trains, on what, and when it steps and validates: every option as under stock Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback, Timer
from torch import Tensor

from tests.compat.logged import Logged, fit_twice, mostly_slow, per_epoch, scheduled, trainer
from tests.compat.twin import RUN_RTOL, assert_twins
from tests.net import adamw, batches

BATCHES = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation with a short last window": {"accumulate_grad_batches": 3},
    "accumulation over the whole epoch": {"accumulate_grad_batches": 7},
    "accumulation over more than the epoch": {"accumulate_grad_batches": 16},
    "accumulation with clipping by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "no batch at all": {"limit_train_batches": 0},
    "limited to a number": {"limit_train_batches": 4, "limit_val_batches": 1},
    "limited to a part": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "short window of a limited epoch": {"limit_train_batches": 5, "accumulate_grad_batches": 2},
    "overfit a number": {"overfit_batches": 2},
    "overfit a part": {"overfit_batches": 0.4},
    "max_steps": {"max_steps": 5, "max_epochs": -1},
    "max_steps in the middle of a window": {"max_steps": 4, "accumulate_grad_batches": 3},
    "max_steps beyond max_epochs": {"max_steps": 100},
    "min_steps": {"min_steps": 20, "max_epochs": 3},
    "max_epochs=0": {"max_epochs": 0},
    "validation in the middle of the epoch": {"val_check_interval": 2},
    "validation in the middle of a window": {"val_check_interval": 1, "accumulate_grad_batches": 3},
    "validation at a part of the epoch": {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
    "validation across epochs": {"val_check_interval": 9, "check_val_every_n_epoch": None},
    "validation every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "no validation": {"limit_val_batches": 0},
    "sanity check of everything": {"num_sanity_val_steps": -1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of three": {"fast_dev_run": 3, "accumulate_grad_batches": 2},
    "loaders made anew": {"reload_dataloaders_every_n_epochs": 1},
    "deterministic": {"deterministic": True},
    "deterministic, with warnings": {"deterministic": "warn"},
    "anomaly detection": {"detect_anomaly": True},
    "benchmark": {"benchmark": True},
    "without inference mode": {"inference_mode": False},
    "max_time": {"max_time": {"hours": 1}},
    "no time at all": {"max_time": "00:00:00:00"},
    "synchronised batch norm": {"sync_batchnorm": True},
    "no sampler": {"use_distributed_sampler": False},
}

UNTRAINED = {"no batch at all", "max_epochs=0", "no time at all"}
TIMED = {"max_time", "no time at all"}
"""Their checkpoints hold how long it took."""


def fit(pl_trainer: pl.Trainer, module: Any) -> Any:
    """Seven batches to train and three to validate."""
    pl_trainer.fit(module, batches(BATCHES), batches())
    return pl_trainer.num_training_batches, pl_trainer.estimated_stepping_batches, pl_trainer.should_stop


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """What Trainers set for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


FAST = [
    "accumulation with a short last window",
    "accumulation over more than the epoch",
    "no batch at all",
    "limited to a number",
    "overfit a number",
    "max_steps in the middle of a window",
    "validation in the middle of a window",
    "validation across epochs",
    "sanity check of everything",
    "fast_dev_run of three",
    "deterministic",
    "anomaly detection",
    "without inference mode",
]


@pytest.mark.parametrize("name", mostly_slow(OPTIONS, *FAST))
def test_each_option_trains_as_in_stock(name: str) -> None:
    assert_twins(
        lambda: Logged(scheduled),
        drive=fit,
        trainer=trainer,
        trains=name not in UNTRAINED,
        ignore=["checkpoint"] if name in TIMED else [],
        **{"max_epochs": 2, "limit_val_batches": 1.0, **OPTIONS[name]},
    )


@pytest.mark.parametrize("name", ["max_steps in the middle of a window", "validation in the middle of a window"])
def test_with_adamw(name: str) -> None:
    options = {"max_epochs": 2, "limit_val_batches": 1.0, **OPTIONS[name]}
    assert_twins(lambda: Logged(adamw), RUN_RTOL, drive=fit, trainer=trainer, **options)


def test_barebones() -> None:
    """It takes no profiler, so calls are not compared; it logs nothing."""

    def bare(**options: Any) -> pl.Trainer:
        allowed = {key: options[key] for key in ("strategy", "max_epochs", "callbacks")}
        return pl.Trainer(accelerator="cpu", barebones=True, **allowed)

    own = assert_twins(Logged, drive=fit, trainer=bare)
    assert not own.calls


class TestAccumulation:
    @pytest.mark.parametrize("schedule", [{0: 2, 1: 3}, {1: 4}, {0: 7, 2: 1}])
    def test_by_schedule(self, schedule: dict[int, int]) -> None:
        assert_twins(
            Logged,
            callbacks=lambda: [GradientAccumulationScheduler(schedule)],
            drive=fit,
            trainer=trainer,
            max_epochs=3,
        )

    def test_changed_in_a_hook(self) -> None:
        def change(pl_trainer: pl.Trainer, *_: Any) -> None:
            pl_trainer.accumulate_grad_batches += 1

        assert_twins(Logged, callbacks=lambda: [LambdaCallback(on_train_epoch_start=change)], drive=fit, max_epochs=3)


class Ticks(Timer):
    """Its clock advances by a second with every batch, and it gives training five."""

    def __init__(self, interval: str) -> None:
        super().__init__(duration=timedelta(seconds=5), interval=interval, verbose=False)
        self.ticks = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ticks += 1
        super().on_train_batch_end(*args, **kwargs)

    def time_elapsed(self, stage: Any = "train") -> float:
        return float(self.ticks)


class TestStopping:
    @pytest.mark.parametrize(
        "options",
        [
            {"monitor": "val_loss", "patience": 1, "min_delta": 1.0},
            {"monitor": "train_loss_epoch", "patience": 1, "mode": "max", "check_on_train_epoch_end": True},
            {"monitor": "val_loss", "stopping_threshold": 100.0},
            {"monitor": "val_loss", "divergence_threshold": -1.0},
        ],
    )
    def test_early(self, options: dict[str, Any]) -> None:
        own = assert_twins(
            Logged, callbacks=lambda: [EarlyStopping(**options)], drive=fit, max_epochs=6, limit_val_batches=1.0
        )
        assert own.progress["epoch"] < 6

    def test_early_on_a_loss_that_is_not_finite(self) -> None:
        class Diverges(Logged):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("val_loss", self.loss(batch) / (0.0 if self.current_epoch == 1 else 1.0))

        own = assert_twins(
            Diverges, callbacks=lambda: [EarlyStopping("val_loss")], drive=fit, max_epochs=6, limit_val_batches=1.0
        )
        assert own.progress["epoch"] == 2

    @pytest.mark.parametrize("interval", ["step", "epoch"])
    def test_by_timer(self, interval: str) -> None:
        own = assert_twins(Logged, callbacks=lambda: [Ticks(interval=interval)], drive=fit, max_epochs=3)
        assert own.progress["step"] == {"step": 5, "epoch": 7}[interval]

    @pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_end"])
    def test_by_the_user(self, hook: str) -> None:
        def stop(pl_trainer: pl.Trainer, *_: Any) -> None:
            pl_trainer.should_stop = pl_trainer.global_step >= 3

        options = {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}
        assert_twins(Logged, callbacks=lambda: [LambdaCallback(**{hook: stop})], drive=fit, **options)

    def test_by_a_hook_that_skips_the_epoch(self) -> None:
        class Skips(Logged):
            def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
                return -1 if batch_idx == 3 else None

        assert_twins(Skips, drive=fit, max_epochs=2, accumulate_grad_batches=2)

    def test_fitting_on(self) -> None:
        assert_twins(lambda: Logged(per_epoch), drive=fit_twice, max_epochs=2)
