"""The compiled kernels against numpy and torch: every element, and bit for bit where the arithmetic is the same."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels import ThreadPool
from lightning_cpu_offload.kernels.adamw import SHARE

ONE = ThreadPool(1)
SIZES = [0, 1, 7, 127, 128, 129, 4097, SHARE + 13]
HYPER: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

Arrays = dict[str, np.ndarray]


def adamw(*, plane: np.ndarray, **options: Any) -> None:
    """The step in place: the gradient in, the weight out."""
    kernels.adamw(gradient=plane, weight=plane, **options)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Torch's cast to BF16, as uint16."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Torch's cast from BF16 in uint16."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()


def make_gradient(size: int, dtype: Any, seed: int) -> np.ndarray:
    grad = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return bfloat16(grad) if dtype == np.uint16 else grad


def make_arrays(size: int, dtype: Any = np.uint16, *, offset: int = 0) -> Arrays:
    """Weights of order 1 with zeros among them, zero moments and a gradient, `offset` elements past alignment."""
    dtypes = {"param": np.float32, "plane": dtype, "exp_avg": np.float32, "exp_avg_sq": np.float32}
    arrays = {name: np.zeros(size + offset, dtypes[name])[offset:] for name in dtypes}
    arrays["param"][:] = np.random.default_rng(size).standard_normal(size)
    arrays["param"][::5] = 0
    arrays["plane"][:] = make_gradient(size, dtype, seed=0)
    return arrays


def copy_of(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def assert_same_bits(actual: Arrays, expected: Arrays) -> None:
    for name in expected:
        bits = f"u{expected[name].itemsize}"
        np.testing.assert_array_equal(actual[name].view(bits), expected[name].view(bits), err_msg=name)


def reference_step(
    arrays: Arrays,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float = 1.0,
    dtype: Any = np.float32,
    square_first: bool = False,
) -> Arrays:
    """One step, array by array in numpy, returned as new arrays.

    `dtype=float64` and `square_first` are two faults: one rounding less, and another order of the products.
    """

    def f(x: float) -> Any:
        return dtype(np.float32(x))

    p, m, v = (arrays[name].astype(dtype) for name in ("param", "exp_avg", "exp_avg_sq"))
    plane = arrays["plane"]
    g = (from_bfloat16(plane) if plane.dtype == np.uint16 else plane).astype(dtype) * f(grad_scale)
    if decoupled:
        p = p * f(1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g + p * f(weight_decay)
    weight = f(1 - beta1)
    m = m + (g - m) * weight if weight < 0.5 else g - (g - m) * (dtype(1) - weight)
    v = v * f(beta2)
    v = v + (f(1 - beta2) * (g * g) if square_first else f(1 - beta2) * g * g)
    denom = np.sqrt(v) / f((1 - beta2**step) ** 0.5) + f(eps)
    p = (p + f(-lr / (1 - beta1**step)) * m / denom).astype(np.float32)
    new_plane = bfloat16(p) if plane.dtype == np.uint16 else p.copy()
    m, v = m.astype(np.float32), v.astype(np.float32)
    return {"param": p, "plane": new_plane, "exp_avg": m, "exp_avg_sq": v}


def run_steps(arrays: Arrays, steps: int = 4, **options: Any) -> list[Arrays]:
    """Take `steps` kernel steps in place; return a copy of the arrays after each."""
    after = []
    for step in range(1, steps + 1):
        arrays["plane"][:] = make_gradient(arrays["plane"].size, arrays["plane"].dtype, seed=step)
        adamw(**arrays, **{**HYPER, "threads": ONE, **options}, step=step)
        after.append(copy_of(arrays))
    return after


def run_reference(arrays: Arrays, steps: int = 4, **options: Any) -> list[Arrays]:
    after = []
    for step in range(1, steps + 1):
        plane = make_gradient(arrays["plane"].size, arrays["plane"].dtype, seed=step)
        arrays = reference_step({**arrays, "plane": plane}, **{**HYPER, **options}, step=step)
        after.append(arrays)
    return after


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("decoupled", [True, False])
def test_step_has_the_bits_of_plain_float32(size: int, dtype: Any, decoupled: bool) -> None:
    arrays = make_arrays(size, dtype)
    expected = run_reference(copy_of(arrays), decoupled=decoupled)
    for actual, wanted in zip(run_steps(arrays, decoupled=decoupled), expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"grad_scale": 0.3},
        {"grad_scale": -1.0},
        {"beta1": 0.0},
        {"beta1": 0.5},
        {"beta1": 0.3, "beta2": 0.999},
        {"eps": 1e-3, "lr": 1.0},
        {"lr": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_option_has_the_bits_of_plain_float32(options: dict[str, float], decoupled: bool) -> None:
    arrays = make_arrays(1031)
    expected = run_reference(copy_of(arrays), decoupled=decoupled, **options)
    for actual, wanted in zip(run_steps(arrays, decoupled=decoupled, **options), expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("decoupled", [True, False])
def test_infinite_weight_without_decay_leaves_its_gradient_alone(decoupled: bool) -> None:
    arrays = make_arrays(4)
    arrays["param"][:] = [np.inf, -np.inf, 1, 0]
    expected = run_reference(copy_of(arrays), decoupled=decoupled, weight_decay=0.0)
    assert_same_bits(run_steps(arrays, decoupled=decoupled, weight_decay=0.0)[-1], expected[-1])
    np.testing.assert_array_equal(arrays["param"][:2], [np.inf, -np.inf])


@pytest.mark.parametrize("fault", [{"dtype": np.float64}, {"square_first": True}], ids=str)
def test_reference_comparison_notices_another_rounding(fault: dict[str, Any]) -> None:
    arrays = make_arrays(4097)
    expected = run_reference(copy_of(arrays), decoupled=True, **fault)
    with pytest.raises(AssertionError):
        assert_same_bits(run_steps(arrays, decoupled=True)[-1], expected[-1])


@pytest.mark.parametrize("name", ["param", "plane", "exp_avg", "exp_avg_sq"])
def test_bit_comparison_notices_the_lowest_bit_of_one_element(name: str) -> None:
    arrays = make_arrays(1000)
    changed = copy_of(arrays)
    changed[name].view(f"u{changed[name].itemsize}")[617] ^= 1
    assert_same_bits(arrays, copy_of(arrays))
    with pytest.raises(AssertionError, match=name):
        assert_same_bits(arrays, changed)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("offset", [1, 3])
def test_start_address_does_not_matter_and_neighbours_are_not_touched(dtype: Any, offset: int) -> None:
    size, border = 4097, 5
    whole = make_arrays(size + border, dtype, offset=offset)
    before = copy_of(whole)
    part = {name: array[:size] for name, array in whole.items()}
    expected = reference_step(part, **HYPER, decoupled=True, step=3)
    adamw(**part, **HYPER, decoupled=True, step=3, threads=ONE)
    assert_same_bits(part, expected)
    assert_same_bits(
        {name: array[size:] for name, array in whole.items()},
        {name: array[size:] for name, array in before.items()},
    )


@pytest.fixture(scope="module")
def of_one_thread() -> Arrays:
    """Three and a bit shares after a few steps, on one thread and in one piece."""
    arrays = make_arrays(3 * SHARE + 77)
    run_steps(arrays, steps=2, decoupled=True)
    return arrays


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_thread_count_does_not_change_a_bit(of_one_thread: Arrays, num_threads: int) -> None:
    arrays = make_arrays(3 * SHARE + 77)
    run_steps(arrays, steps=2, decoupled=True, threads=ThreadPool(num_threads))
    assert_same_bits(arrays, of_one_thread)


@pytest.mark.parametrize("seed", range(3))
def test_cutting_the_arrays_does_not_change_a_bit(of_one_thread: Arrays, seed: int) -> None:
    arrays = make_arrays(3 * SHARE + 77)
    size = arrays["param"].size
    cuts = [0, *sorted(random.Random(seed).choices(range(size + 1), k=9)), size]
    for step in (1, 2):
        arrays["plane"][:] = make_gradient(size, np.uint16, seed=step)
        for start, stop in itertools.pairwise(cuts):
            part = {name: array[start:stop] for name, array in arrays.items()}
            adamw(**part, **HYPER, decoupled=True, step=step, threads=ThreadPool(2))
    assert_same_bits(arrays, of_one_thread)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("size", [1, 7, 4097])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_is_that_of_torch(optimizer_class: Any, size: int, maximize: bool, weight_decay: float) -> None:
    hyper = {**HYPER, "weight_decay": weight_decay}
    arrays = make_arrays(size)
    param = torch.from_numpy(arrays["param"].copy()).requires_grad_()
    betas = (hyper.pop("beta1"), hyper.pop("beta2"))
    optimizer = optimizer_class([param], **hyper, betas=betas, maximize=maximize, foreach=False)
    options = {"decoupled": optimizer_class is torch.optim.AdamW, "grad_scale": -1.0 if maximize else 1.0}
    for step, actual in enumerate(run_steps(arrays, steps=5, weight_decay=weight_decay, **options), start=1):
        param.grad = torch.from_numpy(from_bfloat16(make_gradient(size, np.uint16, seed=step)))
        optimizer.step()
        assert_close_to_torch(actual, param, optimizer, lr=hyper["lr"])


def assert_close_to_torch(actual: Arrays, param: torch.Tensor, optimizer: Any, lr: float) -> None:
    """Compare to 1e-6, some units in the last place: torch's vectorized `lerp` and `add` fuse multiply and add.

    Where a sum cancels, the difference is relative to its terms and not to the result, hence the absolute
    part. For a weight it is a millionth of the learning rate, for the first moment of a gradient of order 1.
    The second moment cannot cancel, but Adam's L2 term can cancel the gradient, 1e-7 off, before it is squared.
    """
    state = optimizer.state[param]
    compare = np.testing.assert_allclose
    compare(actual["param"], param.detach().numpy(), rtol=1e-6, atol=1e-6 * lr)
    compare(actual["exp_avg"], state["exp_avg"].numpy(), rtol=1e-6, atol=1e-6)
    compare(actual["exp_avg_sq"], state["exp_avg_sq"].numpy(), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq"])
def test_comparison_with_torch_notices_one_element(name: str) -> None:
    arrays = make_arrays(1000)
    param = torch.from_numpy(arrays["param"].copy()).requires_grad_()
    param.grad = torch.from_numpy(from_bfloat16(make_gradient(1000, np.uint16, seed=1)))
    optimizer = torch.optim.AdamW([param], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    optimizer.step()
    actual = run_steps(arrays, steps=1, decoupled=True)[0]
    assert_close_to_torch(actual, param, optimizer, lr=3e-3)
    largest = np.argmax(np.abs(actual[name]))
    actual[name][largest] *= 1.00001
    with pytest.raises(AssertionError, match="1 / 1000"):
        assert_close_to_torch(actual, param, optimizer, lr=3e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_nonfinite_gradient_shows_in_its_own_element_alone(value: float, dtype: Any) -> None:
    clean, marred = make_arrays(1000, dtype), make_arrays(1000, dtype)
    marred["plane"][617:618] = bfloat16(np.float32([value])) if dtype == np.uint16 else value
    for arrays in (clean, marred):
        adamw(**arrays, **HYPER, decoupled=True, step=2, threads=ONE)
    weight = from_bfloat16(marred["plane"]) if dtype == np.uint16 else marred["plane"]
    assert np.isnan([marred["param"][617], weight[617]]).all()
    assert not np.isfinite([marred["exp_avg"][617], marred["exp_avg_sq"][617]]).any()
    for name in clean:
        marred[name][617] = clean[name][617]
    assert_same_bits(marred, clean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step=0: must be 1 or more"),
        ({"plane": np.zeros(4, np.float16)}, r"gradient\.dtype=float16: must be uint16 .* or float32"),
        ({"exp_avg": np.zeros(4, np.float64)}, r"exp_avg\.dtype=float64: must be float32"),
        ({"exp_avg_sq": np.zeros(5, np.float32)}, r"exp_avg_sq\.shape=\(5,\): must be \(4,\)"),
        ({"param": np.zeros((2, 2), np.float32)}, r"param\.shape=\(2, 2\): must be \(4,\)"),
        ({"exp_avg": np.zeros(8, np.float32)[::2]}, r"exp_avg\.strides=\(8,\): must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {**make_arrays(4), **HYPER, "decoupled": True, "step": 1, "threads": ONE, **change}
    with pytest.raises(ValueError, match=message):
        adamw(**arguments)
