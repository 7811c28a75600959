"""Cutting parameters into chunks, against a reference that names every element."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_cpu_offload.offload.plan import Chunk, Piece, cut, offsets

Element = tuple[int, int]
"""Index of a parameter and of an element in it."""


def elements(numels: list[int]) -> list[Element]:
    """Every element of parameters laid end to end."""
    return [(index, element) for index, numel in enumerate(numels) for element in range(numel)]


def check_cut(numels: list[int], chunk_numel: int, chunks: list[Chunk]) -> None:
    """The chunks hold every element once, in order, and say of each piece where it lies and what it is."""
    laid = elements(numels)
    expected = [laid[start : start + chunk_numel] for start in range(0, len(laid), chunk_numel)]
    held: list[list[Element]] = []
    for chunk in chunks:
        content: list[Element] = []
        for piece in chunk.pieces:
            assert piece.start == chunk.start + len(content)
            assert piece.stop > piece.start
            content += [(piece.index, piece.offset + i) for i in range(piece.stop - piece.start)]
        indices = [piece.index for piece in chunk.pieces]
        assert indices == sorted(set(indices))
        before = sum(len(earlier) for earlier in held)
        assert (chunk.start, chunk.stop) == (before, before + len(content))
        held.append(content)
    assert held == expected


sizes = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(1, 50))
@example([], 1)
@example([0, 0, 0], 1)
@example([0, 5, 0, 0, 5, 0], 5)
@example([1] * 12, 1)
@example([3], 1)
@example([3, 4], 10**9)
def test_chunks_hold_every_element_once_and_in_order(numels: list[int], chunk_numel: int) -> None:
    check_cut(numels, chunk_numel, cut(numels, chunk_numel))


def test_parameters_larger_than_memory_are_only_numbers() -> None:
    numels = [3, 10**12, 0, 7]
    chunks = cut(numels, 10**11)
    assert len(chunks) == 11
    assert chunks[0].pieces == (Piece(0, 0, 3, 0), Piece(1, 3, 10**11, 0))
    assert chunks[5] == Chunk(5 * 10**11, 6 * 10**11, (Piece(1, 5 * 10**11, 6 * 10**11, 5 * 10**11 - 3),))
    assert chunks[-1].pieces == (Piece(1, 10**12, 10**12 + 3, 10**12 - 3), Piece(3, 10**12 + 3, 10**12 + 10, 0))


@given(sizes)
def test_offsets_are_the_sums_so_far(numels: list[int]) -> None:
    assert offsets(numels) == [sum(numels[:count]) for count in range(len(numels) + 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        [Chunk(0, 2, (Piece(0, 0, 2, 0),))],  # elements left out
        [Chunk(0, 2, (Piece(0, 0, 2, 0),)), Chunk(2, 3, (Piece(0, 2, 3, 0),))],  # a wrong place in the parameter
        [Chunk(0, 2, (Piece(0, 0, 2, 0),)), Chunk(2, 3, (Piece(1, 2, 3, 2),))],  # a wrong parameter
        [Chunk(0, 2, (Piece(0, 0, 2, 0),)), Chunk(2, 3, (Piece(0, 1, 2, 2),))],  # a wrong place in the region
        [Chunk(0, 2, (Piece(0, 0, 2, 0),)), Chunk(1, 3, (Piece(0, 2, 3, 2),))],  # a wrong range of the chunk
        [Chunk(0, 1, (Piece(0, 0, 1, 0),)), Chunk(1, 3, (Piece(0, 1, 3, 1),))],  # wrong sizes
        [Chunk(0, 2, (Piece(0, 0, 1, 0), Piece(0, 1, 2, 1))), Chunk(2, 3, (Piece(0, 2, 3, 2),))],  # a piece in two
    ],
)
def test_the_check_notices_a_wrong_cut(wrong: list[Chunk]) -> None:
    check_cut([3], 2, cut([3], 2))
    with pytest.raises(AssertionError):
        check_cut([3], 2, wrong)
