"""What one training run is made of, and how few runs meet every pair of choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

CLIP_VALUES = {"none": None, "norm": 0.2, "value": 0.01}
"""Limits low enough that most steps of the test networks are clipped."""

EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """One training run, by names.

    Attributes:
        structure: Key of `models.STRUCTURES`.
        precision: "32-true", "bf16-mixed" or "bf16-true".
        accumulate: Batches per optimizer step.
        clip: "none", "norm" or "value".
        optimizer: Key of `models.OPTIMIZERS`.
    """

    structure: str = "plain"
    precision: str = "bf16-mixed"
    accumulate: int = 2
    clip: str = "norm"
    optimizer: str = "sgd"

    @property
    def num_batches(self) -> int:
        """Batches of one epoch: the last window is short, unless windows are single batches."""
        return 18 if self.accumulate == 16 else 5

    @property
    def clip_value(self) -> float | None:
        """Largest norm or element of the gradients, None without a limit."""
        return CLIP_VALUES[self.clip]

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return "-".join(str(value) for value in values)


def all_cases(**choices: Sequence[Any]) -> list[Case]:
    """The product of the choices for each field of `Case`."""
    return [Case(**dict(zip(choices, values, strict=True))) for values in product(*choices.values())]


def pairwise(**choices: Sequence[Any]) -> set[Case]:
    """A small part of `all_cases`, always the same, in which any choices for two fields meet; greedy."""
    candidates = all_cases(**choices)
    uncovered = {pair for case in candidates for pair in _pairs(case, choices)}
    chosen = set()
    while uncovered:
        best = max(candidates, key=lambda case: len(uncovered & _pairs(case, choices)))
        uncovered -= _pairs(best, choices)
        chosen.add(best)
    return chosen


def _pairs(case: Case, choices: Mapping[str, Sequence[Any]]) -> set[tuple[Any, ...]]:
    named = [(name, getattr(case, name)) for name in choices]
    return set(combinations(named, 2))
