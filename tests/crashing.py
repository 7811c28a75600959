"""A training run that can be killed at any moment, and says in memory that outlives it what it was doing.

The runs are forked from a server that has imported everything and compiled the kernels, so that a run costs a
second and not ten. `tests.crashing_server` is what that server imports.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO

ELSEWHERE, SAVE, STEP = 0, 1, 2
PHASES = {ELSEWHERE: "elsewhere", SAVE: "inside a save", STEP: "inside a host step"}
BATCHES = 8
EPOCHS = 2
ACCUMULATE = 2
STEPS = BATCHES * EPOCHS // ACCUMULATE
PAUSE = 5e-4
"""Seconds that a run rests at each point where a kill may matter, so that kills spread over all of them."""


class Marker:
    """What a run is doing, and how often it has begun to do each thing, in a file that is mapped.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def phase(self) -> int:
        """What is being done now; after a kill, what was done when it came."""
        return self._map[0]

    def count(self, phase: int) -> int:
        """How often a phase was entered."""
        return self._map[1 + phase]

    def enter(self, phase: int) -> int:
        """Begin a phase; returns the one that is left."""
        before, self._map[0] = self._map[0], phase
        self._map[1 + phase] += 1
        return before

    def leave(self, before: int) -> None:
        """Go back to what was done before the last `enter`."""
        self._map[0] = before


class MarkedIO(StreamingCheckpointIO):
    """Says when it saves."""

    def __init__(self, marker: Marker) -> None:
        super().__init__()
        self.marker = marker

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        before = self.marker.enter(SAVE)
        super().save_checkpoint(*args, **kwargs)
        self.marker.leave(before)


class Run(pl.LightningModule):
    """A small net in several chunks of several tensors; its batches follow from epoch and index alone."""

    def __init__(self, marker: Marker) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Linear(64, 512)
            self.norm = nn.LayerNorm(512)
            self.outer = nn.Linear(512, 64)
        self.marker = marker

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.marker.enter(ELSEWHERE)
        generator = torch.Generator().manual_seed(1000 * self.current_epoch + batch_idx)
        x = torch.randn(4, 64, generator=generator)
        return (self.outer(self.norm(torch.relu(self.inner(x)))) - x).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before = self.marker.enter(STEP)  # the last of the closure: what follows is the step itself

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.marker.leave(self.before)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveEachStep(pl.Callback):
    """Saves `step=N.ckpt` and over `last.ckpt`, where a step ends: gradients of half a window are in no checkpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % ACCUMULATE == 0:
            for name in (f"step={trainer.global_step}", "last"):
                trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")


def train(folder: str, resume: bool, slow: bool = True, epochs: int = EPOCHS) -> None:
    """Trains in this process, saving after every step as `step=N.ckpt` and over `last.ckpt`.

    Args:
        folder: Of the checkpoints and the marker.
        resume: Continue from `last.ckpt`.
        slow: Rest where a kill may matter.
        epochs: How long to train.
    """
    torch.set_num_threads(1)
    if slow:
        _rest_around(os, "fsync", "replace")
        _rest_around(kernels, "adamw")
    marker = Marker(Path(folder, "marker"))
    trainer = pl.Trainer(
        strategy=CPUOffloadStrategy(
            cpu_threads=1, checkpoint_io=MarkedIO(marker), precision_plugin=CPUOffloadPrecision("bf16-mixed")
        ),
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        callbacks=[SaveEachStep(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(range(BATCHES), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Run(marker), loader, ckpt_path=str(Path(folder, "last.ckpt")) if resume else None)


def wait_for(marker: Marker, phase: int, count: int, process: Any, patience: float) -> None:
    """Return when the run enters a phase for the `count`th time, or after `patience` seconds, or when it has ended."""
    end = time.monotonic() + patience
    while marker.count(phase) < count and time.monotonic() < end and process.is_alive():
        time.sleep(0)


def _rest_around(owner: Any, *names: str) -> None:
    for name in names:
        setattr(owner, name, _resting(getattr(owner, name)))


def _resting(function: Any) -> Any:
    def rest(*args: Any, **kwargs: Any) -> Any:
        time.sleep(random.uniform(0, PAUSE))
        result = function(*args, **kwargs)
        time.sleep(random.uniform(0, PAUSE))
        return result

    return rest
