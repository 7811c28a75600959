"""A checkpoint asked for at any moment holds weights and optimizer state of one and the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.fused import FusedAdamW
from lightning_cpu_offload.offload.pipeline import Pipeline
from tests.models import quiet_trainer
from tests.reference import Snapshot, assert_identical

STEPS = 6
WINDOW = 2


class Module(pl.LightningModule):
    """A model of several chunks that keeps its state after each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class KeepStates(pl.Callback):
    """The state after each optimizer step, the first one being that of before."""

    def __init__(self) -> None:
        self.states: list[Snapshot] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == len(self.states):
            self.states.append(Snapshot(dict(module.state_dict()), trainer.optimizers[0].state_dict()))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.states.append(Snapshot(dict(module.state_dict()), trainer.optimizers[0].state_dict()))


class SaveOnException(pl.Callback):
    """As people write it; Lightning's own does no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def fit(callbacks: Any, **options: Any) -> Module:
    module = Module()
    torch.manual_seed(1)
    batches = torch.randn(STEPS * WINDOW, 3, 16)
    trainer = quiet_trainer(
        strategy=CPUOffloadStrategy(cpu_threads=1, **options),
        max_epochs=1,
        accumulate_grad_batches=WINDOW,
        callbacks=callbacks,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", 128)


@pytest.fixture
def states() -> list[Snapshot]:
    keep = KeepStates()
    fit([keep])
    assert len(keep.states) == STEPS + 1
    return keep.states


def saved(path: Path) -> Snapshot:
    checkpoint = torch.load(path, weights_only=True)
    return Snapshot(checkpoint["state_dict"], checkpoint["optimizer_states"][0])


def number_of(snapshot: Snapshot, states: list[Snapshot]) -> int:
    """After how many steps this was the state; fails if it never was."""
    for number, state in enumerate(states):
        try:
            assert_identical(snapshot, state)
        except AssertionError:
            continue
        return number
    raise AssertionError("a state that no step leaves behind")


def at_chunk(chosen: int, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a step, on the host thread, just before one of its chunks."""
    calls: Iterator[int] = iter(range(10**6))
    work = FusedAdamW.work

    def interrupted(self: FusedAdamW, *arguments: Any) -> Any:
        if next(calls) == chosen:
            action()
        return work(self, *arguments)

    monkeypatch.setattr(FusedAdamW, "work", interrupted)


CHUNKS = 20
"""Fewer than a step has."""


@pytest.mark.parametrize("chunk", [0, 1, CHUNKS // 2, CHUNKS + 3, 3 * CHUNKS])
def test_ctrl_c_in_the_host_step(
    chunk: int, states: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = KeepStates()
    at_chunk(chunk, lambda: os.kill(os.getpid(), signal.SIGINT), monkeypatch)
    with pytest.raises(SystemExit):
        fit([keep, SaveOnException(tmp_path / "saved.ckpt")])
    number = number_of(saved(tmp_path / "saved.ckpt"), states)
    # Lightning counts a step when `optimizer.step` has returned, which it has not.
    assert number == len(keep.states)


@pytest.mark.parametrize("chunk", [1, CHUNKS + 3])
def test_ctrl_c_leaves_the_module_with_whole_steps(
    chunk: int, states: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_chunk(chunk, lambda: os.kill(os.getpid(), signal.SIGINT), monkeypatch)
    trained: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trained.extend([module, trainer.optimizers[0]])

    with pytest.raises(SystemExit):
        fit([Look()])
    module, optimizer = trained
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    number_of(Snapshot(dict(module.state_dict()), optimizer.state_dict()), states)


@pytest.mark.parametrize("chunk", [0, 2, CHUNKS + 1, 2 * CHUNKS])
def test_a_signal_handler_that_saves_in_the_host_step(
    chunk: int, states: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM's requeueing saves inside a handler, between two bytecodes of whatever runs."""
    path = tmp_path / "saved.ckpt"

    class SaveOnSignal(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.before = signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(path))

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            signal.signal(signal.SIGUSR1, self.before)

    at_chunk(chunk, lambda: os.kill(os.getpid(), signal.SIGUSR1), monkeypatch)
    keep = KeepStates()
    fit([SaveOnSignal(), keep])
    assert number_of(saved(path), states) >= 1
    assert_identical(keep.states[-1], states[-1])


HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
HOOKS += ["on_train_batch_start", "on_train_batch_end"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("options", [{}, {"gradients": "host"}], ids=["device", "host"])
def test_saved_from_a_hook(hook: str, options: Any, tmp_path: Path) -> None:
    """In every batch, in the middle of windows too: the weights are those after `global_step` steps."""
    keep = KeepStates()
    numbers: list[int] = []
    paths: list[Path] = []

    class Save(pl.Callback):
        pass

    def save(trainer: pl.Trainer, *_: Any) -> None:
        paths.append(tmp_path / f"{len(paths)}.ckpt")
        numbers.append(trainer.global_step)
        trainer.save_checkpoint(paths[-1])

    saver = Save()
    setattr(saver, hook, save)
    fit([keep, saver], **options)
    assert len(paths) >= STEPS
    for path, number in zip(paths, numbers, strict=True):
        assert number_of(saved(path), keep.states) == number


def test_delayed_updates_are_all_in_a_checkpoint(tmp_path: Path) -> None:
    """The masters after `global_step` steps, and the weights not one step behind them."""
    paths = [tmp_path / f"{step}.ckpt" for step in range(1, STEPS + 1)]

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_idx % WINDOW == WINDOW - 1:
                trainer.save_checkpoint(paths[trainer.global_step - 1])

    delayed = {"update": "delayed", "exact_steps": 0}
    module = fit([Save()], **delayed)
    for path in paths:
        steps = {
            float(state["step"])
            for state in torch.load(path, weights_only=True)["optimizer_states"][0]["state"].values()
        }
        assert steps == {paths.index(path) + 1}
    # Each save let the step land, so each was exact.
    exact = fit([])
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), exact.state_dict().values(), strict=True)
    )
    late = fit([], **delayed)
    assert not torch.equal(late.network[0].weight, exact.network[0].weight)  # type: ignore[arg-type]


def test_a_failure_of_the_host_step_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the kernel")

    at_chunk(2, fail, monkeypatch)
    synchronized = []
    launch = Pipeline.launch
    monkeypatch.setattr(Pipeline, "launch", lambda self, flight: (synchronized.append(self), launch(self, flight))[1])
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        fit([])
    assert all(pipeline.working is None and pipeline.arriving is None for pipeline in synchronized)
