"""Text as a LightningDataModule: batches of token windows ``(inputs, targets)`` for a language model."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cpu_offload.namespaces import pl
from lightning_cpu_offload.recipes.corpus import Corpus, Recipe, load_corpus
from lightning_cpu_offload.recipes.tokenizer import NUM_BYTES, require_tokenizers

Batch = tuple[Tensor, Tensor]


class TokenWindows(Dataset[Batch]):
    """Consecutive windows of a memory-mapped array of ids; each predicts the next token at every place.

    Window ``i`` has inputs ``tokens[i * T : (i + 1) * T]`` and as targets the same moved on by one, so every
    token but the first is a target once. What is left at the end for less than a window is dropped.

    Args:
        path: ``.npy`` file of ids, ``[N]``.
        context_length: Tokens per window, ``T``.
    """

    def __init__(self, path: Path, context_length: int) -> None:
        self.path = path
        self.context_length = context_length

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids, mapped into memory at first use."""
        return np.load(self.path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """All but the map: pickled, it would travel to every worker process as a copy."""
        return {"path": self.path, "context_length": self.context_length}

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context_length

    def __getitem__(self, index: int) -> Batch:
        start = index * self.context_length
        window = torch.from_numpy(self.tokens[start : start + self.context_length + 1].astype(np.int64))
        return window[:-1], window[1:]


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader over a DistributedSampler whose place in the epoch is part of the Trainer's checkpoint.

    Lightning saves and restores the state of loaders that have one, so a run that goes on from the middle of
    an epoch sees the batches it has not seen yet.
    """

    batches_given = 0
    _resume_from: dict[str, int] | None = None

    @property
    def epoch(self) -> int:
        """What Lightning told the sampler to shuffle for."""
        return cast("DistributedSampler[Batch]", self.sampler).epoch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The batches of an epoch, or what is left of the one that a loaded state is from."""
        state, self._resume_from = self._resume_from, None
        skip = state["batches_given"] if state and state["epoch"] == self.epoch else 0
        for self.batches_given, batch in enumerate(super().__iter__(), start=1):
            if self.batches_given > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given out; none once all were."""
        return {"epoch": self.epoch, "batches_given": self.batches_given % len(self)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next pass over that epoch start after as many batches."""
        self._resume_from = state_dict


class TextDataModule(pl.LightningDataModule):
    """Windows of text for a language model, tokenized once and memory-mapped from then on.

    Training and validation share no document: whole files go to one side, equal files are taken once, and a
    single file is cut in two. Windows do not overlap; training visits them in an order that ``seed`` and the
    epoch decide, and the last, partial window is dropped.

    Args:
        path: A text file, or a folder whose text files are the documents; None for the source text of the
            running Python's standard library.
        tokenizer: ``"bytes"``, or ``"bpe"`` for byte-level BPE learned from the training part.
        vocab_size: Number of ids for ``"bpe"``, more than 256; None for 8192. Bytes have 256.
        context_length: Tokens per window.
        batch_size: Windows per batch.
        val_fraction: Part of the text to validate on, between 0 and 1.
        num_workers: Worker processes of each DataLoader; windows are slices, so 0 is seldom too few.
        cache_dir: Folder for the tokens; None for ``lightning-cpu-offload`` in the user's cache folder.
        seed: Of the choice of validation documents and of the order of training.

    Raises:
        ValueError: An option is out of range, or ``path`` does not exist.
        ImportError: ``"bpe"`` without the ``tokenizers`` library.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        tokenizer: Literal["bytes", "bpe"] = "bytes",
        vocab_size: int | None = None,
        context_length: int = 256,
        batch_size: int = 1,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and not Path(path).exists():
            raise ValueError(f"path={path!r}: does not exist. Give a text file or a folder of text files.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction!r}: must lie between 0 and 1.")
        for name, value in {"context_length": context_length, "batch_size": batch_size}.items():
            if value < 1:
                raise ValueError(f"{name}={value!r}: must be 1 or more.")
        self.path = None if path is None else Path(path)
        self.recipe = Recipe(tokenizer, _checked_vocab_size(tokenizer, vocab_size), val_fraction, seed)
        self.context_length = context_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)

    @property
    def vocab_size(self) -> int:
        """Ids lie below this; known before the tokenizer is."""
        return self.recipe.vocab_size

    @cached_property
    def corpus(self) -> Corpus:
        """The tokens and the tokenizer, built at first use unless the cache has them."""
        return load_corpus(self.path, self.recipe, self.cache_dir)

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        return self.corpus.tokenizer.encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        return self.corpus.tokenizer.decode(ids)

    def example_batch(self) -> Batch:
        """A batch without data, of the shapes of the real ones: what `estimate` asks for, before any text is read."""
        shape = (self.batch_size, self.context_length)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def prepare_data(self) -> None:
        """Tokenizes, in one process, what the cache does not have.

        Raises:
            ValueError: There is no readable text under ``path``.
        """
        _ = self.corpus

    def setup(self, stage: str) -> None:
        """Opens both parts.

        Raises:
            ValueError: ``context_length`` is longer than one of them.
        """
        self.train_windows = self._windows("training", self.corpus.train)
        self.validation_windows = self._windows("validation", self.corpus.validation)

    def _windows(self, part: str, tokens: Path) -> TokenWindows:
        windows = TokenWindows(tokens, self.context_length)
        if not len(windows):
            raise ValueError(
                f"context_length={self.context_length!r}: must be less than the {len(windows.tokens)} tokens "
                f"of the {part} text. Shorten it, or give more text or another val_fraction."
            )
        return windows

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled windows; the order depends on ``seed`` and the epoch alone."""
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> ResumableLoader:
        """Windows in order."""
        return self._loader(self.validation_windows, shuffle=False)

    def _loader(self, windows: TokenWindows, shuffle: bool) -> ResumableLoader:
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler: DistributedSampler[Batch] = DistributedSampler(
            windows, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=self.recipe.seed
        )
        return ResumableLoader(
            windows,
            self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # or every epoch would draw from the global one
        )


def default_cache_dir() -> Path:
    """``lightning-cpu-offload`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-cpu-offload"


def _checked_vocab_size(tokenizer: str, vocab_size: int | None) -> int:
    if tokenizer == "bytes":
        if vocab_size not in (None, NUM_BYTES):
            raise ValueError(f"vocab_size={vocab_size!r}: bytes have 256 ids. Drop it, or take 'bpe'.")
        return NUM_BYTES
    if tokenizer != "bpe":
        raise ValueError(f"tokenizer={tokenizer!r}: must be 'bytes' or 'bpe'.")
    require_tokenizers()
    if vocab_size is not None and vocab_size <= NUM_BYTES:
        raise ValueError(
            f"vocab_size={vocab_size!r}: must be more than 256 for 'bpe', whose first 256 ids are the bytes. "
            "Raise it, or take tokenizer='bytes'."
        )
    return vocab_size or 8192
