"""What the tests of the recipes share: a tiny model, a batch, a stock Trainer, small texts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_cpu_offload.recipes import GPT, TextDataModule

NUM_LAYERS = 2

WORDS = ("gradient", "weight", "moment", "h\u00f4te", "\u91cd\u307f", "\U0001f40d", "x = y\n", "  ", "\r\n")

Make = Callable[..., TextDataModule]


def tiny(**changes: Any) -> GPT:
    """A GPT of 27,000 parameters, the same each time, for the batches of `batch`."""
    torch.manual_seed(0)
    sizes = {"num_layers": NUM_LAYERS, "d_model": 32, "num_heads": 4, "vocab_size": 50, "context_length": 16}
    return GPT(**{**sizes, "warmup_steps": 0, **changes})


def batch(size: int = 3) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, the same each time."""
    tokens = torch.randint(50, (size, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def stock_trainer(**changes: Any) -> pl.Trainer:
    """Lightning's own Trainer on the CPU, quiet, until `max_steps`."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **changes})


def text_of(seed: int, words: int) -> str:
    """Random words, some of them not ASCII."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve documents; two of them are the same, one lies deeper."""
    root = tmp_path / "texts"
    (root / "deeper").mkdir(parents=True)
    for i in range(10):
        (root / f"{i}.txt").write_bytes(text_of(i, 60 + 7 * i).encode())
    (root / "copy_of_3.txt").write_bytes(text_of(3, 81).encode())
    (root / "deeper" / "a.md").write_bytes(text_of(99, 50).encode())
    return root


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:
    """A data module on `folder` with a cache of its own, not set up yet."""

    def make(**changes: Any) -> TextDataModule:
        defaults = {"path": str(folder), "context_length": 8, "val_fraction": 0.3}
        return TextDataModule(**{**defaults, "cache_dir": str(tmp_path / "cache"), **changes})

    return make


def ready(data: TextDataModule) -> TextDataModule:
    """The same data module, as a Trainer would leave it before training."""
    data.prepare_data()
    data.setup("fit")
    return data
