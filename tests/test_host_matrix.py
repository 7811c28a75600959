"""gradients="host" against the reference that sums up in FP32, over every combination that has its own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.offload import attach
from tests.models import NetworkModule, train_with_lightning
from tests.reference import Case, HostGradientLoop, ReferenceLoop, all_cases
from tests.test_correctness_matrix import CHOICES, STEP_RTOL, assert_bit_for_bit, assert_step_by_step, matrix


def train_on_host(case: Case, watched: bool = False, **options: Any) -> NetworkModule:
    """The case under the strategy, gradients on the host."""
    precision = CPUOffloadPrecision(case.precision)  # type: ignore[arg-type]
    strategy = CPUOffloadStrategy(gradients="host", precision_plugin=precision)
    return train_with_lightning(case, watched, strategy=strategy, **options)


NORM_RTOL = 1e-5
"""torch sums thousands of squares in single precision, with an error of some 1e-6 of the norm and of each gradient."""


@pytest.mark.parametrize("case", matrix("sgd"))
def test_torch_arithmetic(case: Case) -> None:
    """Bit for bit, but for the norm, which is summed in double precision here and in single precision by torch."""
    if case.clip == "norm":
        # Without weight decay, in whose sum with a gradient most digits of the latter may cancel.
        case = replace(case, optimizer="sgd_nesterov")
        assert_step_by_step(train_on_host(case, watched=True), HostGradientLoop, NORM_RTOL)
    else:
        assert_bit_for_bit(train_on_host(case), HostGradientLoop)


@pytest.mark.parametrize("case", matrix("adamw"))
def test_fused_adamw_agrees_at_every_step(case: Case) -> None:
    rtol = NORM_RTOL if case.clip == "norm" else STEP_RTOL
    assert_step_by_step(train_on_host(case, watched=True), HostGradientLoop, rtol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", CHOICES["precision"])
@pytest.mark.parametrize("structure", CHOICES["structure"])
def test_gradients_may_spread_over_many_slots(
    structure: str, precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", 56)
    module = train_on_host(Case(structure, precision, clip="value", optimizer=optimizer), watched=True)
    if optimizer == "sgd":
        assert_bit_for_bit(module, HostGradientLoop)
    else:
        assert_step_by_step(module, HostGradientLoop)


@pytest.mark.parametrize("case", all_cases(optimizer=["adamw"], precision=CHOICES["precision"]), ids=str)
def test_torch_operations_agree_at_every_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert_step_by_step(train_on_host(case, watched=True), HostGradientLoop)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_reference_for_gradients_on_the_device_is_another(optimizer: str) -> None:
    """BF16 sums differ from FP32 sums: the comparison notices."""
    module = train_on_host(Case(accumulate=3, clip="none", optimizer=optimizer), watched=True)
    check = assert_bit_for_bit if optimizer == "sgd" else assert_step_by_step
    check(module, HostGradientLoop)
    with pytest.raises(AssertionError):
        check(module, ReferenceLoop)
