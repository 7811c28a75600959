"""Names, commands, files and pictures in the documentation exist: it says the same as the code."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_cpu_offload
from lightning_cpu_offload.archive import BadCheckpointError
from lightning_cpu_offload.callbacks import count_items, draw_step, draw_timeline, write_trace
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from tests.conftest import ROOT
from tests.test_project import parses, targets, unknown_targets

DOCS = ROOT / "docs"
HISTORY = ("log.md", "decisions.md")
"""Say what was, and may name what is gone."""
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
NAMES = {name: getattr(lightning_cpu_offload, name) for name in lightning_cpu_offload.__all__}
NAMES |= {f.__name__: f for f in (count_items, draw_step, draw_timeline, write_trace)}
NAMES |= {cls.__name__: cls for cls in (BadCheckpointError, StreamingCheckpointIO)}
PATHS = re.compile(r"^(configs|tests|docs|benchmarks|notebooks)/[\w./*-]+$|^test_\w+\.py$")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans(text: str) -> list[str]:
    """What stands in backticks within lines; blocks are left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def wrong_calls(text: str) -> list[str]:
    """Keyword arguments of our own classes and functions that they do not take."""
    wrong = []
    for name, arguments in re.findall(r"\b(\w+)\(((?:[^()]|\([^()]*\))*)\)", text):
        if name in NAMES:
            given = set(re.findall(r"(?:^|[\s,(])(\w+)=", arguments))
            wrong += [f"{name}({argument}=)" for argument in given - parameters(NAMES[name])]
    return wrong


def wrong_paths(found: list[str]) -> list[str]:
    """Names of files that are not there, and of tests that are not in their file."""
    wrong = []
    for span in found:
        path, _, names = span.partition("::")
        if not PATHS.match(path):
            continue
        folders = [ROOT] if "/" in path else [ROOT / "tests", ROOT / "tests" / "compat"]
        files = [file for folder in folders for file in folder.glob(path)]
        known = "".join(read(file) for file in files if file.is_file())
        missing = [name for name in names.split("::") if name and f" {name.partition('[')[0]}(" not in f"{known} "]
        missing = [name for name in missing if not re.search(rf"^class {name}\b", known, re.MULTILINE)]
        if not files or missing:
            wrong.append(span)
    return wrong


def wrong_attributes(found: list[str]) -> list[str]:
    """Dotted names below the package that cannot be found."""
    wrong = []
    for span in found:
        if not re.fullmatch(r"lightning_cpu_offload(\.\w+)+", span):
            continue
        module, _, name = span.rpartition(".")
        try:
            importlib.import_module(span)
        except ImportError:
            if not hasattr(importlib.import_module(module), name):
                wrong.append(span)
    return wrong


def wrong_links(page: Path) -> list[str]:
    """Relative links and pictures that lead nowhere."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", read(page))
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def identify(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=identify)
class TestPage:
    def test_calls_take_the_arguments_given(self, page: Path) -> None:
        assert wrong_calls(read(page)) == []

    def test_files_and_tests_named_exist(self, page: Path) -> None:
        if page.name not in HISTORY:
            assert wrong_paths(spans(read(page))) == []

    def test_names_of_the_package_exist(self, page: Path) -> None:
        assert wrong_attributes([*spans(read(page)), *re.findall(r"class_path: (\S+)", read(page))]) == []

    def test_links_lead_somewhere(self, page: Path) -> None:
        assert wrong_links(page) == []

    def test_make_targets_exist(self, page: Path) -> None:
        commands = [span for span in spans(read(page)) if span.startswith("make ")]
        assert {target for command in commands for target in unknown_targets(command)} == set()

    def test_is_ascii(self, page: Path) -> None:
        assert read(page).isascii()


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_commands_parse(page: Path, root: Path) -> None:
    lines = [line for block in blocks(read(page), "bash") for line in block.replace("\\\n", " ").splitlines()]
    for command in [*lines, *spans(read(page))]:
        words = shlex.split(command, comments=True) if command.startswith("python -m lightning_cpu_offload ") else []
        if not words or "ANY" in command or "FILE" in command:
            continue
        if words[3] == "doctor":
            assert len(words) == 4
        elif words[3] != "estimate":
            assert parses(command), command
        else:
            assert wrong_estimate(words[4:]) == [], command


def wrong_estimate(words: list[str]) -> list[str]:
    """Words of an `estimate` command that it does not take; nothing is estimated."""
    source = inspect.getsource(importlib.import_module("lightning_cpu_offload.cli"))
    known = {*re.findall(r'add_argument\("--(\w+)"', source), "config", "model", "data", "trainer"}
    options = [word[2:].partition("=")[0].partition(".")[0] for word in words if word.startswith("--")]
    return [option for option in options if option not in known]


class TestApiPage:
    """The tables have exactly the arguments there are, with their defaults."""

    @pytest.mark.parametrize("name", ["CPUOffloadStrategy", "CPUOffloadDDPStrategy", "OffloadMonitor", "estimate"])
    def test_has_every_argument(self, name: str) -> None:
        section = read(DOCS / "api.md").partition(f"### `{name}`\n")[2].partition("\n#")[0]
        documented: dict[str, str] = {}
        for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, re.MULTILINE):
            arguments, values = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", defaults)
            values = values if len(values) == len(arguments) else values * len(arguments)
            documented.update(dict(zip(arguments, values or [""] * len(arguments), strict=True)))
        actual = {p.name: p.default for p in inspect.signature(NAMES[name]).parameters.values()}
        assert documented.keys() == actual.keys()
        for argument, default in actual.items():
            shown = documented[argument]
            assert shown == ("" if default is inspect.Parameter.empty else repr(default).replace("'", '"')), argument

    def test_has_every_public_name(self) -> None:
        table = read(DOCS / "api.md").partition("## `lightning_cpu_offload`")[2].partition("###")[0]
        assert set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == set(lightning_cpu_offload.__all__)


def test_timeline_page_explains_every_scalar_a_run_shows() -> None:
    from lightning_cpu_offload.callbacks.tensorboard import custom_layout

    tags = [tag for chart in custom_layout()["cpu_offload"].values() for tag in chart[1] if tag.startswith("offload/")]
    page = read(DOCS / "timeline.md") + (inspect.getdoc(lightning_cpu_offload.OffloadMonitor) or "")
    for tag in tags:
        name = tag.removeprefix("offload/").rstrip("$").removesuffix("/.*")
        assert name in page, name


class TestSite:
    CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(self) -> set[str]:
        return set(re.findall(r"[\w.-]+\.md", str(self.CONFIG["nav"])))

    def test_nav_has_every_page(self) -> None:
        excluded = {path.name for rule in self.CONFIG["exclude_docs"].split() for path in DOCS.glob(rule)}
        assert self.pages() == {path.name for path in DOCS.glob("*.md")} - excluded

    def test_make_builds_it(self) -> None:
        assert "docs" in targets()


class TestCheckers:
    """Each of them can fail."""

    def test_of_calls(self) -> None:
        assert wrong_calls("`CPUOffloadStrategy(gradient=1, update='exact')`") == ["CPUOffloadStrategy(gradient=)"]
        assert wrong_calls("OffloadMonitor(\n    every=3)") == ["OffloadMonitor(every=)"]

    def test_of_paths(self) -> None:
        assert wrong_paths(["configs/gpt_smal.yaml", "tests/test_docs.py::test_nothing"]) == [
            "configs/gpt_smal.yaml",
            "tests/test_docs.py::test_nothing",
        ]
        good = ["configs/gpt_small.yaml", "tests/test_docs.py::test_commands_parse", "test_docs.py::TestSite"]
        assert wrong_paths([*good, "any other words"]) == []

    def test_of_attributes(self) -> None:
        assert wrong_attributes(["lightning_cpu_offload.estimat"]) == ["lightning_cpu_offload.estimat"]
        assert wrong_attributes(["lightning_cpu_offload.recipes.GPT", "lightning_cpu_offload.callbacks"]) == []

    def test_of_links(self, tmp_path: Path) -> None:
        (tmp_path / "page.md").write_text("[a](https://a.b) [b](gone.md) ![c](page.md#top)")
        assert wrong_links(tmp_path / "page.md") == ["gone.md"]

    def test_of_estimates(self) -> None:
        assert wrong_estimate(["--config", "x", "--vrm", "1", "--model.num_layers=3"]) == ["vrm"]

    def test_of_spans(self) -> None:
        assert spans("a `b` c\n```\nnot `this`\n```\n`d`") == ["b", "d"]
