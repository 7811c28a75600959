"""Training under the strategy against the reference, over every combination that has its own arithmetic.

Where the optimizer's arithmetic is torch's, both agree bit for bit from start to end. The fused AdamW rounds
in its own order, and a last bit of a master can flip the rounding of a BF16 weight, which feeds back: there,
each step is judged from the same state, see `reference/lockstep.py`.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.offload import attach, pipeline
from tests.models import (
    NetworkModule,
    make_batches,
    reference_loop,
    train_reference,
    train_with_lightning,
)
from tests.reference import (
    EPOCHS,
    Case,
    ReferenceLoop,
    Snapshot,
    all_cases,
    assert_close,
    assert_identical,
    assert_same_losses,
    follow,
    over_a_run,
    pairwise,
)
from tests.reference.faults import FAULTS, MastersFollowWeights, WideGradientSums

Check = Callable[..., None]


CHOICES: dict[str, Sequence[Any]] = {
    "structure": ["plain", "tied", "frozen", "unused", "groups", "odd"],
    "precision": ["32-true", "bf16-mixed", "bf16-true"],
    "accumulate": [1, 2, 3, 16],
    "clip": ["none", "norm", "value"],
}

STEP_RTOL = 1e-6
"""8 ulp or more: an AdamW step rounds about ten times, and most of its roundings cancel."""

RUN_RTOL = 1e-5
"""Ten times `STEP_RTOL` for the ten steps of a run."""


def matrix(optimizer: str) -> list[Any]:
    """Every combination of `CHOICES`; slow, but for those that make every pair meet."""
    fast = pairwise(**CHOICES, optimizer=[optimizer])
    return [
        pytest.param(case, id=str(case), marks=() if case in fast else pytest.mark.slow)
        for case in all_cases(**CHOICES, optimizer=[optimizer])
    ]


def train_offloaded(case: Case, watched: bool = False, **options: Any) -> NetworkModule:
    """The case under the strategy, gradients on the device."""
    precision = CPUOffloadPrecision(case.precision)  # type: ignore[arg-type]
    strategy = CPUOffloadStrategy(gradients="device", precision_plugin=precision)
    return train_with_lightning(case, watched, strategy=strategy, **options)


def assert_bit_for_bit(module: NetworkModule, kind: type[ReferenceLoop] = ReferenceLoop) -> None:
    """Losses, weights, buffers and optimizer state."""
    loop = train_reference(module.case, kind)
    assert_same_losses(module.losses, loop.losses)
    assert_identical(module.snapshot(), loop.snapshot())


def assert_step_by_step(
    module: NetworkModule, kind: type[ReferenceLoop] = ReferenceLoop, rtol: float = STEP_RTOL
) -> None:
    """Every step of a watched module within `rtol`, and losses bit for bit."""
    loop = reference_loop(module.case, kind)
    follow(loop, make_batches(module.case), EPOCHS, module.trail, rtol)
    assert_same_losses(module.losses, loop.losses)


def assert_start_to_end(module: NetworkModule, kind: type[ReferenceLoop] = ReferenceLoop) -> None:
    """Losses, weights, buffers and optimizer state within `RUN_RTOL`."""
    loop = train_reference(module.case, kind)
    assert_close(module.snapshot(), loop.snapshot(), over_a_run(RUN_RTOL))
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(loop.losses), rtol=RUN_RTOL, atol=0)


@pytest.mark.parametrize("case", matrix("sgd"))
def test_torch_arithmetic_is_bit_for_bit(case: Case) -> None:
    assert_bit_for_bit(train_offloaded(case))


@pytest.mark.parametrize("case", matrix("adamw"))
def test_fused_adamw_agrees_at_every_step(case: Case) -> None:
    assert_step_by_step(train_offloaded(case, watched=True))


OTHERS = {
    "optimizer": ["sgd_nesterov", "rmsprop", "adagrad", "nadam"],
    "precision": CHOICES["precision"],
}


@pytest.mark.parametrize("case", all_cases(**OTHERS), ids=str)
def test_other_optimizers_are_bit_for_bit(case: Case) -> None:
    assert_bit_for_bit(train_offloaded(case))


@pytest.mark.parametrize("case", all_cases(optimizer=["adam_l2"], precision=CHOICES["precision"]), ids=str)
def test_fused_adam_with_l2_agrees_at_every_step(case: Case) -> None:
    assert_step_by_step(train_offloaded(case, watched=True))


@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_batch_norm_stays_fp32(precision: str) -> None:
    assert_bit_for_bit(train_offloaded(Case("batchnorm", precision)))


class CountChunks(pl.Callback):
    """Remembers into how many chunks the step was cut."""

    num_chunks = 0

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        regions = trainer.strategy.offload.optimizers[0].regions
        self.num_chunks = sum(len(region.chunks) for region in regions)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", CHOICES["precision"])
@pytest.mark.parametrize("structure", CHOICES["structure"])
def test_parameters_may_spread_over_many_chunks(
    structure: str, precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", 56)  # 14 or 28 elements: parameters begin and end inside a chunk
    count = CountChunks()
    module = train_offloaded(Case(structure, precision, optimizer=optimizer), watched=True, callbacks=[count])
    assert count.num_chunks > pipeline.RING_DEPTH
    assert_bit_for_bit(module) if optimizer == "sgd" else assert_step_by_step(module)


@pytest.mark.parametrize("case", all_cases(optimizer=["adamw", "adam_l2"], precision=CHOICES["precision"]), ids=str)
def test_torch_operations_agree_at_every_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done where numba is missing."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert_step_by_step(train_offloaded(case, watched=True))


@pytest.mark.parametrize("structure", CHOICES["structure"])
def test_fp32_adamw_agrees_from_start_to_end(structure: str) -> None:
    """FP32 weights equal their masters: no rounding flips, so steps need not start from the same state."""
    assert_start_to_end(train_offloaded(Case(structure, "32-true", optimizer="adamw")))


@pytest.mark.parametrize("structure", [*CHOICES["structure"], "batchnorm"])
def test_fp32_is_stock_lightning_bit_for_bit(structure: str) -> None:
    case = Case(structure, "32-true")
    ours, stock = train_offloaded(case), train_with_lightning(case, strategy="auto")
    assert_same_losses(ours.losses, stock.losses)
    assert_identical(ours.snapshot(), stock.snapshot())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_flag_of_the_trainer_does_the_same(precision: str) -> None:
    case = Case(precision=precision)
    assert_bit_for_bit(train_with_lightning(case, strategy="cpu_offload", precision=precision))


@pytest.mark.parametrize("structure", ["tied", "unused", "groups"])
def test_checkpoint_holds_the_reference_state(structure: str, tmp_path: Path) -> None:
    case = Case(structure)
    paths = [tmp_path / "during.ckpt", tmp_path / "after.ckpt"]
    save = pl.callbacks.LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(paths[0]))
    module, loop = train_offloaded(case, callbacks=[save]), train_reference(case)
    module.trainer.save_checkpoint(paths[1])
    for saved in (torch.load(path, weights_only=True) for path in paths):
        weights = {name.removeprefix("network."): tensor for name, tensor in saved["state_dict"].items()}
        assert_identical(Snapshot(weights, saved["optimizer_states"][0]), loop.snapshot())


CHECKS = {
    assert_bit_for_bit: Case(accumulate=3, clip="value"),
    assert_step_by_step: Case(accumulate=3, clip="value", optimizer="adamw"),
    assert_start_to_end: Case(accumulate=3, clip="value", optimizer="adamw", precision="32-true"),
}
"""A case for each comparison with all that the faults touch: clipping, BF16 weights, and a short last window (which
clipping by norm would hide)."""


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (check, fault)
        for check, fault in product(CHECKS, FAULTS)
        # FP32 weights round nothing
        if check is not assert_start_to_end or fault not in (MastersFollowWeights, WideGradientSums)
    ],
)
def test_comparison_notices_a_fault(check: Check, fault: type[ReferenceLoop]) -> None:
    module = train_offloaded(CHECKS[check], watched=True)
    check(module)
    with pytest.raises(AssertionError):
        check(module, fault)
