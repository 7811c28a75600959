"""A gradient that is not finite: the step is not made, weights and state stay as they are, and somebody is told."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy, OffloadMonitor, kernels
from lightning_cpu_offload.offload.nonfinite import SKIPS_IN_A_ROW, is_finite
from tests.models import quiet_trainer
from tests.reference import Snapshot, assert_identical

BATCHES_PER_STEP = 2


class Module(pl.LightningModule):
    """Spoils gradients of some parameters in some batches, and keeps the state after each step."""

    def __init__(self, optimizer: str, spoil: dict[int, float], names: tuple[str, ...] = ("first.weight",)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.optimizer = optimizer
        self.spoil = spoil
        self.spoiled = [parameter for name, parameter in self.named_parameters() if name in names]
        self.states: list[Snapshot] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(torch.tanh(self.first(batch))).float().pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if (batch_idx + 1) % BATCHES_PER_STEP == 0:
            self.states.append(self.snapshot())

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.state_dict()), self.trainer.optimizers[0].state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Spoiler(pl.Callback):
    """Writes NaN or infinity into gradients, as backward through a broken model leaves them."""

    def on_after_backward(self, trainer: pl.Trainer, module: Module) -> None:  # type: ignore[override]
        value = module.spoil.get(trainer.fit_loop.epoch_loop.batch_idx)
        if value is not None:
            for parameter in module.spoiled:
                assert parameter.grad is not None
                parameter.grad.add_(torch.full_like(parameter.grad, value))


def fit(module: Module, num_batches: int = 8, callbacks: Any = (), **options: Any) -> pl.Trainer:
    strategy = CPUOffloadStrategy(**{name: options.pop(name) for name in ("gradients", "nonfinite") if name in options})
    torch.manual_seed(1)
    data: Any = torch.utils.data.DataLoader(torch.randn(num_batches, 4, 6), batch_size=None)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=BATCHES_PER_STEP,
        callbacks=[Spoiler(), *callbacks],
        **options,
    )
    trainer.fit(module, data)
    return trainer


MODES = [("device", "adamw"), ("device", "sgd"), ("host", "adamw"), ("host", "sgd")]
modes = pytest.mark.parametrize(("gradients", "optimizer"), MODES)


@modes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("names", [("last.bias",), ("first.weight", "first.bias", "last.weight", "last.bias")], ids=len)
def test_a_skipped_step_leaves_everything_as_it_was(
    gradients: str, optimizer: str, value: float, clip: float | None, batch: int, names: tuple[str, ...]
) -> None:
    module = Module(optimizer, {batch: value}, names)
    with pytest.warns(UserWarning, match=rf"step 2: the gradient of '{names[0]}' is not finite.*skipped") as caught:
        fit(module, gradients=gradients, gradient_clip_val=clip)
    (text,) = (str(warning.message) for warning in caught if "not finite" in str(warning.message))
    assert (f"{len(names) - 1} more" in text) == (len(names) > 1)
    assert_identical(module.states[1], module.states[0])
    with pytest.raises(AssertionError):
        assert_identical(module.states[2], module.states[1])
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())


@modes
def test_training_goes_on_as_if_the_step_had_not_been(gradients: str, optimizer: str) -> None:
    """As in a run whose second window has no loss, and so no gradients."""

    class Never(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) if batch_idx not in (2, 3) else None  # type: ignore[return-value]

    skipping, never = Module(optimizer, {2: math.nan}), Never(optimizer, {})
    with pytest.warns(UserWarning, match="not finite"):
        fit(skipping, gradients=gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, for a training_step that returns nothing
        fit(never, gradients=gradients)
    assert_identical(skipping.states[-1], never.states[-1])


@modes
def test_raise(gradients: str, optimizer: str) -> None:
    module = Module(optimizer, {4: math.nan})
    with pytest.raises(FloatingPointError, match=r"step 3: the gradient of 'first\.weight' is not finite.*skip"):
        fit(module, gradients=gradients, nonfinite="raise")
    assert len(module.states) == 2
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, module.states[1].entries[f"weight/{name}"])
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


@modes
def test_many_in_a_row_are_an_error(gradients: str, optimizer: str) -> None:
    module = Module(optimizer, dict.fromkeys(range(2, 100), math.inf))
    with (
        pytest.warns(UserWarning, match="not finite"),
        pytest.raises(FloatingPointError, match=rf"step {1 + SKIPS_IN_A_ROW}: .*Lower the learning rate"),
    ):
        fit(module, num_batches=100, gradients=gradients)
    assert len(module.states) == SKIPS_IN_A_ROW  # one good step, and all bad ones but the last


def test_skips_with_good_steps_between_go_on() -> None:
    module = Module("adamw", {batch: math.nan for batch in range(40) if batch % 4 == 2})
    with pytest.warns(UserWarning, match="not finite"):
        trainer = fit(module, num_batches=40)
    assert len(module.states) == 20
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 10


def test_torch_operations_skip_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    test_a_skipped_step_leaves_everything_as_it_was("device", "adamw", math.nan, None, 2, ("last.bias",))
    test_a_skipped_step_leaves_everything_as_it_was("host", "adamw", math.nan, None, 2, ("last.bias",))


def test_the_log_counts_them() -> None:
    records: list[dict[str, float]] = []

    class Logger(pl.loggers.CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            records.append(dict(metrics))

        def save(self) -> None:
            pass

    module = Module("adamw", {0: math.nan, 4: math.inf})
    data: Any = torch.utils.data.DataLoader(torch.randn(8, 4, 6), batch_size=None)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=CPUOffloadStrategy(),
        max_epochs=1,
        accumulate_grad_batches=BATCHES_PER_STEP,
        callbacks=[Spoiler(), OffloadMonitor(log_every_n_steps=1)],
        logger=Logger("."),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.warns(UserWarning, match="not finite"):
        trainer.fit(module, data)
    assert [record["offload/skipped_steps"] for record in records if "offload/skipped_steps" in record] == [1, 1, 2, 2]


def test_a_sparse_gradient_without_elements_is_finite_and_its_elements_are_looked_at() -> None:
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0, 3), (4, 3))
    infinite = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([[1.0, math.inf, 0.0]]), (4, 3))
    assert is_finite([empty])
    assert is_finite([empty, torch.ones(5), None])
    assert not is_finite([empty, infinite])
