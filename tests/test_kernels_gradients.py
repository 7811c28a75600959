"""Gradients on the host: sums bit for bit, squares to the last bits, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_cpu_offload.kernels import ThreadPool, accumulate
from lightning_cpu_offload.kernels.gradients import LANES, SHARE
from tests.test_kernels import ONE, bfloat16, from_bfloat16, make_gradient

SIZES = [0, 1, 7, LANES - 1, LANES, LANES + 1, 4097, SHARE, 2 * SHARE + 77]
DTYPES = [np.uint16, np.float32]
LARGEST = np.finfo(np.float32).max


def widened(gradient: np.ndarray) -> np.ndarray:
    return from_bfloat16(gradient) if gradient.dtype == np.uint16 else gradient


def exact_square_sum(values: np.ndarray) -> float:
    """The sum of the squares, rounded once."""
    return math.fsum(float(x) * float(x) for x in values)


def square_sum(values: np.ndarray) -> float:
    """What summing gives for a first gradient."""
    return accumulate(np.empty(values.size, np.float32), values, store=True, threads=ONE)


def assert_square_sum(actual: float, values: np.ndarray) -> None:
    """Compare to 1e-13: a sum in double precision of at most 1,024 squares one after the other, each exact."""
    assert actual == pytest.approx(exact_square_sum(values), rel=1e-13, abs=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_first_gradient_begins_the_total(size: int, dtype: Any, factor: float) -> None:
    total, gradient = np.full(size, np.nan, np.float32), make_gradient(size, dtype, seed=1)
    squares = accumulate(total, gradient, store=True, scale=factor, threads=ONE)
    np.testing.assert_array_equal(total, widened(gradient) * np.float32(factor))
    assert_square_sum(squares, total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_further_gradients_are_added_in_float32(size: int, dtype: Any, factor: float) -> None:
    total, gradient = make_gradient(size, np.float32, seed=0), make_gradient(size, dtype, seed=1)
    expected, untouched = total + widened(gradient) * np.float32(factor), gradient.copy()
    squares = accumulate(total, gradient, store=False, scale=factor, threads=ONE)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(gradient, untouched)
    assert_square_sum(squares, total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bfloat16_total_is_rounded_to_nearest_even(size: int, dtype: Any) -> None:
    total, gradient = make_gradient(size, np.uint16, seed=0), make_gradient(size, dtype, seed=1)
    expected = widened(total) + widened(gradient)
    squares = accumulate(total, gradient, store=False, threads=ONE)
    np.testing.assert_array_equal(total, bfloat16(expected))
    assert_square_sum(squares, expected)
    squares = accumulate(total, gradient, store=True, threads=ONE)
    np.testing.assert_array_equal(total, bfloat16(widened(gradient)))
    assert_square_sum(squares, widened(gradient))


def test_square_sum_comparison_notices_one_small_element() -> None:
    values = make_gradient(4097, np.float32, seed=1)
    values[617] = 1e-4
    actual = square_sum(values)
    assert_square_sum(actual, values)
    values[617] = 0
    with pytest.raises(AssertionError):
        assert_square_sum(actual, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_does_not_change_a_bit(dtype: Any) -> None:
    # Squares over sixty orders of magnitude, so that another order of summation shows.
    exponents = np.random.default_rng(0).uniform(-15, 15, 9 * SHARE + 77)
    values = (10**exponents).astype(np.float32)
    gradient = bfloat16(values) if dtype == np.uint16 else values
    results = []
    for num_threads in (1, 2, 3, 5):
        total = np.ones(gradient.size, np.float32)
        results.append(accumulate(total, gradient, store=False, threads=ThreadPool(num_threads)))
    assert set(results) == {results[0]}


def test_order_of_summation_shows_in_such_sums() -> None:
    values = 10 ** np.random.default_rng(0).uniform(-15, 15, 100_003)
    assert math.fsum(values) != float(np.add.accumulate(values)[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_the_largest_numbers_do_not_overflow(dtype: Any) -> None:
    values = np.full(SHARE + 1, LARGEST if dtype == np.float32 else 0x7F7F, dtype)
    assert_square_sum(square_sum(values), widened(values))
    assert math.isfinite(accumulate(np.zeros(values.size, np.float32), values, store=False, threads=ONE))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 4096, SHARE + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_is_not_finite_shows(value: float, place: int, dtype: Any) -> None:
    gradient = make_gradient(SHARE + 77, dtype, seed=1)
    total = np.ones(gradient.size, np.float32)
    assert math.isfinite(square_sum(gradient))
    gradient[place : place + 1] = bfloat16(np.float32([value])) if dtype == np.uint16 else value
    assert not math.isfinite(square_sum(gradient))
    assert not math.isfinite(accumulate(total, gradient, store=False, threads=ONE))
    np.testing.assert_array_equal(total[place], np.float32(value))
    assert np.isfinite(np.delete(total, place)).all()


def test_a_total_that_overflows_shows_though_each_gradient_is_finite() -> None:
    total, gradient = np.full((2, 9), LARGEST)
    assert accumulate(total, gradient, store=False, threads=ONE) == math.inf
    assert np.isinf(total).all()


def test_every_bfloat16_number_is_added_exactly() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    total = np.zeros(patterns.size, np.float32)
    accumulate(total, patterns, store=False, threads=ONE)
    np.testing.assert_array_equal(total, from_bfloat16(patterns))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accumulate(np.zeros(4), np.zeros(4, np.float32), store=True, threads=ONE), r"total\.dtype=float64"),
        (
            lambda: accumulate(*np.zeros((2, 4), np.float32)[:, ::2], store=True, threads=ONE),
            r"total\.strides=\(8,\): must be contiguous",
        ),
        (
            lambda: accumulate(np.zeros(4, np.float32), np.zeros(5, np.uint16), store=True, threads=ONE),
            r"gradient\.shape=\(5,\): must be \(4,\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
