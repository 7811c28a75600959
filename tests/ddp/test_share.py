"""What a rank holds on its host: its part, and nothing of the others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddp.driver import launch

RANKS = 2
LAST_PAGES = 4 << 20
"""Chunks begin and end within pages, and the system may take up to one large page for each end."""


@pytest.mark.slow
@pytest.mark.parametrize(("state_dtype", "bytes_per_parameter"), [("float32", 12), ("float8", 6 + 1 / 32)])
def test_a_rank_holds_its_part(state_dtype: str, bytes_per_parameter: float, tmp_path: Path) -> None:
    ranks = launch(tmp_path, "memory", {"state_dtype": state_dtype}, ranks=RANKS)
    for rank in ranks:
        counted = rank["counted"]["masters"] + rank["counted"]["moments"]
        whole = bytes_per_parameter * rank["parameters"]
        assert rank["parameters"] == 20_000_000
        assert counted == pytest.approx(whole / RANKS, rel=0.02)  # whole chunks, of 1/32 of the model
        assert counted <= rank["resident"] <= counted + LAST_PAGES
        # After fit the masters are the module's own weights, and the checkpoint has left no moments of others behind.
        others_masters = 4 * rank["parameters"] - rank["counted"]["masters"]
        assert rank["after"] <= rank["resident"] + others_masters + LAST_PAGES
        assert rank["weights"] == ranks[0]["weights"]
        assert all(weight < 1 for weight in rank["weights"])
