"""Two machines with a network between them: training agrees, one that is lost ends the other, training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ddp.nodes import NODES, launch_nodes, refusal
from tests.ddp.programs import Run
from tests.ddp.test_training import assert_as_reference
from tests.reference import Case, assert_identical

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(refusal()), reason=f"network namespaces are not allowed here: {refusal()}"),
]

RUN = Run(Case("plain", "32-true", 1, "none", "adamw"))

TCP = 0.07
"""66 bytes of headers for each 1448, or for as much as 64 KiB, and for each acknowledgement of two segments or more."""


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[str]]:
    """A run whose second machine was lost: its folder, exit statuses and logs."""
    folder = tmp_path_factory.mktemp("lost")
    found, statuses, printed = launch_nodes(folder, "loses_a_node", RUN)
    assert found == [None, None]
    return folder, statuses, printed


@pytest.fixture(scope="module")
def ranks(lost: tuple[Path, list[int], list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of a run that went on."""
    found, statuses, printed = launch_nodes(tmp_path_factory.mktemp("on"), "goes_on", (RUN, lost[0] / "kept.ckpt"))
    assert statuses == [0, 0], printed
    return found


def test_two_machines_train_as_the_reference(ranks: list[dict[str, Any]]) -> None:
    assert_as_reference([rank["whole"] for rank in ranks], RUN)


def test_a_lost_machine_ends_the_other(lost: tuple[Path, list[int], list[str]]) -> None:
    _, statuses, printed = lost
    assert len(statuses) == NODES
    assert all(statuses)
    assert "rank 0 of 2 ends by RuntimeError" in printed[0]
    assert "Resume from the last checkpoint" in printed[0]


def test_training_goes_on_exactly_from_the_last_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        steps = rank["whole"]["trail"]
        assert_identical(rank["resumed"]["begin"], steps[len(steps) // 2 - 1])
        assert_identical(rank["resumed"]["end"], steps[-1])


def test_bytes_on_the_network_are_those_of_the_formula(ranks: list[dict[str, Any]]) -> None:
    """In BF16, times (N - 1) / N: 2 * 2 to sum up gradients on all ranks, and 2 to send weights from their owners."""
    share = (NODES - 1) / NODES
    for name, expected in (("ours", 6 * share), ("ddp", 4 * share)):
        mean = sum(rank["sent"][name] for rank in ranks) / NODES
        assert expected <= mean <= expected * (1 + TCP), name
