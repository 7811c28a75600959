"""Steps with gradient and weight in two arrays, and AMSGrad, against the step in place and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_cpu_offload.kernels import ThreadPool, adamw
from lightning_cpu_offload.kernels.adamw import SHARE
from tests.test_kernels import (
    HYPER,
    ONE,
    Arrays,
    assert_close_to_torch,
    assert_same_bits,
    bfloat16,
    copy_of,
    from_bfloat16,
    make_arrays,
    make_gradient,
)

SIZES = [0, 1, 7, 127, 129, 4097, SHARE + 13]
DTYPES = [np.uint16, np.float32]


def step_apart(arrays: Arrays, gradient_dtype: Any, weight_dtype: Any, **options: Any) -> Arrays:
    """Step with the plane's gradient widened to `gradient_dtype`; return the arrays, with the weight as plane."""
    before = arrays.pop("plane")
    gradient = from_bfloat16(before) if gradient_dtype == np.float32 else before.copy()
    untouched = gradient.copy()
    weight = np.full(before.size, 7, weight_dtype)
    adamw(gradient=gradient, weight=weight, **arrays, **{**HYPER, "threads": ONE, **options})
    np.testing.assert_array_equal(gradient, untouched)
    return {**arrays, "plane": weight}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_two_arrays_have_the_bits_of_one(size: int, gradient_dtype: Any, weight_dtype: Any, decoupled: bool) -> None:
    in_place, apart = make_arrays(size), make_arrays(size)
    plane = in_place["plane"]
    options = {"decoupled": decoupled, "step": 3}
    arguments = {name: array for name, array in in_place.items() if name != "plane"}
    adamw(gradient=plane, weight=plane, **arguments, **HYPER, **options, threads=ONE)
    apart = step_apart(apart, gradient_dtype, weight_dtype, **options)
    if weight_dtype == np.float32:
        np.testing.assert_array_equal(apart["plane"], apart["param"])
        apart["plane"] = bfloat16(apart["plane"])
    assert_same_bits(apart, in_place)


def test_two_arrays_on_several_threads_have_the_bits_of_one_thread() -> None:
    results = [
        step_apart(make_arrays(3 * SHARE + 77), np.float32, np.uint16, decoupled=True, step=3, threads=ThreadPool(n))
        for n in (1, 2, 3)
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("whole", [np.zeros(9, np.float32), np.zeros(9, np.uint16)], ids=str)
def test_partly_overlapping_gradient_and_weight_are_refused(whole: np.ndarray) -> None:
    param, exp_avg, exp_avg_sq = np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match="weight overlaps gradient: must be the same array or another one"):
        adamw(param, whole[:8], whole[1:], exp_avg, exp_avg_sq, **HYPER, decoupled=True, step=1, threads=ONE)


def test_another_view_of_the_same_memory_is_in_place() -> None:
    expected, actual = make_arrays(1000), make_arrays(1000)
    for arrays, view in ((expected, expected["plane"]), (actual, actual["plane"][:])):
        rest = {name: array for name, array in arrays.items() if name != "plane"}
        adamw(gradient=arrays["plane"], weight=view, **rest, **HYPER, decoupled=True, step=1, threads=ONE)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("size", [1, 7, 4097])
@pytest.mark.parametrize("maximize", [False, True])
def test_amsgrad_is_that_of_torch(optimizer_class: Any, size: int, maximize: bool) -> None:
    arrays = {**make_arrays(size), "max_exp_avg_sq": np.zeros(size, np.float32)}
    param = torch.from_numpy(arrays["param"].copy()).requires_grad_()
    hyper = {name: HYPER[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = optimizer_class([param], **hyper, betas=(0.9, 0.95), amsgrad=True, maximize=maximize, foreach=False)
    options = {"decoupled": optimizer_class is torch.optim.AdamW, "grad_scale": -1.0 if maximize else 1.0}
    for step in range(1, 7):
        # Gradients shrink, so that from the second step on the maximum is no longer the current moment.
        gradient = bfloat16(from_bfloat16(make_gradient(size, np.uint16, seed=step)) / np.float32(step**2))
        arrays["plane"][:] = gradient
        rest = {name: array for name, array in arrays.items() if name != "plane"}
        plane = arrays["plane"]
        adamw(gradient=plane, weight=plane, **rest, **HYPER, **options, step=step, threads=ONE)
        param.grad = torch.from_numpy(from_bfloat16(gradient))
        optimizer.step()
        assert_close_to_torch(arrays, param, optimizer, lr=HYPER["lr"])
        # As for the second moment in `assert_close_to_torch`.
        maximum = optimizer.state[param]["max_exp_avg_sq"].numpy()
        np.testing.assert_allclose(arrays["max_exp_avg_sq"], maximum, rtol=1e-6, atol=1e-10)
    assert (arrays["max_exp_avg_sq"] > arrays["exp_avg_sq"]).any()


def amsgrad_step(arrays: Arrays) -> None:
    rest = {name: array for name, array in arrays.items() if name != "plane"}
    plane = arrays["plane"]
    adamw(gradient=plane, weight=plane, **rest, **HYPER, decoupled=True, step=2, threads=ONE)


def test_amsgrad_keeps_nan_from_either_side_in_its_own_element() -> None:
    clean = {**make_arrays(1000), "max_exp_avg_sq": np.ones(1000, np.float32)}
    marred = copy_of(clean)
    marred["max_exp_avg_sq"][3] = np.nan
    marred["plane"][617] = 0x7FC0
    amsgrad_step(clean)
    amsgrad_step(marred)
    for place in (3, 617):
        assert np.isnan([marred["max_exp_avg_sq"][place], marred["param"][place]]).all()
        for name in clean:
            marred[name][place] = clean[name][place]
    assert_same_bits(marred, clean)


def test_amsgrad_and_the_plain_step_differ() -> None:
    plain, amsgrad = make_arrays(1000), {**make_arrays(1000), "max_exp_avg_sq": np.ones(1000, np.float32)}
    amsgrad_step(plain)
    amsgrad_step(amsgrad)
    with pytest.raises(AssertionError, match="param"):
        assert_same_bits(amsgrad, plain)
