"""Training that goes on from a checkpoint: under either strategy, from either's file, at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.compat.logged import FP32, Logged, folder_of, mostly_slow, per_epoch, scheduled, trainer
from tests.compat.twin import RUN_RTOL, Outcome, assert_same, assert_twins, compare, ours, run
from tests.net import PRECISIONS, adamw, batches, sgd

BATCHES = 4
EPOCHS = 4


class Backbone(Logged):
    """What finetuning callbacks want: a `backbone`."""

    def __init__(self) -> None:
        super().__init__(_trained)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))


def _trained(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Unfreezes(BaseFinetuning):
    """Frees one layer after the other."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            layer = pl_module.backbone[2 * (epoch - 1)]
            self.unfreeze_and_add_param_group(layer, optimizer, lr=0.05)


@dataclass
class Program:
    """What is trained, and at which step the checkpoint is made from which it goes on."""

    make: Callable[[], Any] = Logged
    step: int = 6
    rtol: float = 0.0
    callbacks: Callable[[], list[pl.Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)


def _stops_early() -> list[pl.Callback]:
    return [EarlyStopping("val_loss", patience=1, min_delta=1.0)]


PROGRAMS = {
    "middle of an epoch": Program(),
    "end of an epoch": Program(step=4),
    "schedule of steps": Program(lambda: Logged(scheduled)),
    "schedule of epochs": Program(lambda: Logged(per_epoch), step=4),
    "accumulation": Program(step=3, options={"accumulate_grad_batches": 2}),
    "accumulation with a short last window": Program(step=3, options={"accumulate_grad_batches": 3}),
    "clipping": Program(options={"gradient_clip_val": 0.1}),
    "AdamW": Program(lambda: Logged(adamw), rtol=RUN_RTOL),
    "EMA": Program(callbacks=lambda: [EMAWeightAveraging(decay=0.8)], options={"limit_val_batches": 1.0}),
    "SWA": Program(callbacks=lambda: [StochasticWeightAveraging(0.05, 1)], step=8),
    "SWA in the middle of an epoch": Program(callbacks=lambda: [StochasticWeightAveraging(0.05, 1)], step=10),
    "accumulation by schedule": Program(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], step=5),
    "early stopping": Program(callbacks=_stops_early, step=4, options={"limit_val_batches": 1.0}),
    "backbone, still frozen": Program(Backbone, 4, callbacks=lambda: [BackboneFinetuning(2, verbose=False)]),
    "backbone, unfrozen": Program(Backbone, 10, callbacks=lambda: [BackboneFinetuning(1, verbose=False)]),
    "layer by layer": Program(Backbone, 8, callbacks=lambda: [Unfreezes()]),
    "layer by layer, in an epoch": Program(Backbone, 10, callbacks=lambda: [Unfreezes()]),
}


class SaveAt(pl.Callback):
    """Saves when the step count is reached, at the end of the batch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def four_batches() -> DataLoader:
    """An epoch of the programs."""
    return batches(BATCHES)


def first_run(program: Program, strategy: Any, path: Path, data: Callable[[], DataLoader] = four_batches) -> Outcome:
    """The whole training, which leaves a checkpoint on its way."""
    outcome = run(
        program.make,
        strategy,
        callbacks=lambda: [*program.callbacks(), SaveAt(program.step, path)],
        drive=lambda t, m: t.fit(m, data(), batches()),
        trainer=trainer,
        **{"max_epochs": EPOCHS, **program.options},
    )
    assert path.exists(), "the step was never reached"
    return outcome


def second_run(program: Program, strategy: Any, path: Path, data: Callable[[], DataLoader] = four_batches) -> Outcome:
    """What is left of the training, from the checkpoint."""
    return run(
        program.make,
        strategy,
        callbacks=program.callbacks,
        drive=lambda t, m: t.fit(m, data(), batches(), ckpt_path=path, weights_only=True),
        trainer=trainer,
        **{"max_epochs": EPOCHS, **program.options},
    )


FAST = ["middle of an epoch", "accumulation", "AdamW", "EMA", "SWA in the middle of an epoch", "layer by layer"]


@pytest.mark.parametrize("name", mostly_slow(PROGRAMS, *FAST))
def test_each_resumes_the_others_checkpoints_as_stock_resumes_its_own(tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    first_run(program, "auto", tmp_path / "stock.ckpt")
    first_run(program, ours(), tmp_path / "ours.ckpt")
    expected = second_run(program, "auto", tmp_path / "stock.ckpt")
    assert expected.moved
    for strategy, file in ((ours(), "ours"), (ours(), "stock"), ("auto", "ours")):
        assert_same(expected, second_run(program, strategy, tmp_path / f"{file}.ckpt"), program.rtol, ["before"])


def same_batches() -> DataLoader:
    """Lightning starts the interrupted epoch's data anew; where all batches are the same, that makes no difference."""
    batch = next(iter(batches()))
    return DataLoader([batch] * BATCHES, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["middle of an epoch", "accumulation", "AdamW", "clipping", "schedule of steps"])
@pytest.mark.parametrize("precision", mostly_slow(PRECISIONS, "bf16-mixed"))
def test_what_is_resumed_in_the_middle_of_an_epoch_ends_as_if_never_interrupted(
    tmp_path: Path, precision: str, name: str
) -> None:
    program, path = PROGRAMS[name], tmp_path / "x.ckpt"
    whole = first_run(program, ours(precision), path, same_batches)
    resumed = second_run(program, ours(precision), path, same_batches)
    assert len(resumed.notes) < len(whole.notes)
    compare("losses", resumed.notes, whole.notes[-len(resumed.notes) :])
    assert_same(whole, resumed, ignore=["calls", "notes", "metrics", "checkpoint"])


class TestNamedCheckpoints:
    @pytest.mark.parametrize("name", ["best", "last"])
    @pytest.mark.parametrize("function", mostly_slow(["fit", "validate", "test", "predict"], "fit", "test"))
    def test_are_found_and_loaded(self, tmp_path: Path, name: str, function: str) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            checkpoint = pl_trainer.checkpoint_callback
            assert isinstance(checkpoint, ModelCheckpoint)
            checkpoint.dirpath = str(folder_of(pl_trainer, tmp_path))
            pl_trainer.fit(module, batches(BATCHES), batches())
            pl_trainer.fit_loop.max_epochs = 3
            options = {"verbose": False} if function in ("validate", "test") else {}
            result = getattr(pl_trainer, function)(module, batches(), ckpt_path=name, weights_only=True, **options)
            return result, Path(str(pl_trainer.ckpt_path)).name

        assert_twins(
            Logged,
            drive=drive,
            callbacks=lambda: [ModelCheckpoint(monitor="val_loss", save_last=True, save_on_train_epoch_end=False)],
            ignore=["checkpoint"],
            trainer=trainer,
            max_epochs=2,
            limit_val_batches=1.0,
        )

    def test_requeued_run_finds_its_checkpoint(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            pl_trainer._default_root_dir = str(folder_of(pl_trainer, tmp_path))
            pl_trainer.fit(module, batches(BATCHES))
            pl_trainer.save_checkpoint(pl_trainer._checkpoint_connector.hpc_save_path(pl_trainer.default_root_dir))
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(module, batches(BATCHES), ckpt_path="hpc", weights_only=True)

        assert_twins(Logged, drive=drive)


@pytest.mark.parametrize("kind", [sgd, adamw])
def test_weights_alone_start_a_run_as_in_stock(tmp_path: Path, kind: Any) -> None:
    """`load_from_checkpoint` of a file saved here, then a fit of its own."""
    run(
        lambda: Logged(kind),
        ours("bf16-mixed"),
        drive=lambda t, m: (t.fit(m, batches()), t.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)),
    )

    def make() -> Any:
        module = Logged(kind)
        module.load_state_dict(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"])
        return module

    assert_twins(make, RUN_RTOL if kind is adamw else 0.0)


def test_a_file_of_weights_alone_is_refused_for_fit_as_in_stock(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for strategy in ("auto", ours(FP32)):
        made = trainer(strategy=strategy, max_epochs=1)
        made.fit(Logged(), batches())
        made.save_checkpoint(path, weights_only=True)
        with pytest.raises(KeyError, match="weights_only"):
            trainer(strategy="auto" if strategy == "auto" else ours()).fit(Logged(), batches(), ckpt_path=path)
