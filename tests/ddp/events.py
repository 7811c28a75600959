"""Modules and callbacks that do something odd in the middle of training."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.models import NetworkModule
from tests.reference import Case


def attempt(function: Callable[[], Any]) -> str:
    """What calling it raises, by its type and words; empty if nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Spoiled(NetworkModule):
    """The loss of one rank is NaN in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The network's loss, a scalar."""
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_rank, batch_idx) == (1, 1) else loss


class SpoiledAfterwards(NetworkModule):
    """A hook writes NaN into reduced gradients on one rank."""

    def on_after_backward(self) -> None:
        """After they were reduced."""
        if (self.global_rank, self.trainer.fit_loop.epoch_loop.batch_idx) == (1, 1):
            self.network.inner.weight.grad.fill_(float("nan"))


class Alone(pl.Callback):
    """One rank looks at what others hold a part of."""

    def __init__(self) -> None:
        self.heard: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_unused: Any) -> None:
        """Weights may be looked at, masters not."""
        if trainer.global_rank == 0:
            optimizer = trainer.optimizers[0]
            self.heard["module"] = attempt(module.state_dict)
            self.heard["part"] = attempt(module.network.inner.state_dict)
            self.heard["optimizer"] = attempt(optimizer.state_dict)
            self.heard["step"] = attempt(lambda: [float(state["step"]) for state in optimizer.state.values()])
            self.heard["weights"] = attempt(lambda: [float(p.sum()) for p in module.parameters()])


class SwitchesAmsgrad(pl.Callback):
    """Asks for another algorithm in the middle."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """In the second batch."""
        if batch_idx == 1:
            trainer.optimizers[0].param_groups[0]["amsgrad"] = True


class Unfreezes(pl.Callback):
    """Trains what was frozen when training began."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """In the second batch."""
        if batch_idx == 1:
            module.network.norm.bias.requires_grad_(True)


class Clamps(pl.Callback):
    """Writes into all weights, on all ranks, in a way that leaves no trace, or one that torch sees."""

    def __init__(self, traceless: bool) -> None:
        self.traceless = traceless

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_unused: Any) -> None:
        """After each step."""
        with torch.no_grad():
            for parameter in module.network.parameters():
                (parameter.data if self.traceless else parameter).clamp_(-0.2, 0.2)


class Raises(pl.Callback):
    """Ends training on some ranks."""

    def __init__(self, ranks: tuple[int, ...], kill: bool = False, epoch: int = 0) -> None:
        self.ranks = ranks
        self.epoch = epoch
        self.kill = kill

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """In the second batch."""
        if (trainer.current_epoch, batch_idx) == (self.epoch, 1) and trainer.global_rank in self.ranks:
            if self.kill:
                os._exit(7)
            raise ValueError("enough")


class Pairs(NetworkModule):
    """One process that trains on the batches of two ranks at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Half the sum of both losses, a scalar."""
        losses = [self.network.loss(own) for own in batch]
        return losses[0] / 2 + losses[1] / 2


class Validates(NetworkModule):
    """Logs a number that differs between ranks, reduced."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss, and the rank."""
        self.log("loss", self.network.loss(batch), sync_dist=True)
        self.log("rank", float(self.global_rank), sync_dist=True)


class Many(pl.LightningModule):
    """20 million parameters that cost next to nothing to compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(5_000_000) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The sum of all, a scalar."""
        return sum((part.sum() for part in self.parts), start=torch.zeros(())) * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What is spread."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def full_disk(*_unused: Any, **_also: Any) -> None:
    """What writing raises there."""
    raise OSError(errno.ENOSPC, "No space left on device")


class FullFile:
    """A file that takes so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        """Write, or find the disk full."""
        self._room -= len(data)
        if self._room < 0:
            full_disk()
        return self._file.write(data)

    def flush(self) -> None:
        """Nothing is held back."""
        self._file.flush()


PLAIN = Case("plain", "bf16-mixed", 1, "none", "adamw")
