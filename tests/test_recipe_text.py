import math
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_cpu_offload.recipes import GPT
from lightning_cpu_offload.recipes.text import ResumableLoader, TokenWindows
from tests.recipes import Make, folder, make, ready, stock_trainer

__all__ = ["folder", "make"]  # fixtures


def windows_of(loader: ResumableLoader) -> list[tuple[list[int], list[int]]]:
    return [(x.tolist(), y.tolist()) for batch in loader for x, y in zip(*batch, strict=True)]


def write_tokens(tmp_path: Path, count: int) -> Path:
    np.save(tmp_path / "tokens.npy", np.arange(count, dtype=np.uint16))
    return tmp_path / "tokens.npy"


@pytest.mark.parametrize(("count", "expected"), [(9, 1), (16, 1), (17, 2), (100, 12)])
def test_windows_cover_each_token_once(tmp_path: Path, count: int, expected: int) -> None:
    windows = TokenWindows(write_tokens(tmp_path, count), context_length=8)
    assert len(windows) == expected
    inputs, targets = (torch.cat(parts) for parts in zip(*(windows[i] for i in range(expected)), strict=True))
    assert inputs.dtype == targets.dtype == torch.long
    assert torch.equal(inputs, torch.arange(8 * expected))
    assert torch.equal(targets, torch.arange(1, 8 * expected + 1))


def test_memory_map_is_not_pickled(tmp_path: Path) -> None:
    windows = TokenWindows(write_tokens(tmp_path, 50_000), context_length=8)
    expected = windows[3]
    assert isinstance(windows.tokens, np.memmap)
    pickled = pickle.dumps(windows)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert isinstance(copy.tokens, np.memmap)
    assert all(map(torch.equal, copy[3], expected))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_give_the_same_batches(make: Make, context: str) -> None:
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    alone, workers = (ready(make(num_workers=n, batch_size=3)).train_dataloader() for n in (0, 2))
    workers.multiprocessing_context = context
    assert windows_of(alone) == windows_of(workers)


def test_each_epoch_shuffles_every_window_anew(make: Make) -> None:
    data = ready(make(batch_size=4))
    loader = data.train_dataloader()
    windows = data.train_windows
    in_order = [(windows[i][0].tolist(), windows[i][1].tolist()) for i in range(len(windows))]
    first = windows_of(loader)
    loader.sampler.set_epoch(1)
    second = windows_of(loader)
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert first != second
    assert first != in_order
    assert first == windows_of(ready(make(batch_size=4)).train_dataloader())
    assert windows_of(data.val_dataloader())[0][0] == data.validation_windows[0][0].tolist()


def test_loading_leaves_the_global_generator_alone(make: Make) -> None:
    data = ready(make())
    state = torch.get_rng_state()
    windows_of(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_share_the_windows(make: Make) -> None:
    data = ready(make())
    everything = windows_of(data.train_dataloader())
    seen = []
    for rank in range(2):
        data.trainer = type("Trainer", (), {"world_size": 2, "global_rank": rank})()
        seen.append(windows_of(data.train_dataloader()))
    assert [len(windows) for windows in seen] == [math.ceil(len(everything) / 2)] * 2
    assert {str(window) for window in seen[0] + seen[1]} == {str(window) for window in everything}


def test_seed_decides_the_order(make: Make, folder: Path) -> None:
    def windows(seed: int) -> list[tuple[list[int], list[int]]]:
        # One file is cut at the same place whatever the seed.
        return windows_of(ready(make(path=str(folder / "9.txt"), seed=seed)).train_dataloader())

    assert windows(0) == windows(0) != windows(1)
    assert sorted(windows(0)) == sorted(windows(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/nowhere/at all"}, r"path='/nowhere/at all': does not exist"),
        ({"val_fraction": 0.0}, r"val_fraction=0\.0: must lie between 0 and 1"),
        ({"val_fraction": 1}, r"val_fraction=1: must lie between 0 and 1"),
        ({"context_length": 0}, r"context_length=0: must be 1 or more"),
        ({"batch_size": 0}, r"batch_size=0: must be 1 or more"),
        ({"tokenizer": "words"}, r"tokenizer='words': must be 'bytes' or 'bpe'"),
        ({"vocab_size": 300}, r"vocab_size=300: bytes have 256 ids.*'bpe'"),
        ({"tokenizer": "bpe", "vocab_size": 256}, r"vocab_size=256: must be more than 256"),
    ],
)
def test_bad_options(make: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"], ids=["nothing", "empty", "binary"])
def test_folder_without_text(make: Make, tmp_path: Path, content: bytes | None) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    if content is not None:
        (empty / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"path='.*empty': holds no readable text"):
        make(path=str(empty)).prepare_data()


@pytest.mark.parametrize(("context_length", "part"), [(100_000, "training"), (1500, "validation")])
def test_context_longer_than_the_text(make: Make, context_length: int, part: str) -> None:
    message = rf"context_length={context_length}: must be less than .* the {part} text"
    with pytest.raises(ValueError, match=message):
        ready(make(context_length=context_length, val_fraction=0.1))


def test_text_of_one_letter(make: Make, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(ValueError, match=r"context_length=8: must be less than the 1 tokens of the training"):
        ready(make(path=str(tmp_path / "a")))


def test_missing_tokenizers_library(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    make()
    with pytest.raises(ImportError, match=r"tokenizer='bpe'.*pip install 'lightning-cpu-offload\[recipes\]'"):
        make(tokenizer="bpe")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_gpt_trains_end_to_end(make: Make, tokenizer: str) -> None:
    data = make(tokenizer=tokenizer, vocab_size=None if tokenizer == "bytes" else 300, batch_size=2)
    model = GPT(num_layers=1, d_model=16, num_heads=2, context_length=8, vocab_size=data.vocab_size)
    trainer = stock_trainer(max_steps=2, val_check_interval=2, limit_val_batches=2)
    trainer.fit(model, datamodule=data)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["val/loss"] > 0


def test_model_with_too_few_ids(make: Make) -> None:
    model = GPT(num_layers=1, d_model=16, num_heads=2, context_length=8, vocab_size=255)
    with pytest.raises(ValueError, match=r"vocab_size=255: must be 256 or more for this data"):
        stock_trainer(max_steps=1).fit(model, datamodule=make())


class Recorder(pl.LightningModule):
    """Trains one number and remembers the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].flatten().tolist())
        return self.scale * batch[1].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def run_of(
    make: Make, folder: Path, save_at: int, ckpt_path: Path | None, num_workers: int = 0, **options: Any
) -> list[list[int]]:
    """The batches of a run that saves `folder/step=N.ckpt` every `save_at` steps."""
    model, data = Recorder(), make(batch_size=8, num_workers=num_workers)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=save_at, save_top_k=-1)
    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "callbacks": [saver], **options}
    stock_trainer(**options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model.seen


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", ["in the first epoch", "at its end", "in the second epoch"])
def test_resumed_run_goes_on_where_it_was(make: Make, tmp_path: Path, stop: str, num_workers: int) -> None:
    per_epoch = len(ready(make(batch_size=8)).train_dataloader())
    steps_per_epoch = math.ceil(per_epoch / 2)
    step, seen_before = {
        "in the first epoch": (3, 6),
        "at its end": (steps_per_epoch, per_epoch),
        "in the second epoch": (steps_per_epoch + 3, per_epoch + 6),
    }[stop]
    options = {"max_steps": per_epoch + 10, "num_workers": num_workers}
    whole = run_of(make, tmp_path / "whole", step, None, **options)
    saved = tmp_path / "whole" / f"step={step}.ckpt"
    resumed = run_of(make, tmp_path / "resumed", step, saved, **options)
    assert len(whole) > 2 * per_epoch
    assert resumed == whole[seen_before:]


@pytest.mark.parametrize("step", [3, 5, 8])
def test_resumed_run_with_epochs_cut_short(make: Make, tmp_path: Path, step: int) -> None:
    options = {"max_steps": 15, "limit_train_batches": 10}  # five steps an epoch
    whole = run_of(make, tmp_path / "whole", step, None, **options)
    saved = tmp_path / "whole" / f"step={step}.ckpt"
    resumed = run_of(make, tmp_path / "resumed", step, saved, **options)
    assert resumed == whole[2 * step :]


def test_loader_skips_once_what_was_given(make: Make) -> None:
    loader = ready(make()).train_dataloader()
    whole = windows_of(loader)
    assert loader.state_dict() == {"epoch": 0, "batches_given": 0}
    loader.load_state_dict({"epoch": 0, "batches_given": 5})
    assert windows_of(loader) == whole[5:]
    assert windows_of(loader) == whole
    loader.load_state_dict({"epoch": 1, "batches_given": 5})
    assert windows_of(loader) == whole  # the state is from another epoch
