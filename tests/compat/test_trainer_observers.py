"""Profilers, summaries, bars and hooks see what they see under stock Lightning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from tests.compat.logged import Logged, Shaped, scheduled, trainer
from tests.compat.twin import assert_twins, compare, fit, ours
from tests.models import quiet_trainer
from tests.net import PRECISIONS, batches


class Labelled(Logged):
    """Profiles a part of its step itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        with self.trainer.profiler.profile("mine"):
            return super().training_step(batch, batch_idx)


class TestProfilers:
    @pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
    def test_record_the_actions_of_stock(self, tmp_path: Path, kind: Any) -> None:
        def profiled(**options: Any) -> pl.Trainer:
            return trainer(**{**options, "profiler": kind(tmp_path, "profile")})

        def drive(pl_trainer: pl.Trainer, module: Any) -> dict[str, int]:
            fit(pl_trainer, module)
            (report,) = tmp_path.glob("fit*.txt")
            actions = re.findall(r"Profile stats for: (.*?) *(?:rank: 0)?\n", report.read_text())
            report.unlink()
            counts = dict.fromkeys(actions, 1)
            if isinstance(pl_trainer.profiler, SimpleProfiler):
                counts = {name: len(times) for name, times in pl_trainer.profiler.recorded_durations.items()}
            return {re.sub(r"^\[Strategy\]\w+", "[Strategy]", name): count for name, count in counts.items()}

        own = assert_twins(Labelled, drive=drive, trainer=profiled, limit_val_batches=1.0)
        assert own.notes[-1]["mine"] >= 1

    def test_of_torch_runs_and_sees_the_host_step(self, tmp_path: Path) -> None:
        def profiled(**options: Any) -> pl.Trainer:
            return trainer(**{**options, "profiler": PyTorchProfiler(tmp_path, "profile", export_to_chrome=False)})

        def drive(pl_trainer: pl.Trainer, module: Any) -> bool:
            fit(pl_trainer, module)
            pl_trainer.profiler = PassThroughProfiler()  # or it starts again when the outcome is looked at
            (path,) = tmp_path.glob("fit*.txt")
            text = path.read_text()
            path.unlink()
            return "Optimizer.step#SGD.step" in text

        own = assert_twins(Labelled, drive=drive, trainer=profiled, max_epochs=2)
        assert own.notes[-1]

    def test_by_name(self, tmp_path: Path) -> None:
        for name in ("simple", "advanced"):
            made = trainer(strategy=ours(), profiler=name, max_epochs=1, default_root_dir=tmp_path)
            made.fit(Logged(), batches())
            assert made.state.finished


class TestSummaries:
    @pytest.mark.parametrize("depth", [1, -1])
    def test_are_those_of_stock(self, depth: int) -> None:
        """Taken in the middle of a run, with sizes of inputs and outputs."""

        class Sums(Shaped):
            def on_train_start(self) -> None:
                self.notes.append(str(summarize(self, max_depth=depth)))

        own = assert_twins(Sums)
        assert "244" in own.notes[3]

    @pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
    def test_callbacks_print_what_stock_prints(self, kind: Any, capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
        shown = []
        with caplog.at_level("INFO"):
            for strategy in ("auto", ours()):
                caplog.clear()
                made = trainer(strategy=strategy, callbacks=[kind()], enable_model_summary=True, max_epochs=1)
                made.fit(Shaped(), batches())
                lines = [record.message for record in caplog.records if "Trainable params" in record.message]
                shown.append((capsys.readouterr().out, lines))
        assert shown[0] == shown[1]
        assert "Trainable params" in shown[0][0] + "".join(shown[0][1])

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_count_the_parameters_in_any_precision(self, precision: str) -> None:
        counts = []

        class Sums(Shaped):
            def on_train_start(self) -> None:
                summary = summarize(self)
                counts.append((summary.total_parameters, summary.trainable_parameters, summary.layer_names))

        for strategy in ("auto", ours(precision)):
            trainer(strategy=strategy, max_epochs=1).fit(Sums(), batches())
        assert counts[0] == counts[1]


class KeepsMetrics(TQDMProgressBar):
    """Remembers what the bar shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def get_metrics(self, *args: Any) -> Any:
        metrics = super().get_metrics(*args)
        self.shown.append(dict(metrics))
        return metrics


class InTheBar(Logged):
    """Shows its loss in the bar."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("shown", self.losses[-1], prog_bar=True)


class TestBars:
    def test_show_the_metrics_of_stock(self) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            fit(pl_trainer, module)
            assert isinstance(pl_trainer.progress_bar_callback, KeepsMetrics)
            return pl_trainer.progress_bar_callback.shown

        own = assert_twins(
            InTheBar,
            callbacks=lambda: [KeepsMetrics()],
            drive=drive,
            trainer=trainer,
            enable_progress_bar=True,
            limit_val_batches=1.0,
        )
        assert any("shown" in metrics for metrics in own.notes[-1])

    @pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
    def test_run_to_the_end(self, kind: Any) -> None:
        assert_twins(
            InTheBar,
            callbacks=lambda: [kind()],
            trainer=trainer,
            enable_progress_bar=True,
            max_epochs=2,
            limit_val_batches=1.0,
        )


HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
]


class Looks(Logged):
    """Notes in every hook what `self.trainer` and its optimizers, strategy and loops show."""

    def look(self, hook: str) -> None:
        optimizers = self.trainer.optimizers
        names = {parameter: name for name, parameter in self.named_parameters()}
        held = [[names[p] for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
        wrapped = self.optimizers()
        assert not isinstance(wrapped, list)
        strategy = self.trainer.strategy
        self.notes.append(
            [
                hook,
                held,
                [type(optimizer).__qualname__ for optimizer in optimizers],
                isinstance(wrapped, torch.optim.SGD),
                [group["lr"] for group in wrapped.param_groups],
                sorted(len(state) for state in optimizers[0].state.values()),
                self.global_step,
                self.trainer.is_last_batch,
                (str(self.device), str(self.dtype), str(strategy.root_device), self.trainer.world_size),
                (strategy.is_global_zero, self.trainer.global_rank, self.trainer.num_devices),
                (strategy.lightning_module is self, strategy.model is self, strategy.handles_gradient_accumulation),
                (strategy.broadcast(3), strategy.reduce(torch.ones(2)), strategy.barrier()),
                strategy.batch_to_device({"x": torch.ones(1)}),
                {name: parameter.grad is not None for name, parameter in self.named_parameters()},
            ]
        )


for _name in HOOKS:

    def _hook(self: Looks, *_: Any, name: str = _name) -> None:
        self.look(name)

    setattr(Looks, _name, _hook)


def test_every_hook_sees_the_optimizers_and_the_strategy_as_in_stock() -> None:
    own = assert_twins(lambda: Looks(scheduled), max_epochs=2, limit_val_batches=1.0, accumulate_grad_batches=2)
    seen = {note[0] for note in own.notes if isinstance(note, list)}
    assert seen == set(HOOKS)


def test_learning_rate_changed_by_hand_in_a_hook() -> None:
    class Warms(Logged):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.01 * (1 + self.global_step)
                group["momentum"] = 0.5

    assert_twins(Warms, max_epochs=2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logged_weights_are_computed_with_or_masters_as_asked(precision: str) -> None:
    """Histograms of `state_dict()` show masters, those of parameters what the module computes with."""
    module, seen = Logged(), []

    def look(pl_trainer: pl.Trainer, own: Any) -> None:
        seen.append((own.state_dict()["inner.weight"].clone(), own.inner.weight.detach().clone()))

    made = quiet_trainer(strategy=ours(precision), max_epochs=1, callbacks=[])
    made.callbacks.append(pl.callbacks.LambdaCallback(on_train_epoch_end=look))
    made.fit(module, batches())
    ((master, copy_of_it),) = seen
    compare("master", master, module.state_dict()["inner.weight"])
    assert torch.equal(master.to(copy_of_it.dtype), copy_of_it)
