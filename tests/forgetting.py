"""Leaves out one wait of the package at a time, wherever it stands, and tells what notices."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import lightning_cpu_offload
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.gradients import GradientStream
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.pipeline import Pipeline
from tests.engines import DeferredEngine, Schedule
from tests.programs import Program, Train, expected, same_bits, simulated

PACKAGE = Path(lightning_cpu_offload.__file__).parent

LANES = ["record", "wait", "host_wait", "finish", "synchronize"]
"""Methods of the engine that order something."""

GUARDS: dict[type, list[str]] = {
    Pipeline: [
        "arrive",
        "depart",
        "arrive_all",
        "land",
        "before_backward",
        "catch_up",
        "wait_for_device",
        "await_decision",
    ],
    Host: ["land", "before_backward", "depart"],
    Attachment: ["land", "before_backward"],
    GradientStream: ["finish"],
}
"""Methods by which the rest of the package waits."""

FILES = ["pipeline", "gradients", "gate", "host", "hooked", "kernel_step", "body_step", "attach", "masters", "writes"]


@dataclass(frozen=True)
class Site:
    """A line that waits.

    Attributes:
        file: Name of the file, without its ending.
        line: Its number.
    """

    file: str
    line: int

    def __str__(self) -> str:
        path = PACKAGE / "offload" / f"{self.file}.py"
        return f"{self.file}.{_function(path, self.line)}: {linecache.getline(str(path), self.line).strip()}"


@dataclass(frozen=True)
class Scenario:
    """A training, how it is run and when queued work runs."""

    train: Train
    program: Program
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.train.__name__} {self.program} {self.schedule}"

    def notices(self, site: Site | None, passed: set[Site] | None = None) -> str:
        """How the training shows that the wait at `site` is left out; empty if it does not."""
        engine = simulated(self.schedule, ordered=self.schedule != "eager")
        with without(site, engine, passed):
            try:
                ours = self.train(self.program, engine)
            except Exception as error:
                return f"{type(error).__name__}"
        if engine.races:
            return engine.races[0]
        return "" if same_bits(ours, expected(self.train, self.program)) else "numbers"


def all_sites() -> list[Site]:
    """Every line of the package that calls one of the methods above."""
    names = {*LANES, *(name for methods in GUARDS.values() for name in methods), "_land"}
    found = {}
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / "offload" / f"{file}.py").read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                found[Site(file, node.lineno)] = None
    return sorted(found, key=lambda site: (FILES.index(site.file), site.line))


@contextmanager
def without(site: Site | None, engine: DeferredEngine, passed: set[Site] | None = None) -> Iterator[None]:
    """In here the calls at `site` do nothing; the sites that call are added to `passed`."""

    def patch(owner: Any, name: str) -> Any:
        method = getattr(owner, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            here = Site(Path(frame.f_code.co_filename).stem, frame.f_lineno)
            if passed is not None:
                passed.add(here)
            return None if here == site else method(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    patches = [patch(engine, name) for name in LANES]
    patches += [patch(owner, name) for owner, names in GUARDS.items() for name in names]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def passing(scenarios: Sequence[Scenario]) -> dict[Site, list[Scenario]]:
    """Which scenarios pass which sites, all waits in place."""
    result: dict[Site, list[Scenario]] = {}
    for scenario in scenarios:
        passed: set[Site] = set()
        assert scenario.notices(None, passed) == "", f"{scenario} is noticed with every wait in place"
        for site in passed:
            result.setdefault(site, []).append(scenario)
    return result


def _function(path: Path, line: int) -> str:
    """Name of the innermost function around a line."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name if around else ""
