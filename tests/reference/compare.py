"""Comparisons of whole training states: every element of every tensor, never a norm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tolerance = Callable[[str, Tensor], Tensor]
"""From an entry's key and true value to the largest error of each element."""

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
"""Below it a float has fewer digits than a relative tolerance asks for."""


class Snapshot:
    """A copy of weights and of an optimizer's `state_dict()`, flat: one entry per tensor or setting.

    Keys read `weight/NAME`, `state/PARAMETER/exp_avg`, `group/INDEX/lr`.
    """

    def __init__(self, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        self.entries: dict[str, Any] = {}
        self._add("weight", weights)
        for index, state in optimizer["state"].items():
            self._add(f"state/{index}", state)
        for index, group in enumerate(optimizer["param_groups"]):
            self._add(f"group/{index}", group)

    def _add(self, prefix: str, values: dict[str, Any]) -> None:
        self.entries.update({f"{prefix}/{key}": copy.deepcopy(value) for key, value in values.items()})


def assert_identical(ours: Snapshot, expected: Snapshot) -> None:
    """The same entries, equal bit for bit, with the same shapes, dtypes and devices.

    Raises:
        AssertionError: Names the first entry that differs, how many elements do and by how much.
    """
    _assert_same_keys(ours, expected)
    for key, value in expected.entries.items():
        _assert_equal(key, ours.entries[key], value)


def assert_close(ours: Snapshot, expected: Snapshot, tolerance: Tolerance) -> None:
    """The same entries; FP32 tensors within the tolerance, anything else (step counts, settings) equal.

    Raises:
        AssertionError: Names the first entry that differs, how many elements do and by how much.
    """
    _assert_same_keys(ours, expected)
    for key, value in expected.entries.items():
        if isinstance(value, Tensor) and value.dtype == torch.float32 and not key.endswith("/step"):
            _assert_elements(key, ours.entries[key], value, tolerance(key, value))
        else:
            _assert_equal(key, ours.entries[key], value)


def within_a_step(before: Snapshot, rtol: float) -> Tolerance:
    """`rtol` times the larger of the new and the old value of the same element.

    The new value of a weight or moment is a sum of the old one and an update. Where the two cancel, the
    rounding errors are as large as those of the old value. Entries that `before` lacks were zero.
    """

    def tolerance(key: str, expected: Tensor) -> Tensor:
        old = before.entries.get(key, torch.zeros_like(expected))
        return rtol * torch.maximum(expected.abs(), old.abs()) + SMALLEST_NORMAL

    return tolerance


def over_a_run(rtol: float) -> Tolerance:
    """`rtol` times the largest element of the tensor.

    Sums over elements carry the rounding error of the large ones over to the small ones, at every step.
    """
    return lambda key, expected: (rtol * expected.abs().max()).expand_as(expected)


def assert_same_losses(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """The same number of losses, equal bit for bit.

    Raises:
        AssertionError: Names the first batch whose loss differs.
    """
    assert len(ours) == len(expected), f"{len(ours)} losses, expected {len(expected)}"
    for index, (our_loss, loss) in enumerate(zip(ours, expected, strict=True)):
        _assert_equal(f"loss/{index}", our_loss, loss)


def _assert_same_keys(ours: Snapshot, expected: Snapshot) -> None:
    missing, unexpected = expected.entries.keys() - ours.entries, ours.entries.keys() - expected.entries
    assert not missing | unexpected, f"missing {sorted(missing)}, unexpected {sorted(unexpected)}"


def _assert_equal(key: str, ours: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        _assert_elements(key, ours, expected, torch.zeros_like(expected))
    else:
        assert ours == expected, f"{key}: {ours!r}, expected {expected!r}"


def _assert_elements(key: str, ours: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    for attribute in ("dtype", "shape", "device"):
        our_value, value = getattr(ours, attribute), getattr(expected, attribute)
        assert our_value == value, f"{key}: {attribute} {our_value}, expected {value}"
    error = (ours.double() - expected.double()).abs()
    wrong = ~(error <= tolerance.double())  # not `error > tolerance`, which NaN would pass
    assert not wrong.any(), (
        f"{key}: {int(wrong.sum())} of {wrong.numel()} elements differ, by up to {float(error.max()):.3e}, "
        f"first {float(ours[wrong][0])!r}, expected {float(expected[wrong][0])!r}"
    )
