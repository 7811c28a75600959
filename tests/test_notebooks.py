"""The notebooks are committed as they run, and run as they are committed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
SECONDS = 600
"""For a whole notebook; each takes under 3 minutes on two cores with nothing else to do."""

LOCAL_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|usr|work|Users|opt|mnt)/|\b[A-Z]:\\\\|site-packages")


def load(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def texts(book: Any) -> list[str]:
    """Everything a reader sees but pictures."""
    found = []
    for cell in book.cells:
        found.append(cell.source)
        for output in cell.get("outputs", []):
            found.append(output.get("text", ""))
            found.append(output.get("data", {}).get("text/plain", ""))
    return found


def faults(book: Any) -> list[str]:
    """What a committed notebook must not have."""
    wrong = []
    cells = code(book)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        wrong.append("not executed from top to bottom")
    outputs = [output for cell in cells for output in cell.outputs]
    if any(output.output_type == "error" for output in outputs):
        wrong.append("an error")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        wrong.append("no picture")
    if any(output.get("name") == "stderr" for output in outputs):
        wrong.append("something on stderr")
    if any(LOCAL_PATH.search(text) for text in texts(book)):
        wrong.append("a path of the machine it ran on")
    return wrong


def execute(book: Any, folder: Path) -> None:
    """Run all cells in the order they are in, in a kernel whose current folder is `folder`.

    Raises:
        CellExecutionError: A cell failed.
    """
    client = NotebookClient(
        book,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"})


def test_there_are_four() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEach:
    def test_is_committed_with_clean_outputs(self, path: Path) -> None:
        assert faults(load(path)) == []

    def test_is_small_and_valid(self, path: Path) -> None:
        assert path.stat().st_size <= MAX_BYTES
        nbformat.validate(load(path))

    def test_begins_with_a_title_and_links_lead_somewhere(self, path: Path) -> None:
        book = load(path)
        assert book.cells[0].cell_type == "markdown"
        assert book.cells[0].source.startswith("# ")
        links = [link for cell in book.cells for link in re.findall(r"\]\(([^)]+)\)", cell.source)]
        for link in links:
            assert "://" in link or (path.parent / link).exists(), link

    @pytest.mark.slow
    def test_runs(self, path: Path, tmp_path: Path) -> None:
        book = load(path)
        for cell in code(book):
            cell.outputs, cell.execution_count = [], None
        execute(book, tmp_path)
        assert not any(output.output_type == "error" for cell in code(book) for output in cell.outputs)


@pytest.mark.slow
def test_a_notebook_that_fails_is_noticed(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(book, tmp_path)


def test_the_check_of_outputs_can_fail() -> None:
    cell = nbformat.v4.new_code_cell("1", execution_count=2)
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="see /tmp/somewhere/file"),
        nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[]),
    ]
    assert len(faults(nbformat.v4.new_notebook(cells=[cell]))) == 5
