"""Moments in BF16 and 8 bits: formats against tables, steps against float64, and the same bits however it is cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lightning_cpu_offload.kernels import ThreadPool
from lightning_cpu_offload.kernels.moments import BFloat16Moments, Float8Moments
from lightning_cpu_offload.kernels.reduced import SHARE
from tests.reference import float8 as reference
from tests.test_kernels import HYPER, ONE, bfloat16, from_bfloat16, make_gradient

KINDS = [BFloat16Moments, Float8Moments]
NAMES = ["exp_avg", "exp_avg_sq"]
Kind = Any


def make_moments(kind: Kind, size: int, steps: int = 3, **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Moments, masters and weights after a few steps."""
    moments = kind(size)
    param = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for step in range(1, steps + 1):
        plane = make_gradient(size, np.uint16, seed=step)
        moments.step(
            param, plane, plane, **{"first": 0, "decoupled": True, "step": step, "threads": ONE, **HYPER, **options}
        )
    return moments, param, plane


def both(moments: Any) -> dict[str, np.ndarray]:
    return {name: moments.get(name, 0, moments.size) for name in NAMES}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def spread(size: int, octaves: int, seed: int = 0) -> np.ndarray:
    """Numbers of either sign over that many octaves, zeros among them."""
    rng = np.random.default_rng(seed)
    values = np.exp2(rng.uniform(-octaves, 0, size)) * rng.choice([-1, 1], size)
    values[::17] = 0
    return values.astype(np.float32)


# --- the formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 127, 128, 300])
@pytest.mark.parametrize("octaves", [1, 12, 40])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e30])
def test_float8_is_that_of_the_table(name: str, size: int, octaves: int, scale: float) -> None:
    signed, values = name == "exp_avg", spread(size, octaves) * np.float32(scale)
    values = values if signed else np.abs(values)
    moments = Float8Moments(size)
    moments.set(name, 0, values)
    fractions = reference.dithers(size, 0, seed=0, step=0)[not signed]
    expected = [reference.round_block(values[i : i + 128], fractions[i : i + 128], signed) for i in range(0, size, 128)]
    np.testing.assert_array_equal(moments.get(name, 0, size), np.concatenate(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-80, -1, 0, 1, 60])
def test_every_float8_number_keeps_its_value(name: str, exponent: int) -> None:
    signed = name == "exp_avg"
    table = reference.values_of(exponent, signed).astype(np.float32)
    blocks = [np.append(-table if sign else table, table[-1]) for sign in range(1 + signed)]
    if not signed:  # two blocks, each with the largest number in it
        blocks = [np.append(table[:127], table[-1]), np.append(table[127:254], table[-1])]
    values = np.concatenate(blocks)
    moments = Float8Moments(values.size)
    moments.set(name, 0, values)
    np.testing.assert_array_equal(moments.get(name, 0, values.size), values)


def test_table_comparison_notices_one_code() -> None:
    moments = Float8Moments(128)
    values = spread(128, 5)
    moments.set("exp_avg", 0, values)
    expected = reference.round_block(values, reference.dithers(128, 0, 0, 0)[0], signed=True)
    np.testing.assert_array_equal(moments.get("exp_avg", 0, 128), expected)
    moments.exp_avg[60] += 1
    with pytest.raises(AssertionError, match="1 / 128"):
        np.testing.assert_array_equal(moments.get("exp_avg", 0, 128), expected)


@pytest.mark.parametrize("name", NAMES)
def test_float8_is_off_by_less_than_an_eighth(name: str) -> None:
    values = np.abs(spread(10_000, 12)) + np.float32(2**-13)
    moments = Float8Moments(values.size)
    moments.set(name, 0, values)
    # Three bits of mantissa: two neighbours are at most an eighth apart, and a number becomes one of them.
    np.testing.assert_allclose(moments.get(name, 0, values.size), values, rtol=1 / 8, atol=0)


def test_no_second_moment_becomes_zero() -> None:
    values = np.full(128, 1e-30, np.float32)
    values[5] = 1e10
    moments = Float8Moments(128)
    moments.set("exp_avg_sq", 0, values)
    assert (moments.get("exp_avg_sq", 0, 128) >= values).all()


def test_empty_moments_are_zero_to_adam() -> None:
    moments = Float8Moments(300)
    np.testing.assert_array_equal(moments.get("exp_avg", 0, 300), 0)
    # The square root of 1.2e-38 is 1e-19: nothing beside any eps or gradient.
    np.testing.assert_allclose(moments.get("exp_avg_sq", 0, 300), 0, atol=1.2e-38)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_stay_in_their_element(kind: Kind, name: str) -> None:
    clean, marred = kind(300), kind(300)
    values = np.abs(spread(300, 6))
    clean.set(name, 0, values)
    values[[3, 200]] = [np.nan, np.inf]
    marred.set(name, 0, values)
    actual, expected = marred.get(name, 0, 300), clean.get(name, 0, 300)
    assert not np.isfinite(actual[[3, 200]]).any()
    rest = np.delete(np.arange(300), [3, 200])
    np.testing.assert_array_equal(actual[rest], expected[rest])


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_torchs_to_nearest(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 0x7FFF, 0x8000, 0x8001):
        values = (bits + np.uint32(low)).view(np.float32)
        moments = BFloat16Moments(values.size)
        moments.set(name, 0, values)
        np.testing.assert_array_equal(moments.get(name, 0, values.size), from_bfloat16(bfloat16(values)))


# --- the step -------------------------------------------------------------------------------------------------------


def float64_step(state: dict[str, np.ndarray], grad: np.ndarray, step: int, decoupled: bool) -> dict[str, np.ndarray]:
    """One step in float64, from what the moments are."""
    h = HYPER
    p, m, v = (state[name].astype(np.float64) for name in ("param", *NAMES))
    g = from_bfloat16(grad).astype(np.float64)
    if decoupled:
        p *= 1 - h["lr"] * h["weight_decay"]
    else:
        g += h["weight_decay"] * p
    m += (1 - h["beta1"]) * (g - m)
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    denom = np.sqrt(v / (1 - h["beta2"] ** step)) + h["eps"]
    return {"param": p - h["lr"] / (1 - h["beta1"] ** step) * m / denom, "exp_avg": m, "exp_avg_sq": v}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("size", [1, 127, 129, 4097])
def test_step_is_adams_on_what_the_moments_are(kind: Kind, decoupled: bool, size: int) -> None:
    moments, param, _ = make_moments(kind, size, decoupled=decoupled)
    before, grad = {**both(moments), "param": param.copy()}, make_gradient(size, np.uint16, seed=9)
    plane = grad.copy()
    moments.step(param, plane, plane, first=0, decoupled=decoupled, step=4, threads=ONE, **HYPER)
    expected = float64_step(before, grad, 4, decoupled)
    # Float32 rounding; where the update cancels the weight, a millionth of the learning rate.
    np.testing.assert_allclose(param, expected["param"], rtol=1e-6, atol=1e-6 * HYPER["lr"])
    np.testing.assert_array_equal(plane, bfloat16(param))
    # Neighbours are 2**-7 or an eighth apart; the smallest first moments of a block are cut off below 2**-15.
    rtol, atol = (2**-7, 1e-7) if kind is BFloat16Moments else (1 / 8, 2**-14)
    np.testing.assert_allclose(moments.get("exp_avg", 0, size), expected["exp_avg"], rtol=rtol, atol=atol)
    np.testing.assert_allclose(moments.get("exp_avg_sq", 0, size), expected["exp_avg_sq"], rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 7])
def test_float8_moments_after_a_step_are_rounded_by_its_dither(seed: int) -> None:
    moments, param, _ = make_moments(Float8Moments, 300)
    before, grad = {**both(moments), "param": param.copy()}, make_gradient(300, np.uint16, seed=9)
    moments.step(param, grad.copy(), grad.copy(), first=0, seed=seed, decoupled=True, step=4, threads=ONE, **HYPER)
    new = float64_step(before, grad, 4, decoupled=True)
    for name, fractions in zip(NAMES, reference.dithers(300, 0, seed, step=4), strict=True):
        blocks = [
            reference.round_block(new[name][i : i + 128], fractions[i : i + 128], name == "exp_avg")
            for i in range(0, 300, 128)
        ]
        # The kernel's moments differ from float64's in the last bit, which takes a number in a thousand across.
        differs = moments.get(name, 0, 300) != np.concatenate(blocks)
        assert differs.sum() <= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_thread_count_does_not_change_a_bit(kind: Kind, num_threads: int) -> None:
    size = 2 * SHARE + 77
    one, param, weight = make_moments(kind, size)
    several, other_param, other_weight = make_moments(kind, size, threads=ThreadPool(num_threads))
    assert_same(both(several), both(one))
    np.testing.assert_array_equal(other_param, param)
    np.testing.assert_array_equal(other_weight, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_and_another_step_round_otherwise(kind: Kind) -> None:
    expected = both(make_moments(kind, 1000)[0])
    with pytest.raises(AssertionError):
        assert_same(both(make_moments(kind, 1000, seed=1)[0]), expected)


@pytest.mark.parametrize("cuts", [[0, 128, 256, 1000], [0, 1, 130, 517, 1000], [0, 500, 501, 502, 1000]], ids=str)
@pytest.mark.parametrize("weight_dtype", [np.uint16, np.float32])
def test_cut_bfloat16_moments_have_the_bits_of_whole_ones(cuts: list[int], weight_dtype: Any) -> None:
    whole, param, _ = make_moments(BFloat16Moments, 1000)
    cut = BFloat16Moments(1000)
    other = np.random.default_rng(1000).standard_normal(1000).astype(np.float32)
    for step in (1, 2, 3):
        gradient, weight = make_gradient(1000, np.uint16, seed=step), np.zeros(1000, weight_dtype)
        for first, stop in itertools.pairwise(cuts):
            arrays = (array[first:stop] for array in (other, gradient, weight))
            cut.step(*arrays, first=first, decoupled=True, step=step, threads=ONE, **HYPER)
    assert_same(both(cut), both(whole))
    np.testing.assert_array_equal(other, param)


def test_float8_cut_at_blocks_has_the_bits_of_whole_ones() -> None:
    whole, param, _ = make_moments(Float8Moments, 1000)
    cut = Float8Moments(1000)
    other = np.random.default_rng(1000).standard_normal(1000).astype(np.float32)
    for step in (1, 2, 3):
        gradient = make_gradient(1000, np.uint16, seed=step)
        for first, stop in ((0, 128), (128, 640), (640, 1000)):
            arrays = (array[first:stop] for array in (other, gradient, gradient))
            cut.step(*arrays, first=first, decoupled=True, step=step, threads=ONE, **HYPER)
    assert_same(both(cut), both(whole))
    np.testing.assert_array_equal(other, param)


@pytest.mark.parametrize("kind", KINDS)
def test_stepping_a_part_leaves_the_rest(kind: Kind) -> None:
    moments, *_ = make_moments(kind, 1000)
    before = both(moments)
    param, gradient = np.zeros(300, np.float32), np.full(300, 0x3F80, np.uint16)
    moments.step(param, gradient, gradient, first=450, decoupled=True, step=4, threads=ONE, **HYPER)
    assert (moments.get("exp_avg", 450, 300) != before["exp_avg"][450:750]).any()
    for name in NAMES:
        rest = np.r_[0:450, 750:1000]
        np.testing.assert_array_equal(moments.get(name, 0, 1000)[rest], before[name][rest])


# --- over many steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "distance"), [(BFloat16Moments, 2**-7), (Float8Moments, 1 / 8)])
def test_second_moment_forgets_as_slowly_as_it_should(kind: Kind, distance: float) -> None:
    """A thousand steps, each far below the distance of two numbers.

    The dithers of a Weyl sequence leave about one distance in the mean, and a few where several octaves are crossed.
    """
    moments, param = kind(256), np.zeros(256, np.float32)
    moments.set("exp_avg_sq", 0, np.linspace(1, 2, 256, dtype=np.float32))
    start, zero = moments.get("exp_avg_sq", 0, 256), np.zeros(256, np.uint16)
    for step in range(1, 1001):
        options = {**HYPER, "beta2": 0.999, "decoupled": True, "step": step, "threads": ONE}
        moments.step(param, zero, zero.copy(), first=0, **options)
    actual, expected = moments.get("exp_avg_sq", 0, 256), start * 0.999**1000
    np.testing.assert_allclose(actual, expected, rtol=4 * distance)
    assert actual.mean() == pytest.approx(expected.mean(), rel=distance)


def test_rounded_to_nearest_it_would_not_move() -> None:
    start = from_bfloat16(bfloat16(np.linspace(1, 2, 256, dtype=np.float32)))
    np.testing.assert_array_equal(from_bfloat16(bfloat16(start * np.float32(0.999))), start)


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_went_through_float32_goes_on_with_the_same_bits(kind: Kind) -> None:
    straight, param, _ = make_moments(kind, 1000, steps=6)
    first, other, _ = make_moments(kind, 1000, steps=3)
    second = kind(1000)
    for name in NAMES:
        for start, stop in itertools.pairwise([0, 100, 501, 1000]):
            second.set(name, start, first.get(name, start, stop - start))
    assert_same(both(second), both(first))
    for step in (4, 5, 6):
        plane = make_gradient(1000, np.uint16, seed=step)
        second.step(other, plane, plane, first=0, decoupled=True, step=step, threads=ONE, **HYPER)
    assert_same(both(second), both(straight))
    np.testing.assert_array_equal(other, param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step=0: must be 1 or more"),
        ({"first": 7}, "first=7: 4 numbers from there on must be among 10"),
        ({"first": -1}, "first=-1: 4 numbers"),
        ({"param": np.zeros(4)}, r"param\.dtype=float64: must be float32"),
        ({"weight": np.zeros(5, np.uint16)}, r"weight\.shape=\(5,\): must be \(4,\)"),
    ],
)
def test_wrong_arguments_are_refused(kind: Kind, change: dict[str, Any], message: str) -> None:
    arrays = {"param": np.zeros(4, np.float32), "gradient": np.zeros(4, np.uint16), "weight": np.zeros(4, np.uint16)}
    with pytest.raises(ValueError, match=message):
        kind(10).step(**{**arrays, **HYPER, "first": 0, "decoupled": True, "step": 1, "threads": ONE, **change})
