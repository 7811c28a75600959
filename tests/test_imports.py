"""The layers, the one file that knows streams, the sizes of files and functions, and the public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_cpu_offload

ROOT = Path(__file__).resolve().parents[1]
NAME = "lightning_cpu_offload"
PACKAGE = ROOT / NAME
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS: list[set[str]] = [
    {"kernels"},
    {"offload"},
    {"namespaces", "archive", "atomic"},
    {"compare"},
    {"averages", "checkpoint", "precision", "hooks", "strategy", "ddp"},
    {"estimate"},
    {"callbacks"},
    {"__init__", "recipes"},
    {"cli"},
    {"__main__"},
]
"""Parts of the package from the ground up; a part imports from its own layer and those below it."""

WITHOUT_LIGHTNING = ("kernels", "offload")
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}


def module_name(path: Path, root: Path = PACKAGE) -> str:
    """`offload.plan` for offload/plan.py; `kernels` for kernels/__init__.py; `__init__` for the package's own."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def part(module: str) -> str:
    return module.partition(".")[0]


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that a source imports anywhere in it, in full; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = f"{NAME}.{module}".split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, base] if base else package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module of the package may not import."""
    ranks = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for name in imported(source, module, is_package):
        own, _, inner = name.partition(".")
        if own == NAME and inner and part(inner) in ranks and ranks[part(inner)] > ranks[part(module)]:
            wrong.append(name)
        if part(module) in WITHOUT_LIGHTNING and own in LIGHTNING:
            wrong.append(name)
        if part(module) == "kernels" and own == "torch":
            wrong.append(name)
    return wrong


def test_every_part_has_a_layer() -> None:
    assert {part(module_name(path)) for path in FILES} == {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_one_way(path: Path) -> None:
    assert wrong_imports(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.adamw", "import torch"),
        ("kernels.adamw", "from lightning_cpu_offload.offload import plan"),
        ("kernels.adamw", "def late():\n    from ..offload.plan import cut"),
        ("offload.plan", "from lightning_cpu_offload.strategy import CPUOffloadStrategy"),
        ("offload.plan", "from lightning_cpu_offload import strategy"),
        ("offload.plan", "from .. import namespaces"),
        ("offload.plan", "if TYPE_CHECKING:\n    import lightning.pytorch as pl"),
        ("offload.plan", "from pytorch_lightning import Trainer"),
        ("strategy", "from lightning_cpu_offload.cli import main"),
        ("callbacks", "import lightning_cpu_offload.recipes.gpt"),
    ],
)
def test_the_check_notices_an_import_upwards(module: str, source: str) -> None:
    assert wrong_imports(source, module)


def test_the_check_lets_imports_downwards_pass() -> None:
    source = "import torch\nfrom lightning_cpu_offload import kernels\nfrom ..kernels.threads import ThreadPool"
    assert wrong_imports(source, "offload.watch") == []
    assert wrong_imports("from .adamw import adamw", "kernels", is_package=True) == []


# --- in a fresh Python --------------------------------------------------------------------------------------------

PACKAGE_WITHOUT_INIT = f"""
import importlib, sys, types
package = types.ModuleType({NAME!r})  # its __init__ registers the strategy, for which it needs Lightning
package.__path__ = [{str(PACKAGE)!r}]
sys.modules[{NAME!r}] = package
"""


def modules_after(*names: str) -> set[str]:
    """The top-level modules that importing these modules of the package brings."""
    code = (
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", PACKAGE_WITHOUT_INIT + code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split())


def modules_of(folder: str) -> list[str]:
    return [f"{NAME}.{module_name(path)}" for path in FILES if part(module_name(path)) == folder]


def test_offload_brings_no_lightning() -> None:
    assert len(modules_of("offload")) >= 10
    brought = modules_after(*modules_of("offload"))
    assert "torch" in brought
    assert not brought & LIGHTNING


def test_kernels_bring_no_torch() -> None:
    brought = modules_after(*modules_of("kernels"))
    assert "numpy" in brought
    assert not brought & {"torch", *LIGHTNING}


def test_the_check_notices_what_is_brought() -> None:
    assert modules_after("lightning_utilities") & LIGHTNING


# --- one file knows streams ---------------------------------------------------------------------------------------

STREAM_NAMES = {
    *("Stream", "Event", "ExternalStream", "current_stream", "set_stream", "default_stream", "record_stream"),
    *(
        "wait_event",
        "wait_stream",
        "record_event",
        "cuda",
        "xpu",
        "synchronize",
        "non_blocking",
        "pin_memory",
        "is_pinned",
    ),
}
ALLOWED = {
    "offload/transfer.py": STREAM_NAMES - {"cuda", "xpu", "pin_memory", "is_pinned"},
    "offload/memory.py": {"pin_memory"},
    "offload/pipeline.py": {"synchronize"},  # of the engine
    "estimate/hardware.py": {"synchronize"},  # of the engine
    "callbacks/monitor.py": {"synchronize"},  # of the engine
    "offload/attach.py": {"pin_memory"},  # the user's setting
    "strategy.py": {"pin_memory"},  # likewise
    "ddp.py": {"pin_memory"},  # likewise
}


def stream_names(source: str) -> set[str]:
    """Attributes and keywords that have to do with streams, events, one vendor's devices or page-locking."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return found & STREAM_NAMES


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_streams_stand_in_transfer_only(path: Path) -> None:
    assert stream_names(path.read_text()) <= ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.Stream()",
        "torch.Event(device=device)",
        "from torch import Stream",
        "weights.to(device, non_blocking=True)",
        "gradient.record_stream(lane)",
        "module.cuda()",
    ],
)
def test_the_check_notices_streams(source: str) -> None:
    assert stream_names(source)


def test_nobody_asks_for_one_vendor() -> None:
    quoted = re.compile(r"""["'](cuda|xpu|hip|mps)["']""")
    assert quoted.search('device.type == "cuda"')
    for path in FILES:
        assert not quoted.search(path.read_text()), path


# --- sizes --------------------------------------------------------------------------------------------------------

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80


def long_functions(source: str) -> list[str]:
    """Names of the functions with more lines than the limit, docstrings included."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert long_functions(source) == []
    assert source.isascii()


def test_the_check_notices_a_long_function() -> None:
    assert long_functions("def long():\n" + "    pass\n" * MAX_FUNCTION_LINES) == ["long"]
    assert long_functions("def short():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)) == []


# --- public names -------------------------------------------------------------------------------------------------


def public_modules() -> list[Any]:
    return [importlib.import_module(NAME), importlib.import_module(f"{NAME}.kernels")]


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_public_names_exist_and_are_documented(module: Any) -> None:
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_names_others_rely_on() -> None:
    assert {"CPUOffloadPrecision", "CPUOffloadStrategy", "OffloadMonitor"} <= set(lightning_cpu_offload.__all__)
