import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_cpu_offload.recipes import TextDataModule, corpus
from lightning_cpu_offload.recipes.corpus import (
    END_OF_DOCUMENT,
    Recipe,
    load_corpus,
    read_documents,
    split_documents,
)
from tests.recipes import Make, folder, make, ready, text_of

__all__ = ["folder", "make"]  # fixtures


def texts(data: TextDataModule) -> tuple[str, str]:
    """What the two token files say."""
    train, validation = (np.load(path).tolist() for path in (data.corpus.train, data.corpus.validation))
    return data.decode(train), data.decode(validation)


def entries(data: TextDataModule) -> list[str]:
    return sorted(os.listdir(data.cache_dir))


# What is read


def test_folder_is_read_in_order_of_names(folder: Path) -> None:
    names = list(read_documents(folder))
    assert names == sorted([*(f"{i}.txt" for i in range(10)), "copy_of_3.txt", "deeper/a.md"])
    assert read_documents(folder)["3.txt"] == text_of(3, 81) + END_OF_DOCUMENT  # newlines untouched


def test_only_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin1.txt").write_bytes("h\u00f4te".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(b"PK\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    assert read_documents(tmp_path) == {"good.txt": "text" + END_OF_DOCUMENT}


def test_standard_library_without_its_tests() -> None:
    documents = read_documents(None)
    assert "json/decoder.py" in documents
    assert len(documents) > 300
    assert sum(map(len, documents.values())) > 4e6
    folders = {part for name in documents for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}


# How it is split


def test_split_shares_no_document(make: Make, folder: Path) -> None:
    train, validation = (set(text.split(END_OF_DOCUMENT)) - {""} for text in texts(ready(make())))
    assert not train & validation
    assert train | validation == {file.read_bytes().decode() for file in folder.rglob("*.*")}
    part = sum(map(len, validation)) / sum(map(len, train | validation))
    assert 0.15 < part <= 0.3  # filled with whole documents, none larger than 0.15 of the text


def test_equal_documents_stay_together_whatever_the_seed() -> None:
    documents = [text_of(i % 7, 40) for i in range(21)]
    sides = [split_documents(documents, 0.4, seed) for seed in range(20)]
    for train, validation in sides:
        assert sorted(train + validation) == sorted(set(documents))
    assert len({frozenset(validation) for _, validation in sides}) > 5  # the seed does choose


def test_validation_is_never_empty() -> None:
    train, validation = split_documents(["a" * 100, "b" * 90, "c" * 80], 0.01, 0)
    assert (train, validation) == (["a" * 100, "b" * 90], ["c" * 80])


def test_single_file_is_cut_in_two(make: Make, folder: Path) -> None:
    file = folder / "9.txt"
    train, validation = texts(ready(make(path=str(file))))
    assert train + validation == file.read_bytes().decode() + END_OF_DOCUMENT
    assert len(validation) / len(train + validation) == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_same_options_give_the_same_tokens(make: Make, tmp_path: Path, tokenizer: str) -> None:
    once, again = (ready(make(tokenizer=tokenizer, cache_dir=str(tmp_path / name))) for name in ("a", "b"))
    for name in ("train", "validation"):
        first, second = (Path(getattr(data.corpus, name)) for data in (once, again))
        assert first != second
        assert first.read_bytes() == second.read_bytes()
    assert texts(once) != texts(ready(make(tokenizer=tokenizer, seed=1)))


# Cache


def test_cache_is_used_again(make: Make) -> None:
    data = ready(make())
    stamp = data.corpus.train.stat().st_mtime_ns
    again = ready(make(context_length=4, batch_size=7))  # neither is a property of the tokens
    assert again.corpus.train == data.corpus.train
    assert again.corpus.train.stat().st_mtime_ns == stamp
    assert len(entries(data)) == 1


@pytest.mark.parametrize("changes", [{"seed": 1}, {"val_fraction": 0.4}, {"tokenizer": "bpe"}])
def test_other_options_get_another_entry(make: Make, changes: dict[str, Any]) -> None:
    data, other = ready(make()), ready(make(**changes))
    assert data.corpus.train != other.corpus.train
    assert len(entries(data)) == 2


@pytest.mark.parametrize("change", ["content", "name", "new file"])
def test_changed_text_gets_another_entry(make: Make, folder: Path, change: str) -> None:
    before = ready(make()).corpus.train
    if change == "content":
        text = (folder / "0.txt").read_bytes()
        (folder / "0.txt").write_bytes(text.swapcase())  # as long as before
    elif change == "name":
        (folder / "0.txt").rename(folder / "z.txt")
    else:
        (folder / "new.txt").write_text("one more")
    assert ready(make()).corpus.train != before


def test_builders_that_race_leave_one_whole_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, build = threading.Barrier(3), corpus._build

    def build_and_meet(*arguments: Any) -> None:
        build(*arguments)
        barrier.wait(timeout=60)  # nobody publishes before all have built

    monkeypatch.setattr(corpus, "_build", build_and_meet)
    with ThreadPoolExecutor(3) as pool:
        recipe = Recipe("bpe", 300, 0.3, 0)
        results = list(pool.map(lambda _: load_corpus(folder, recipe, tmp_path / "cache"), range(3)))
    (entry,) = (tmp_path / "cache").iterdir()
    assert sorted(os.listdir(entry)) == ["tokenizer.json", "train.npy", "validation.npy"]
    assert {result.train for result in results} == {entry / "train.npy"}


def test_failed_build_leaves_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    data = make()
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="No space left"):
            ready(data)
    assert entries(data) == []
    assert len(entries(ready(data))) == 1


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TextDataModule().cache_dir == tmp_path / "lightning-cpu-offload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert TextDataModule().cache_dir == Path.home() / ".cache" / "lightning-cpu-offload"


# Tokenizers


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_text_survives_the_round_trip(make: Make, tokenizer: str) -> None:
    data = make(tokenizer=tokenizer)
    unseen = "def f(x):\n\treturn '\u00e9\u6f22\U0001f600' * 2  \r\n\n" + text_of(5, 100) + END_OF_DOCUMENT
    ids = data.encode(unseen)
    assert data.decode(ids) == unseen
    assert 0 <= min(ids) <= max(ids) < data.vocab_size


def test_bytes_are_utf8(make: Make) -> None:
    data = make()
    assert data.vocab_size == 256
    assert data.encode("h\u00f4") == [104, 195, 180]
    assert data.decode([104, 195]) == "h\ufffd"
    assert data.decode([104, 300, 105]) == "hi"


def test_bpe_learns_from_the_training_part_alone(make: Make, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "long.txt").write_text("aaaa bbbb " * 200)
    (tmp_path / "two" / "short.txt").write_text("qzqzqzqz " * 30)
    data = make(path=str(tmp_path / "two"), tokenizer="bpe", vocab_size=300, val_fraction=0.2)
    assert "qz" in texts(data)[1]
    assert len(data.encode("qzqz")) == 4  # no merge was learned from the validation text
    assert len(data.encode("aaaa")) == 1


def test_bpe_shortens_and_keeps_to_its_size(make: Make) -> None:
    data = ready(make(tokenizer="bpe", vocab_size=290))
    train, _ = texts(data)
    tokens = np.load(data.corpus.train)
    assert data.vocab_size == 290
    assert tokens.max() < 290
    assert len(tokens) < len(train.encode()) / 2


def test_ids_above_65535_take_uint32(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    assert np.load(ready(make()).corpus.train).dtype == np.uint16
    monkeypatch.setattr("lightning_cpu_offload.recipes.tokenizer.ByteTokenizer.vocab_size", 65537)
    assert np.load(ready(make(seed=1)).corpus.train).dtype == np.uint32


def test_pieces_do_not_change_the_text(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    expected = texts(ready(make(tokenizer="bpe")))
    monkeypatch.setattr("lightning_cpu_offload.recipes.corpus.PIECE_CHARACTERS", 5)
    monkeypatch.setattr("lightning_cpu_offload.recipes.corpus.PIECES_AT_ONCE", 3)
    assert texts(ready(make(tokenizer="bpe", cache_dir=str(make().cache_dir / "other")))) == expected
