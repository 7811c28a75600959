"""docs/compatibility.md and the tests it names agree: nothing is claimed that is not proven, or proven unsaid."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "compatibility.md"

LEAST = 100
"""Rows there must be."""

KNOWN = {f"P{number}" for number in range(1, 53)} | {f"B{number}" for number in range(1, 21)}
"""The places and behaviours that were collected before; each must be in the table."""

CHECKERS = ("test_table.py", "test_twin.py")
"""Test the tests, and prove no behaviour."""

NAMED = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a Markdown text, headings left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "behaviour" and not set("".join(row)) <= set("-: ")]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file as pytest writes them: `::test_x`, `::TestY::test_z`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            names.update(f"::{node.name}::{name}" for name in inner if name.startswith("test_"))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.add(f"::{node.name}")
    return frozenset(names)


def compat_tests(root: Path) -> Iterable[tuple[str, str]]:
    """File and name of every test that must be in the table."""
    for path in sorted((root / "tests" / "compat").glob("test_*.py")):
        if path.name not in CHECKERS:
            names = [name for name in names_in(path) if not name.endswith("_can_fail")]  # they prove a checker, too
            yield from ((f"tests/compat/{path.name}", name) for name in sorted(names))


def problems(text: str, root: Path = ROOT, known: Iterable[str] = KNOWN, least: int = LEAST) -> list[str]:
    """What is wrong with the table, one sentence each; none if it agrees with the tests.

    Args:
        text: The Markdown text with the table.
        root: The folder that holds `tests`.
        known: Labels of which each must be in a row.
        least: Rows there must be.
    """
    found, named, labels = [], set(), set()
    table = rows(text)
    for row in table:
        if len(row) != 4:
            found.append(f"{len(row)} cells instead of 4: {row[0]}")
            continue
        behaviour, source, ends, test = row
        labels.update(re.findall(r"\b[PB]\d+\b", source))
        if ends not in ("works", "refused"):
            found.append(f"ends in {ends!r} instead of 'works' or 'refused': {behaviour}")
        proofs = NAMED.findall(test)
        if not proofs:
            found.append(f"names no test: {behaviour}")
        for file, name in proofs:
            named.add((file, name))
            if not (root / file).is_file() or name not in names_in(root / file):
                found.append(f"{file}{name} is no test: {behaviour}")
    found += [f"no row names {file}{name}" for file, name in compat_tests(root) if (file, name) not in named]
    found += [f"no row is from {label}" for label in sorted(set(known) - labels)]
    found += [f"{count} rows say: {text}" for text, count in Counter(row[0] for row in table).items() if count > 1]
    if len(table) < least:
        found.append(f"{len(table)} rows, at least {least} are wanted")
    return found


def test_table_and_tests_agree() -> None:
    assert problems(TABLE.read_text(encoding="utf-8")) == []


ROW = "| Weights are kept | P1, B2 | works | `tests/compat/test_a.py::test_one` |"
OTHER = "| Groups are kept | P2 | refused | `tests/compat/test_a.py::TestB::test_two` `tests/test_c.py::test_three` |"
GOOD = f"# Table\n\n| behaviour | from | ends | test |\n|---|---|---|---|\n{ROW}\n{OTHER}\n"

SPOILED = [
    (GOOD.replace("::test_one", "::test_none"), "test_none is no test"),
    (GOOD.replace("::test_one", "::helper"), "helper is no test"),
    (GOOD.replace("test_a.py::test_one", "test_b.py::test_one"), "test_b.py::test_one is no test"),
    (GOOD.replace("::TestB::test_two", "::test_two"), "::test_two is no test"),
    (GOOD.replace(ROW, ""), "no row names tests/compat/test_a.py::test_one"),
    (GOOD.replace("P1, B2", "B2"), "no row is from P1"),
    (GOOD.replace("P1, B2", "P12, B2"), "no row is from P1"),
    (GOOD.replace("| refused |", "| maybe |"), "ends in 'maybe'"),
    (GOOD.replace("`tests/compat/test_a.py::test_one`", "proven by hand"), "names no test: Weights are kept"),
    (GOOD.replace("| works |", ""), "cells instead of 4"),
    (GOOD.replace("Groups are kept", "Weights are kept"), "2 rows say: Weights are kept"),
    (GOOD.replace(OTHER, ""), "1 rows, at least 2"),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "compat").mkdir(parents=True)
    one, two = "def test_one(): ...\ndef helper(): ...\n", "class TestB:\n    def test_two(self): ...\n"
    (tmp_path / "tests" / "compat" / "test_a.py").write_text(one + two)
    (tmp_path / "tests" / "test_c.py").write_text("def test_three(): ...\n")
    return tmp_path


def test_a_good_table_has_no_problems(project: Path) -> None:
    assert problems(GOOD, project, ["P1", "P2", "B2"], 2) == []


@pytest.mark.parametrize(("text", "complaint"), SPOILED, ids=[complaint for _, complaint in SPOILED])
def test_each_fault_of_a_table_is_found(project: Path, text: str, complaint: str) -> None:
    assert text != GOOD
    assert any(complaint in problem for problem in problems(text, project, ["P1", "P2", "B2"], 2))


def test_labels_are_all_there() -> None:
    assert len(KNOWN) == 52 + 20
