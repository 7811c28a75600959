"""Every way in which Lightning writes checkpoints: the same files with the same contents."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor

from tests.compat.logged import Logged, fit_four, folder_of, mostly_slow, per_epoch, saved_in_folder, trainer
from tests.compat.twin import RUN_RTOL, assert_twins, ours
from tests.net import PRECISIONS, adamw, batches

MODEL_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "default": {},
    "best": {"monitor": "val_loss"},
    "three best": {"monitor": "val_loss", "save_top_k": 3, "filename": "{epoch}-{val_loss:.6f}"},
    "largest": {"monitor": "val_loss", "mode": "max"},
    "best of training": {"monitor": "train_loss_epoch", "save_on_train_epoch_end": True},
    "last": {"save_last": True},
    "last, linked": {"save_last": "link", "every_n_train_steps": 2, "save_top_k": -1},
    "all": {"save_top_k": -1},
    "none": {"save_top_k": 0, "save_last": True},
    "every second epoch": {"every_n_epochs": 2, "save_top_k": -1},
    "every third step": {"every_n_train_steps": 3, "save_top_k": -1},
    "weights only": {"save_weights_only": True, "save_top_k": -1},
    "at every interval": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "named by version": {"monitor": "val_loss", "save_top_k": -1, "filename": "same"},
}


class TestModelCheckpoint:
    @pytest.mark.parametrize("name", mostly_slow(MODEL_CHECKPOINTS, "best", "last", "every third step", "weights only"))
    def test_writes_the_files_of_stock(self, tmp_path: Path, name: str) -> None:
        assert_twins(
            Logged,
            callbacks=lambda: [ModelCheckpoint(**MODEL_CHECKPOINTS[name])],
            drive=saved_in_folder(tmp_path, fit_four),
            ignore=["checkpoint"],
            trainer=trainer,
            max_epochs=3,
            limit_val_batches=1.0,
        )

    def test_in_the_middle_of_accumulation(self, tmp_path: Path) -> None:
        assert_twins(
            lambda: Logged(per_epoch),
            callbacks=lambda: [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1), _EveryBatch()],
            drive=saved_in_folder(tmp_path, fit_four),
            ignore=["checkpoint"],
            trainer=trainer,
            accumulate_grad_batches=3,
        )

    def test_with_adamw(self, tmp_path: Path) -> None:
        assert_twins(
            lambda: Logged(adamw),
            RUN_RTOL,
            callbacks=lambda: [ModelCheckpoint(save_top_k=-1, save_last=True)],
            drive=saved_in_folder(tmp_path, fit_four),
            ignore=["checkpoint"],
            trainer=trainer,
            max_epochs=2,
        )

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_form_does_not_depend_on_precision(self, tmp_path: Path, precision: str) -> None:
        """Keys, dtypes and shapes of stock FP32, plain types only, every optimizer with its state."""

        def form(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: form(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [form(item) for item in value]
            return (value.dtype, value.shape, value.device) if isinstance(value, Tensor) else type(value)

        files = []
        for strategy in ("auto", ours(precision)):
            made = trainer(strategy=strategy, callbacks=[ModelCheckpoint(save_last=True)], max_epochs=1)
            run_in = saved_in_folder(tmp_path, fit_four)
            files.append(run_in(made, Logged(adamw))[1])
        assert form(files[1]) == form(files[0])
        (state,) = files[1]["last.ckpt"]["optimizer_states"]
        assert len(state["state"]) == 6, "weight and bias of the three layers that are trained"


class _EveryBatch(pl.Callback):
    """Saves after each batch, whether or not it ends a window."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.checkpoint_callback is not None
        path = Path(str(getattr(trainer.checkpoint_callback, "dirpath", None))) / f"batch {batch_idx}.ckpt"
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path.with_name(f"weights {batch_idx}.ckpt"), weights_only=True)


MOMENTS = [
    "on_fit_start",
    "on_train_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize(
    "moment", mostly_slow(MOMENTS, "on_before_optimizer_step", "on_after_backward", "on_train_end")
)
def test_a_checkpoint_saved_in_a_hook_is_that_of_stock(tmp_path: Path, moment: str) -> None:
    def save(pl_trainer: pl.Trainer, *_: Any) -> None:
        folder = folder_of(pl_trainer, tmp_path)
        pl_trainer.save_checkpoint(folder / f"{len(list(folder.iterdir()))}.ckpt")

    assert_twins(
        Logged,
        callbacks=lambda: [LambdaCallback(**{moment: save})],
        drive=saved_in_folder(tmp_path, fit_four),
        accumulate_grad_batches=2,
        limit_val_batches=1.0,
    )


def test_a_checkpoint_saved_after_fit_and_test_is_that_of_stock(tmp_path: Path) -> None:
    def drive(pl_trainer: pl.Trainer, module: Any) -> None:
        folder = folder_of(pl_trainer, tmp_path)
        pl_trainer.fit(module, batches())
        pl_trainer.save_checkpoint(folder / "fitted.ckpt")
        pl_trainer.test(module, batches(), verbose=False)
        pl_trainer.save_checkpoint(folder / "tested.ckpt")

    assert_twins(Logged, drive=saved_in_folder(tmp_path, drive))


class TestAverages:
    @pytest.mark.parametrize("make", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.05, 1)])
    def test_are_saved_as_in_stock(self, tmp_path: Path, make: Callable[[], pl.Callback]) -> None:
        own = assert_twins(
            Logged,
            callbacks=lambda: [make(), ModelCheckpoint(save_top_k=-1, save_last=True)],
            drive=saved_in_folder(tmp_path, fit_four),
            ignore=["checkpoint"],
            trainer=trainer,
            max_epochs=3,
            limit_val_batches=1.0,
        )
        last = own.notes[-1][1]["last.ckpt"]
        assert "current_model_state" in last or "average_model_state" in str(last["callbacks"])
