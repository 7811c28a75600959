"""The module most of these tests train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.twin import RUN_RTOL
from tests.net import Net, adamw, sgd

BOTH = pytest.mark.parametrize(("optimizer", "rtol"), [(sgd, 0.0), (adamw, RUN_RTOL)], ids=["SGD", "AdamW"])
"""An optimizer that runs its own step, and one that the kernel steps; a run of the latter drifts by last bits."""


class Noted(Net):
    """Keeps, in `notes`, what it saw.

    It lacks the bias before the batch norm: its true gradient is zero, and what rounding leaves of it Adam makes large.
    """

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, manual: bool = False) -> None:
        super().__init__(optimizer, manual)
        self.inner.register_parameter("bias", None)
        self.notes: list[Any] = []

    def look(self, name: str) -> None:
        """Write down all gradients."""
        self.notes.append((name, {key: copy.deepcopy(p.grad) for key, p in self.named_parameters()}))
