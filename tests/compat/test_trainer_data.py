"""Every kind of loader and data module trains as under stock Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.compat.logged import Logged, mostly_slow, trainer
from tests.compat.twin import assert_twins
from tests.net import Net, batches


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, number: int = 14) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return iter([torch.randn(8, generator=generator) for _ in range(self.number)])


def stream(workers: int = 0, **options: Any) -> DataLoader:
    """Batches of four samples, the last one of two."""
    return DataLoader(Stream(), batch_size=4, num_workers=workers, **options)


class Many(Logged):
    """Takes whatever collection of batches it gets, and several loaders to evaluate on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
        loss = sum(self.loss(part) for part in parts if part is not None)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch)


LOADERS: dict[str, Callable[[], Any]] = {
    "without a length": stream,
    "by a worker": partial(stream, 1),
    "by a worker that stays": partial(stream, 1, persistent_workers=True),
    "a list": lambda: [batches(2), batches(3)],
    "a dictionary": lambda: {"a": batches(2), "b": batches(3)},
    "until the shortest ends": lambda: CombinedLoader({"a": batches(2), "b": batches(3)}, "min_size"),
    "with the shorter ones repeated": lambda: CombinedLoader([batches(2), batches(3)], "max_size_cycle"),
    "with the shorter ones missing": lambda: CombinedLoader([batches(2), batches(3)], "max_size"),
}


@pytest.mark.parametrize("name", mostly_slow(LOADERS, "without a length", "by a worker that stays", "a dictionary"))
def test_every_kind_of_loader_trains_as_in_stock(name: str) -> None:
    def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
        pl_trainer.fit(module, LOADERS[name](), [batches(2), batches(1)])
        return [
            pl_trainer.test(module, [batches(1), batches(2)], verbose=False),
            pl_trainer.predict(module, [batches(1), batches(2)]),
        ]

    assert_twins(Many, drive=drive, trainer=trainer, max_epochs=2, limit_val_batches=1.0)


class Iterates(Net):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_step_that_draws_its_batches_itself() -> None:
    assert_twins(Iterates, drive=lambda t, m: t.fit(m, batches(4)))


class Data(pl.LightningDataModule):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> DataLoader:
        self.calls.append("train")
        return batches(3)

    def val_dataloader(self) -> DataLoader:
        self.calls.append("val")
        return batches(2)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(f"transfer to {device}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch * 1.5

    def state_dict(self) -> dict[str, Any]:
        return {"number": len(self.calls)}


def test_a_data_module_is_asked_as_in_stock() -> None:
    def drive(pl_trainer: pl.Trainer, module: Any) -> list[str]:
        data = Data()
        pl_trainer.fit(module, datamodule=data)
        pl_trainer.validate(module, datamodule=data, verbose=False)
        return data.calls

    assert_twins(Logged, drive=drive, max_epochs=2, reload_dataloaders_every_n_epochs=1, limit_val_batches=1.0)
