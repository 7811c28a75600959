"""One optimizer step at a time: a last-bit difference must not grow before it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .compare import Snapshot, assert_close, within_a_step
from .loop import ReferenceLoop


def follow(loop: ReferenceLoop, batches: Sequence[Any], epochs: int, trail: Sequence[Snapshot], rtol: float) -> None:
    """Trains `loop` beside a recorded run: compares after every step, then goes on from the recorded state.

    Args:
        loop: The reference, untrained.
        batches: What the recorded run was trained on, `epochs` times.
        epochs: Passes over `batches`.
        trail: The recorded state after each of its optimizer steps.
        rtol: Relative tolerance of a single step, see `within_a_step`.

    Raises:
        AssertionError: At the first step that differs, or if the numbers of steps do.
    """
    steps = [loop.snapshot()]

    def compare_and_adopt() -> None:
        assert len(steps) <= len(trail), f"{len(trail)} steps recorded, the reference takes more"
        ours = trail[len(steps) - 1]
        assert_close(ours, loop.snapshot(), within_a_step(steps[-1], rtol))
        loop.adopt(ours)
        steps.append(ours)

    loop.fit(batches, epochs, after_step=compare_and_adopt)
    assert len(steps) - 1 == len(trail), f"{len(trail)} steps recorded, the reference takes {len(steps) - 1}"
