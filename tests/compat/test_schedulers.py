"""Every learning-rate scheduler of torch, and schedules of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor
from torch.optim import lr_scheduler

from tests.compat.nets import BOTH, Noted
from tests.compat.twin import RUN_RTOL, assert_twins, fit, ours, run
from tests.net import Rows, adamw, sgd

SCHEDULERS = {
    name: kind
    for name, kind in vars(torch.optim.lr_scheduler).items()
    if inspect.isclass(kind)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and kind.__module__.startswith("torch.optim")
    and not name.startswith("_")
    and name != "LRScheduler"
}
SCHEDULERS["SWALR"] = torch.optim.swa_utils.SWALR

OPTIONS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.5},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {"total_iters": 7},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.05, "step_size_up": 2, "cycle_momentum": True},
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 20},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 10.0},
    "SWALR": {"swa_lr": 0.05, "anneal_epochs": 3},
    "ChainedScheduler": {},
    "SequentialLR": {},
}


def schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler over the optimizer, with what it needs."""
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler([schedule(part, optimizer) for part in ("ConstantLR", "ExponentialLR")])
    if name == "SequentialLR":
        parts = [schedule(part, optimizer) for part in ("LinearLR", "CosineAnnealingLR")]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    return SCHEDULERS[name](optimizer, **OPTIONS[name])


class Scheduled(Noted):
    """Under a scheduler that steps every batch, or every epoch."""

    def __init__(self, optimizer: Any, make: Callable[[Any], Any], interval: str = "step") -> None:
        super().__init__(optimizer)
        self.make, self.interval = make, interval

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.notes.append([dict(group, params=None) for group in self.optimizers().param_groups])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        config = {"scheduler": self.make(optimizer), "interval": self.interval, "monitor": "loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


# AdamW, as the kernel reads the settings at each step by itself; and SGD for those that change more than the rate.
CASES = [(name, adamw, RUN_RTOL) for name in SCHEDULERS]
CASES += [(name, sgd, 0.0) for name in ("CyclicLR", "OneCycleLR", "ReduceLROnPlateau")]


@pytest.mark.parametrize(("name", "optimizer", "rtol"), CASES)
def test_each_scheduler(name: str, optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Scheduled(optimizer, lambda made: schedule(name, made)), rtol, max_epochs=2)
    rates = {groups[0]["lr"] for groups in own.notes if isinstance(groups, list)}
    assert len(rates) > 1, "the learning rate never changed"
    assert len(own.checkpoint["lr_schedulers"]) == 1


def test_schedulers_are_found() -> None:
    assert {"OneCycleLR", "ReduceLROnPlateau", "SequentialLR", "CosineAnnealingWarmRestarts", "SWALR"} <= set(
        SCHEDULERS
    )


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "OneCycleLR", "SWALR"])
@BOTH
def test_once_an_epoch(name: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Scheduled(optimizer, lambda made: schedule(name, made), "epoch"), rtol, max_epochs=4)


class ByHand(Noted):
    """Steps its scheduler itself, also one that wants the metric."""

    def __init__(self, optimizer: Any, name: str) -> None:
        super().__init__(optimizer, manual=True)
        self.name = name

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [schedule(self.name, optimizer)] if self.name != "ReduceLROnPlateau" else [
            {"scheduler": schedule(self.name, optimizer), "monitor": "loss"}
        ]

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step(*([float(loss)] if self.name == "ReduceLROnPlateau" else []))
        self.losses.append(loss.detach().clone())


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
@BOTH
def test_stepped_by_hand(name: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: ByHand(optimizer, name), rtol, max_epochs=2)


class Wavy:
    """A schedule of the user's own, which torch does not know: it has a `step` and a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (2 + (-1) ** self.count)
            group["weight_decay"] = 0.01 * self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Own(Scheduled):
    """Steps it in `lr_scheduler_step`."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@BOTH
def test_schedule_of_the_users_own(optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Own(optimizer, Wavy), rtol, max_epochs=2)


@BOTH
def test_groups_with_rates_of_their_own(optimizer: Any, rtol: float) -> None:
    def split(module: Any) -> torch.optim.Optimizer:
        groups = [{"params": [*module.inner.parameters()], "lr": 0.05}, {"params": [*module.outer.parameters()]}]
        return type(optimizer(module))(groups, lr=0.01)

    own = assert_twins(lambda: Scheduled(split, lambda made: schedule("CosineAnnealingLR", made)), rtol, max_epochs=2)
    first, second = own.optimizers[0]["groups"]
    assert first["lr"] == pytest.approx(5 * second["lr"])


def test_a_learning_rate_in_a_tensor_is_scheduled_in_place() -> None:
    def tensor(module: Any) -> torch.optim.Optimizer:
        return adamw(module, lr=torch.tensor(0.01))

    assert_twins(lambda: Scheduled(tensor, lambda made: schedule("LinearLR", made)), 1e-4, max_epochs=2)


@pytest.mark.parametrize("number", [1, 2])
def test_learning_rate_monitor_has_the_tags_of_a_plain_run(number: int) -> None:
    class Tagged(Noted):
        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.inner, self.outer)[:number]]
            return made, [schedule("StepLR", optimizer) for optimizer in made]

        def optimize(self, batch: Tensor, batch_idx: int) -> None:
            for optimizer in self.trainer.strategy._lightning_optimizers:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    rows = []
    for strategy in ("auto", ours(), ours("bf16-mixed")):
        logger = Rows()
        run(
            lambda: Tagged(sgd, manual=True),
            strategy,
            callbacks=lambda: [LearningRateMonitor("step")],
            drive=lambda trainer, module, logger=logger: _fit_with(trainer, module, logger),
            log_every_n_steps=1,
        )
        rows.append(logger.rows)
    assert rows[0]
    assert rows[0] == rows[1] == rows[2]


def _fit_with(trainer: Any, module: Any, logger: Any) -> None:
    trainer.loggers = [logger]
    fit(trainer, module)
