"""Checkpoints written in trouble, in formats of the user's, and through other writers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor

from lightning_cpu_offload import CPUOffloadStrategy
from tests.compat.logged import Logged, fit_four, folder_of, saved_in_folder, trainer
from tests.compat.twin import assert_twins, compare, ours, run
from tests.net import batches, sgd


class Failing(Logged):
    """Raises in the third batch, in the middle of a window."""

    error: BaseException = RuntimeError("mine")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


class Interrupted(Failing):
    error = KeyboardInterrupt()


class TestOnException:
    @pytest.mark.parametrize("make", [Failing, Interrupted])
    @pytest.mark.parametrize("callback", [OnExceptionCheckpoint, ModelCheckpoint])
    def test_writes_the_file_of_stock(self, tmp_path: Path, make: Any, callback: Any) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            for made in pl_trainer.callbacks:
                if isinstance(made, OnExceptionCheckpoint):
                    made.dirpath = str(folder_of(pl_trainer, tmp_path))
            with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
                fit_four(pl_trainer, module)

        options = {"save_on_exception": True} if callback is ModelCheckpoint else {"dirpath": tmp_path}
        assert_twins(
            make,
            callbacks=lambda: [callback(**options)],
            drive=saved_in_folder(tmp_path, drive),
            ignore=["checkpoint"],
            trainer=trainer,
        )


class Signalled(Logged):
    """Gets a signal from outside before its second batch."""

    number = signal.SIGTERM

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            os.kill(os.getpid(), self.number)


class Requeued(Signalled):
    number = signal.SIGUSR1


class TestSignals:
    def test_termination_ends_as_in_stock(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            with pytest.raises((SystemExit, pl.utilities.exceptions.SIGTERMException)):
                fit_four(pl_trainer, module)

        assert_twins(
            Signalled,
            callbacks=lambda: [ModelCheckpoint(save_on_exception=True)],
            drive=saved_in_folder(tmp_path, drive),
            ignore=["checkpoint"],
            trainer=trainer,
        )

    def test_slurm_requeue_writes_the_file_of_stock_and_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", lambda *_, **__: 0)

        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            pl_trainer._default_root_dir = str(folder_of(pl_trainer, tmp_path))
            pl_trainer._accelerator_connector.cluster_environment = SLURMEnvironment()
            fit_four(pl_trainer, module)

        own = assert_twins(Requeued, drive=saved_in_folder(tmp_path, drive))
        assert list(own.notes[-1][1]) == ["hpc_ckpt_1.ckpt"]


class InTheBody(torch.optim.SGD):
    """Gets the signal while it steps, with all but its last parameter done."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            *parameters, last = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.1)
            if parameters:  # none in the trial step before training
                os.kill(os.getpid(), signal.SIGUSR1)
            last.sub_(last.grad, alpha=0.1)
        return loss


def signals_in_the_body(module: Any) -> Any:
    return InTheBody(module.parameters(), lr=0.1)


def signals_before_the_step(module: Any) -> Any:
    optimizer = sgd(module)
    optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    return optimizer


def signals_after_the_step(module: Any) -> Any:
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    return optimizer


@pytest.mark.parametrize("make", [signals_before_the_step, signals_in_the_body, signals_after_the_step])
def test_a_signal_during_the_step_saves_what_stock_saves(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """A handler that saves, as the one for SLURM's requeue does, called between any two lines of Python."""

    def drive(pl_trainer: pl.Trainer, module: Any) -> None:
        folder = folder_of(pl_trainer, tmp_path)
        names = (f"{number}.ckpt" for number in range(9))
        before = signal.signal(signal.SIGUSR1, lambda *_: pl_trainer.save_checkpoint(folder / next(names)))
        try:
            fit_four(pl_trainer, module)
        finally:
            signal.signal(signal.SIGUSR1, before)

    own = assert_twins(lambda: Logged(make), drive=saved_in_folder(tmp_path, drive))
    assert len(own.notes[-1][1]) == 4


class Custom(Logged):
    """Has its own `state_dict`, extra state, hyperparameters, and hooks that change what is saved and loaded."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner.register_state_dict_post_hook(lambda *_: None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"own.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k.removeprefix("own."): v for k, v in state_dict.items()}, *args, **kwargs)

    def get_extra_state(self) -> Any:
        return torch.tensor(len(self.losses))

    def set_extra_state(self, state: Any) -> None:
        self.notes.append(state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("own.frozen.bias")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["own.frozen.bias"] = torch.full((16,), 0.25)


class TestOwnFormats:
    def test_are_saved_and_loaded_as_in_stock(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            path = folder_of(pl_trainer, tmp_path) / "x.ckpt"
            fit_four(pl_trainer, module)
            pl_trainer.save_checkpoint(path)
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(module, batches(4), ckpt_path=path, weights_only=True)
            loaded = type(module).load_from_checkpoint(path, weights_only=True)
            return loaded.state_dict(), dict(loaded.hparams)

        assert_twins(Custom, drive=saved_in_folder(tmp_path, drive))

    def test_strict_loading_may_be_off(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            path = folder_of(pl_trainer, tmp_path) / "x.ckpt"
            fit_four(pl_trainer, module)
            checkpoint = pl_trainer._checkpoint_connector.dump_checkpoint()
            del checkpoint["state_dict"]["outer.weight"]
            torch.save(checkpoint, path)
            module.strict_loading = False
            pl_trainer.test(module, batches(), ckpt_path=path, weights_only=True, verbose=False)

        assert_twins(Logged, drive=saved_in_folder(tmp_path, drive))


IOS: dict[str, Callable[[], Any]] = {
    "torch": TorchCheckpointIO,
    "asynchronous": AsyncCheckpointIO,
    "asynchronous around torch": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
}


@pytest.mark.parametrize("name", IOS)
def test_each_checkpoint_io_writes_the_files_of_stock(tmp_path: Path, name: str) -> None:
    """An asynchronous one gets values that later steps do not move."""
    files = []
    for strategy in ("auto", ours()):
        own = run(
            Logged,
            strategy,
            callbacks=lambda: [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
            drive=saved_in_folder(tmp_path, fit_four),
            trainer=trainer,
            plugins=[IOS[name]()],
        )
        files.append(own.notes[-1])
    assert len(files[1][1]) == 4
    compare("files", files[1], files[0])


def test_plugins_of_the_strategy_count(tmp_path: Path) -> None:
    class Counts(TorchCheckpointIO):
        saved: list[str] = []  # noqa: RUF012

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.saved.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    made = trainer(strategy=CPUOffloadStrategy(checkpoint_io=Counts()), max_epochs=1)
    fit_four(made, Logged())
    made.save_checkpoint(tmp_path / "x.ckpt")
    assert Counts.saved == ["x.ckpt"]
    made.strategy.remove_checkpoint(tmp_path / "x.ckpt")
    assert not list(tmp_path.rglob("*.ckpt"))
