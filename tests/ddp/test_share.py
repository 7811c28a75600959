"""What a rank holds on its host: its part, and nothing of the others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddp.driver import launch

LAST_PAGES = 4 << 20
"""Chunks begin and end within pages, and the system may take up to one large page for each end."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "state_dtype", "bytes_per_parameter"),
    [(2, "float8", 6 + 1 / 32), (2, "float32", 12), (4, "float32", 12)],
)
def test_a_rank_holds_its_part(number: int, state_dtype: str, bytes_per_parameter: float, tmp_path: Path) -> None:
    ranks = launch(tmp_path, "memory", {"state_dtype": state_dtype}, ranks=number)
    for rank in ranks:
        counted = rank["counted"]["masters"] + rank["counted"]["moments"]
        whole = bytes_per_parameter * rank["parameters"]
        assert rank["parameters"] == 20_000_000
        assert counted == pytest.approx(whole / number, rel=0.02)  # whole chunks, of 1/32 of the model
        assert rank["counted"]["ring"] <= 4 * (8 << 20)
        assert counted <= rank["resident"] <= counted + LAST_PAGES
        # After fit the masters are the module's own weights, and the checkpoint has left no moments of others behind.
        others_masters = 4 * rank["parameters"] - rank["counted"]["masters"]
        assert rank["after"] <= rank["resident"] + others_masters + LAST_PAGES
        assert rank["weights"] == ranks[0]["weights"]
        assert all(weight < 1 for weight in rank["weights"])
