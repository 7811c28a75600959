"""Monitors and loggers write what they write under stock Lightning."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ThroughputMonitor,
)
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.compat.logged import Logged, Shaped, folder_of, mostly_slow, per_epoch, scheduled, trainer
from tests.compat.twin import RUN_RTOL, assert_twins, fit, ours
from tests.models import quiet_trainer
from tests.net import Net, Rows, adamw, batches, sgd


def grouped(module: Any) -> torch.optim.Optimizer:
    """Two groups with names, settings and momenta of their own."""
    return torch.optim.SGD(
        [
            {"params": module.inner.parameters(), "name": "inner", "momentum": 0.5},
            {"params": module.outer.parameters(), "name": "outer", "weight_decay": 0.1},
        ],
        lr=0.1,
    )


def betas(module: Any) -> Any:
    """An optimizer whose momentum is one of its betas, with a schedule."""
    optimizer = adamw(module)
    return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)]


def named(module: Any) -> Any:
    """A schedule that logs under a name of the user's."""
    made = scheduled(module)
    made["lr_scheduler"]["name"] = "rate"
    return made


OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "one": (sgd, 0.0),
    "scheduled": (scheduled, 0.0),
    "named schedule": (named, 0.0),
    "named groups": (grouped, 0.0),
    "schedule per epoch": (per_epoch, 0.0),
    "betas": (betas, RUN_RTOL),
}


class TestMonitors:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("interval", mostly_slow([None, "epoch"], None))
    def test_learning_rates_are_logged_under_the_tags_of_stock(self, name: str, interval: Any) -> None:
        optimizer, rtol = OPTIMIZERS[name]
        monitor = {"logging_interval": interval, "log_momentum": True, "log_weight_decay": True}
        own = assert_twins(
            lambda: Logged(optimizer),
            rtol,
            callbacks=lambda: [LearningRateMonitor(**monitor)],
            drive=_logged,
            trainer=_with_rows,
            max_epochs=2,
            log_every_n_steps=2,
        )
        tags = {tag for _, row in own.notes[-1] for tag in row}
        assert any(tag.startswith(("lr-", "rate")) for tag in tags), tags

    def test_learning_rates_of_two_optimizers(self) -> None:
        class Two(Logged):
            def __init__(self) -> None:
                super().__init__(lambda m: [sgd(m.inner), sgd(m.outer)], manual=True)

            def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
                loss = self.loss(batch)
                for optimizer in self.optimizers():  # type: ignore[union-attr]
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():  # type: ignore[union-attr]
                    optimizer.step()

        own = assert_twins(
            Two, callbacks=lambda: [LearningRateMonitor()], drive=_logged, trainer=_with_rows, log_every_n_steps=1
        )
        tags = {tag for _, row in own.notes[-1] for tag in row}
        assert {"lr-SGD", "lr-SGD-1"} <= tags

    def test_throughput_under_the_tags_of_stock(self) -> None:
        def rows(pl_trainer: pl.Trainer, module: Any) -> list[Any]:
            module.flops_per_batch = 100
            return [(step, sorted(row)) for step, row in _logged(pl_trainer, module)]

        assert_twins(
            Net,
            callbacks=lambda: [ThroughputMonitor(batch_size_fn=len, length_fn=len, window_size=2)],
            drive=rows,
            trainer=_with_rows,
            max_epochs=2,
            log_every_n_steps=1,
            limit_val_batches=1.0,
        )

    @pytest.mark.parametrize(
        ("precision", "dtype"),
        [("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("32-true", torch.float32)],
    )
    def test_throughput_is_measured_against_the_peak_of_the_compute_dtype(self, precision: str, dtype: Any) -> None:
        plugin = quiet_trainer(strategy=ours(precision)).precision_plugin
        assert _plugin_to_compute_dtype(plugin) == dtype

    def test_device_statistics_under_the_tags_of_stock(self) -> None:
        def rows(pl_trainer: pl.Trainer, module: Any) -> list[Any]:
            return [(step, sorted(row)) for step, row in _logged(pl_trainer, module)]

        own = assert_twins(
            Net,
            callbacks=lambda: [DeviceStatsMonitor(cpu_stats=True)],
            drive=rows,
            trainer=_with_rows,
            log_every_n_steps=1,
        )
        assert any("cpu_percent" in tag for _, row in own.notes[-1] for tag in row)


def _with_rows(**options: Any) -> pl.Trainer:
    return trainer(**{**options, "logger": Rows()})


def _logged(pl_trainer: pl.Trainer, module: Any) -> list[Any]:
    fit(pl_trainer, module)
    assert isinstance(pl_trainer.logger, Rows)
    return pl_trainer.logger.rows


class TestLoggers:
    def test_csv_files_are_those_of_stock(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            logger = CSVLogger(folder_of(pl_trainer, tmp_path), name="", version="", flush_logs_every_n_steps=1)
            pl_trainer.loggers = [logger]
            pl_trainer.fit(module, batches(), batches())
            pl_trainer.test(module, batches(), verbose=False)
            folder = folder_of(pl_trainer, tmp_path)
            with (folder / "metrics.csv").open() as file:
                return list(csv.DictReader(file)), (folder / "hparams.yaml").read_text()

        own = assert_twins(
            Shaped,
            drive=drive,
            trainer=trainer,
            log_every_n_steps=1,
            max_epochs=2,
            limit_val_batches=1.0,
            callbacks=lambda: [LearningRateMonitor()],
            logger=True,
        )
        rows, hyperparameters = own.notes[-1]
        assert len(rows) > 6
        assert "width: 8" in hyperparameters

    def test_tensorboard_files_are_those_of_stock(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            folder = folder_of(pl_trainer, tmp_path)
            pl_trainer.loggers = [TensorBoardLogger(folder, name="", version="", log_graph=True)]
            pl_trainer.fit(module, batches(), batches())
            events = EventAccumulator(str(folder))
            events.Reload()
            tags = events.Tags()
            scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
            histograms = {
                tag: [(e.step, list(e.histogram_value.bucket)) for e in events.Histograms(tag)]
                for tag in tags["histograms"]
            }
            return scalars, histograms, _operations(events)

        own = assert_twins(
            Shaped, drive=drive, trainer=trainer, log_every_n_steps=1, max_epochs=2, limit_val_batches=1.0, logger=True
        )
        scalars, histograms, operations = own.notes[-1]
        assert "val_loss" in scalars
        assert histograms
        assert any("linear" in operation for operation in operations)

    def test_several_loggers(self, tmp_path: Path) -> None:
        def several(**options: Any) -> pl.Trainer:
            return trainer(**{**options, "logger": [Rows(), CSVLogger(tmp_path), Rows()]})

        def drive(pl_trainer: pl.Trainer, module: Any) -> list[Any]:
            fit(pl_trainer, module)
            return [logger.rows for logger in pl_trainer.loggers if isinstance(logger, Rows)]

        assert_twins(Logged, drive=drive, trainer=several, log_every_n_steps=1)


def _operations(events: Any) -> list[str]:
    return sorted(node.op for node in events.Graph().node)
