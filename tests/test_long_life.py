"""Two thousand steps with workers, validation and checkpoints: nothing grows, and no worker holds masters."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cpu_offload.offload import memory
from tests.models import quiet_trainer
from tests.net import Net, adamw, offload

Result = TypeVar("Result")

EPOCHS = 10
STEPS = 200
WARM = 4
"""Epochs after which everything that is made once has been made."""

MIB = 1 << 20
GROWTH = 4 * MIB
"""Bytes the process may grow by in 1,200 steps: what the allocator's pages and Python's own tables move by. A copy of
the state of this net kept at every step would be 60 times as much."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc, which only Linux has"),
]


@dataclass
class Held:
    """What the process holds in the middle of an epoch."""

    rss: int
    threads: int
    python_threads: int
    files: int


class Census(pl.Callback):
    """Counts what the process holds in the middle of each epoch, with the workers of training alive."""

    def __init__(self) -> None:
        self.held: list[Held] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS // 2:
            gc.collect()
            process = psutil.Process()
            self.held.append(
                Held(process.memory_info().rss, process.num_threads(), threading.active_count(), process.num_fds())
            )


class Leak(pl.Callback):
    """Keeps 64 KiB at each step, or a thread or a file at each epoch, or nothing."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.kept: list[Any] = []
        self.end = threading.Event()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "rss":
            pages = mmap.mmap(-1, 65_536)  # new to the process, unlike what malloc may find in its heaps
            pages.write(b"\1" * len(pages))
            self.kept.append(pages)
        elif batch_idx == 0 and self.what == "files":
            self.kept.append(open(os.devnull))  # noqa: SIM115
        elif batch_idx == 0 and self.what == "threads":
            self.kept.append(threading.Thread(target=self.end.wait))
            self.kept[-1].start()


def in_a_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls where nothing ran before: free memory and copies that other tests left behind would hide or add bytes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def live(context: str, folder: Path, epochs: int, leaking: str = "") -> list[Held]:
    """Trains `STEPS` steps an epoch with workers of a kind; returns what was held in each epoch."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(STEPS * 4, 8, generator=generator))
    spawned = {"persistent_workers": True} if context == "spawn" else {}  # a spawned worker takes seconds to start
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context, "collate_fn": stack, **spawned}
    census, leak = Census(), Leak(leaking)
    trainer = quiet_trainer(strategy=offload(), max_epochs=epochs)
    saving = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=STEPS // 4)
    trainer.callbacks.extend([saving, census, leak])
    net = Forgetful(adamw)
    try:
        trainer.fit(net, DataLoader(data, batch_size=4, **options), DataLoader(data, batch_size=80, **options))
    finally:
        leak.end.set()
    assert trainer.global_step == epochs * STEPS
    return census.held


def stack(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


class Forgetful(Net):
    """Does not collect its losses."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)


def assert_no_growth(held: list[Held]) -> None:
    warm = held[WARM:]
    assert len(warm) > 1
    for now in warm[1:]:
        assert now.threads <= warm[0].threads, held
        assert now.python_threads <= warm[0].python_threads, held
        assert now.files <= warm[0].files, held
        assert now.rss <= warm[0].rss + GROWTH, held


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_nothing_grows(context: str, tmp_path: Path) -> None:
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    held = in_a_fresh_process(live, context, tmp_path, EPOCHS)
    assert len(held) == EPOCHS
    assert_no_growth(held)


@pytest.mark.parametrize("what", ["rss", "threads", "files"])
def test_the_census_notices_a_leak(what: str, tmp_path: Path) -> None:
    held = in_a_fresh_process(live, "fork", tmp_path, WARM + 2, what)
    with pytest.raises(AssertionError):
        assert_no_growth(held)


class Wide(pl.LightningModule):
    """Eight million parameters, 96 MB of masters and moments, of which each batch reads a few."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(80_000, 100)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def own_bytes_of_workers() -> list[int]:
    """What each child of this process holds for itself alone: pages it does not share, and copies it made."""
    return [child.memory_full_info().uss for child in psutil.Process().children()]


def own_bytes_after_training(inherited: bool) -> int:
    """Private bytes of the forked worker, once the parent has written to every page of its state several times."""
    with pytest.MonkeyPatch.context() as patch:
        if inherited:
            patch.setattr(memory, "_advise", lambda *_: None)
        return _own_bytes_after_training(offload())


def _own_bytes_after_training(strategy: Any) -> int:
    seen: list[int] = []

    def look(trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            seen.extend(own_bytes_of_workers())

    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.callbacks.append(pl.callbacks.LambdaCallback(on_train_batch_end=look))
    samples: Any = torch.arange(64).view(8, 8)
    trainer.fit(Wide(), DataLoader(samples, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert seen
    return max(seen)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="nothing is inherited without fork")
class TestWorkers:
    STATE = 80_000 * 100 * 12

    def test_hold_no_copies_of_the_masters(self) -> None:
        assert in_a_fresh_process(own_bytes_after_training, False) < self.STATE / 2

    def test_would_hold_them_if_the_pages_were_inherited(self) -> None:
        assert in_a_fresh_process(own_bytes_after_training, True) > self.STATE
