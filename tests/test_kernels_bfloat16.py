"""Reading and rounding BF16 in the kernels, over every BF16 number, its halfway points and their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_cpu_offload.kernels import ThreadPool, adamw

OPTIONS: dict[str, Any] = {"lr": 0.0, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Torch's cast to BF16, as uint16."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def all_bfloat16_patterns() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32)


def rounded_by_kernel(bits: np.ndarray) -> np.ndarray:
    """The BF16 weights that a step with a learning rate of zero makes of FP32 weights given by their bits."""
    param = bits.astype(np.uint32).view(np.float32)
    plane, exp_avg, exp_avg_sq = np.zeros(bits.size, np.uint16), *np.zeros((2, bits.size), np.float32)
    adamw(param, plane, plane, exp_avg, exp_avg_sq, **OPTIONS, beta1=0.9, step=1, threads=ThreadPool(1))
    return plane


def test_every_bfloat16_number_is_kept() -> None:
    patterns = all_bfloat16_patterns()
    rounded = rounded_by_kernel(patterns << 16)
    is_nan = np.isnan((patterns << 16).view(np.float32))
    np.testing.assert_array_equal(rounded[~is_nan], patterns[~is_nan])
    np.testing.assert_array_equal(rounded[is_nan], 0x7FC0)


@pytest.mark.parametrize("low", [0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_rounding_is_torchs_at_and_beside_every_halfway_point(low: int) -> None:
    bits = (all_bfloat16_patterns() << 16) + np.uint32(low)
    expected, rounded = bfloat16(bits.view(np.float32)), rounded_by_kernel(bits)
    is_nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(rounded[~is_nan], expected[~is_nan])
    np.testing.assert_array_equal(rounded[is_nan], 0x7FC0)


def test_halfway_points_tell_rounding_from_cutting_off_and_from_rounding_up() -> None:
    bits = (all_bfloat16_patterns() << 16) + np.uint32(0x8000)
    finite = np.isfinite(bits.view(np.float32))
    rounded = rounded_by_kernel(bits)[finite]
    assert (rounded != bits[finite] >> 16).any()
    assert (rounded != (bits[finite] >> 16) + 1).any()


def test_every_bfloat16_gradient_is_read_exactly() -> None:
    patterns = all_bfloat16_patterns()
    plane = patterns.astype(np.uint16)
    param, exp_avg, exp_avg_sq = np.zeros((3, patterns.size), np.float32)
    adamw(param, plane, plane, exp_avg, exp_avg_sq, **OPTIONS, beta1=0.0, step=1, threads=ThreadPool(1))
    finite = np.isfinite((patterns << 16).view(np.float32))
    np.testing.assert_array_equal(exp_avg.view(np.uint32)[finite], patterns[finite] << 16)
    assert not np.isfinite(exp_avg[~finite]).any()
