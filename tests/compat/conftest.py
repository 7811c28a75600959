"""What the tests of this folder share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest


@pytest.fixture(scope="package", autouse=True)
def _entry_points_read_once() -> Iterator[None]:
    """Every Trainer asks all installed packages for callbacks, which takes a fifth of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.fabric.utilities.registry.entry_points", functools.cache(entry_points))
        yield


QUICK = ("test_table.py", "test_twin.py")
"""The rest of this folder is many small runs: for the full test run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what belongs to the full test run only."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
