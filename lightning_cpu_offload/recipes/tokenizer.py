"""Two tokenizers that lose nothing: the bytes themselves, and byte-level BPE learned from the text."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

NUM_BYTES = 256


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One array of ids per text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; ids that stand for nothing are left out."""


class ByteTokenizer:
    """UTF-8: 256 ids, nothing to learn."""

    vocab_size = NUM_BYTES

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One ``uint8`` array per text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in ids if token < NUM_BYTES).decode(errors="replace")


class BPETokenizer:
    """Byte-level BPE (Radford et al. 2019) from the ``tokenizers`` library.

    Args:
        tokenizer: What ``train`` or ``load`` made.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learns the merges from texts; fewer than asked when the texts run out of pairs."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Reads what ``save`` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Writes the ``tokenizers`` library's JSON."""
        self._tokenizer.save(str(path))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One ``uint32`` array per text."""
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in self._tokenizer.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids))


def require_tokenizers() -> None:
    """Says how to get the ``tokenizers`` library where it is missing.

    Raises:
        ImportError: The library is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise ImportError(
            "tokenizer='bpe': needs the tokenizers library, which is not installed. "
            "Run pip install 'lightning-cpu-offload[recipes]', or take tokenizer='bytes'."
        )
