"""From files of text to two memory-mapped arrays of token ids: one to train on, one to validate on.

The result is cached in a folder named after everything it depends on, and appears there by one rename: nobody
ever sees half of it, and of several processes that build it at once the first wins.

    <cache_dir>/<key>/train.npy, validation.npy     ids, uint16 or uint32
                      tokenizer.json                byte-level BPE only
"""

import hashlib
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_cpu_offload.recipes.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
END_OF_DOCUMENT = "\0"
PIECE_CHARACTERS = 1 << 16
PIECES_AT_ONCE = 256


class Recipe(NamedTuple):
    """All that the arrays depend on but the text.

    Attributes:
        tokenizer: ``"bytes"`` or ``"bpe"``.
        vocab_size: Largest number of ids.
        val_fraction: Part of the text to validate on.
        seed: Of the choice of the documents to validate on.
    """

    tokenizer: str
    vocab_size: int
    val_fraction: float
    seed: int


class Corpus(NamedTuple):
    """Token ids on disk, and the tokenizer that made them.

    Attributes:
        train: ``.npy`` file of the ids to train on, ``[N]``.
        validation: ``.npy`` file of the ids to validate on, ``[N]``.
        tokenizer: Text to ids and back.
    """

    train: Path
    validation: Path
    tokenizer: Tokenizer


def load_corpus(path: Path | None, recipe: Recipe, cache_dir: Path) -> Corpus:
    """The corpus of a file, a folder or (None) the standard library, from the cache where it has it.

    The text is read either way, because its content is part of the name in the cache.

    Raises:
        ValueError: There is no readable text.
    """
    documents = read_documents(path)
    if not documents:
        shown = None if path is None else str(path)
        raise ValueError(
            f"path={shown!r}: holds no readable text (UTF-8 without NUL bytes). "
            "Give a text file or a folder that has some."
        )
    entry = cache_dir / _cache_key(documents, recipe)
    if not entry.exists():
        _publish(entry, list(documents.values()), recipe)
    tokenizer = BPETokenizer.load(entry / "tokenizer.json") if recipe.tokenizer == "bpe" else ByteTokenizer()
    return Corpus(entry / "train.npy", entry / "validation.npy", tokenizer)


def read_documents(path: Path | None) -> dict[str, str]:
    """Name and text of every document, sorted by name; each text closes with ``END_OF_DOCUMENT``.

    Empty files and files that are not UTF-8 text are left out, and so is what is hidden in a folder.
    """
    texts = {name: _read_text(file) for name, file in sorted(_files(path))}
    return {name: text + END_OF_DOCUMENT for name, text in texts.items() if text}


def _files(path: Path | None) -> Iterator[tuple[str, Path]]:
    if path is not None and path.is_file():
        yield path.name, path
        return
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    for file in root.rglob("*.py" if path is None else "*"):
        parts = file.relative_to(root).parts
        skipped = SKIPPED_FOLDERS.intersection(parts) if path is None else [p for p in parts if p[0] == "."]
        if file.is_file() and not skipped:
            yield "/".join(parts), file


def _read_text(file: Path) -> str:
    """The text of a file; nothing for what is not text."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if END_OF_DOCUMENT in text else text


def split_documents(texts: list[str], val_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Texts to train on and to validate on; no document stands on both sides, under whatever name.

    Equal documents are taken once. A seeded shuffle decides which go to validation, as many as fit into
    ``val_fraction`` of the characters and one at least. A single document is cut in two instead, its end for
    validation.
    """
    unique = list(dict.fromkeys(texts))
    if len(unique) == 1:
        text = unique[0]
        cut = min(max(1, round(len(text) * (1 - val_fraction))), len(text) - 1)
        return [text[:cut]], [text[cut:]]
    room = val_fraction * sum(map(len, unique))
    validation = []
    for text in random.Random(seed).sample(unique, len(unique)):
        if len(text) <= room:
            validation.append(text)
            room -= len(text)
    validation = validation or [min(unique, key=len)]
    held_out = set(validation)
    return [text for text in unique if text not in held_out], validation


def _cache_key(documents: dict[str, str], recipe: Recipe) -> str:
    digest = hashlib.sha256(repr(recipe).encode())
    for name, text in documents.items():
        content = text.encode()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _publish(entry: Path, texts: list[str], recipe: Recipe) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix="building-") as folder:
        built = Path(folder) / entry.name
        built.mkdir()
        _build(built, texts, recipe)
        try:
            os.rename(built, entry)
        except OSError:
            if not entry.exists():  # unless another process was first
                raise


def _build(folder: Path, texts: list[str], recipe: Recipe) -> None:
    train, validation = split_documents(texts, recipe.val_fraction, recipe.seed)
    tokenizer: Tokenizer = ByteTokenizer()
    if recipe.tokenizer == "bpe":
        tokenizer = bpe = BPETokenizer.train(_pieces(train), recipe.vocab_size)
        bpe.save(folder / "tokenizer.json")
    np.save(folder / "train.npy", _tokenize(train, tokenizer))
    np.save(folder / "validation.npy", _tokenize(validation, tokenizer))


def _pieces(texts: list[str]) -> Iterator[str]:
    """The texts in pieces whose tokens fit in memory; a word on a cut is encoded as two."""
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield text[start : start + PIECE_CHARACTERS]


def _tokenize(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    pieces = list(_pieces(texts))
    tokens = []
    for start in range(0, len(pieces), PIECES_AT_ONCE):
        batch = pieces[start : start + PIECES_AT_ONCE]
        tokens += [ids.astype(dtype) for ids in tokenizer.encode_batch(batch)]
    return np.concatenate(tokens)
