"""When and how a step is made: closures, batches without a loss, accumulation, clearing, overridden hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from tests.compat.nets import BOTH, Noted
from tests.compat.twin import assert_twins
from tests.net import adamw, batches, sgd


def on(number: int) -> Callable[[pl.Trainer, pl.LightningModule], None]:
    """A drive that fits on so many batches."""
    return lambda trainer, module: trainer.fit(module, batches(number), batches(number))


def lbfgs(module: Any) -> torch.optim.Optimizer:
    """Calls its closure up to four times a step."""
    return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)


class Raw(Noted):
    """Optimizes manually; a closure is made for each batch, and handed over in the way asked for."""

    def __init__(self, way: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer, manual=True)
        self.way = way

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        raw = self.way.startswith("raw")
        optimizer: Any = self.optimizers(use_pl_optimizer=not raw)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            if raw:
                loss.backward()  # not by `manual_backward`
            else:
                self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            return loss

        if "positional" in self.way:
            self.notes.append(optimizer.step(closure).detach().clone())
        elif "keyword" in self.way:
            self.notes.append(optimizer.step(closure=closure).detach().clone())
        else:
            closure()
            optimizer.step()


WAYS = ["raw", "raw positional", "raw keyword", "wrapped", "wrapped positional", "wrapped keyword"]


@pytest.mark.parametrize("way", WAYS)
@BOTH
def test_manual_steps(way: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Raw(way, optimizer), rtol, max_epochs=2)


@pytest.mark.parametrize("way", [way for way in WAYS if " " in way])
def test_closures_that_are_called_again_and_again(way: str) -> None:
    own = assert_twins(lambda: Raw(way, lbfgs), max_epochs=2)
    assert sum(isinstance(note, Tensor) for note in own.notes) > 6 + 6  # losses, and what `step` returned


class Skips(Noted):
    """Has no loss for some batches."""

    def __init__(self, optimizer: Any, skipped: tuple[int, ...]) -> None:
        super().__init__(optimizer)
        self.skipped = skipped

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*found no gradient in any of its", "ignore:.*returned `None`")
@pytest.mark.parametrize(("skipped", "accumulate"), [((0,), 1), ((1,), 2), ((0, 1), 2), ((1, 4), 1)])
@BOTH
def test_training_step_that_returns_none(
    optimizer: Any, rtol: float, skipped: tuple[int, ...], accumulate: int
) -> None:
    assert_twins(lambda: Skips(optimizer, skipped), rtol, drive=on(5), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("number", [4, 5])
@BOTH
def test_accumulation_with_a_short_last_window(optimizer: Any, rtol: float, number: int) -> None:
    own = assert_twins(lambda: Noted(optimizer), rtol, drive=on(number), accumulate_grad_batches=3, max_epochs=2)
    assert own.progress["step"] == 2 * 2


@BOTH
def test_accumulation_that_changes_between_epochs(optimizer: Any, rtol: float) -> None:
    own = assert_twins(
        lambda: Noted(optimizer),
        rtol,
        drive=on(4),
        max_epochs=3,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})],
    )
    assert own.progress["step"] == 4 + 2 + 1


class Accumulates(Noted):
    """Accumulates by hand: no clearing until the step, which comes every second batch."""

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@BOTH
def test_accumulation_by_hand(optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Accumulates(optimizer, manual=True), rtol, drive=on(5), max_epochs=2)
    assert own.progress["step"] == 4


class Clears(Noted):
    """Clears gradients on a road of its own, or not at every step, or never."""

    def __init__(self, road: str, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.road = road

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.road == "optimizer":
            optimizer.zero_grad()
        elif self.road == "to zero":
            optimizer.zero_grad(set_to_none=False)
        elif self.road == "module":
            self.zero_grad()
        elif self.road == "module to zero":
            self.zero_grad(set_to_none=False)
        elif self.road == "part":
            self.inner.zero_grad()
        elif self.road == "wrapper":
            self.optimizers().zero_grad()
        elif self.road == "by hand":
            for parameter in self.parameters():
                parameter.grad = None
        elif self.road == "every other" and batch_idx % 2:
            optimizer.zero_grad()


ROADS = ["optimizer", "to zero", "module", "module to zero", "part", "wrapper", "by hand", "every other", "never"]


@pytest.mark.parametrize("road", ROADS)
@BOTH
def test_clearing_by_every_road(road: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Clears(road, optimizer), rtol, drive=on(5))


class Patched(Noted):
    """Replaces `zero_grad` on the optimizer object, and on itself."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plain = optimizer.zero_grad

        def counted(*args: Any, **kwargs: Any) -> None:
            self.notes.append("cleared")
            plain(*args, **kwargs)

        optimizer.zero_grad = counted
        return optimizer

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers(use_pl_optimizer=bool(batch_idx % 2)).zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@BOTH
def test_zero_grad_that_the_user_replaced(optimizer: Any, rtol: float) -> None:
    own = assert_twins(lambda: Patched(optimizer, manual=True), rtol, drive=on(4))
    assert "cleared" in own.notes


class Backward(Noted):
    """Overrides `backward`."""

    def __init__(self, way: str, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.way = way

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.way == "twice":
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        elif self.way == "scaled":
            (loss * 4).backward()
            for parameter in (p for p in self.parameters() if p.grad is not None):
                parameter.grad /= 4
        elif self.way == "some inputs":
            loss.backward(inputs=[self.inner.weight, self.outer.bias])
        elif self.way == "by autograd.grad":
            trained = [p for p in self.parameters() if p.requires_grad]
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.mark.parametrize("way", ["twice", "scaled", "some inputs", "by autograd.grad"])
@BOTH
def test_backward_that_is_overridden(way: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Backward(way, optimizer), rtol)


class Overridden(Noted):
    """Overrides `optimizer_step`."""

    def __init__(self, way: str, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.way = way

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.way == "warm-up":
            optimizer.step(closure=closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 4)
        elif self.way == "every other":
            if batch_idx % 2:
                optimizer.step(closure=closure)
            else:
                closure()
        elif self.way == "closure first":
            self.notes.append(closure())
            optimizer.step()
        elif self.way == "unwrapped":
            optimizer.optimizer.step(closure)
        elif self.way == "twice":
            optimizer.step(closure=closure)
            optimizer.step(closure=closure)
        elif self.way == "super":
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.notes.append(self.inner.weight.detach().clone())
        elif self.way == "keeps old":
            old = {name: value.detach().clone() for name, value in self.named_parameters()}
            optimizer.step(closure=closure)
            with torch.no_grad():
                for name, value in self.named_parameters():
                    value.lerp_(old[name], 0.5)


STEPS = ["warm-up", "every other", "closure first", "unwrapped", "twice", "super", "keeps old"]


@pytest.mark.parametrize("way", STEPS)
@BOTH
def test_optimizer_step_that_is_overridden(way: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Overridden(way, optimizer), rtol, drive=on(6))


class Rollback(Noted):
    """Takes a step back where the loss grew: weights and optimizer state of before."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.kept_state = {"state": {}, **{k: v for k, v in optimizer.state_dict().items() if k == "param_groups"}}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.load_state_dict(self.kept)
            self.optimizers(use_pl_optimizer=False).load_state_dict(self.kept_state)


@BOTH
def test_a_step_taken_back(optimizer: Any, rtol: float) -> None:
    assert_twins(partial(Rollback, optimizer), rtol, drive=on(4))


def test_no_optimizer_at_all() -> None:
    """`configure_optimizers` may return None: Lightning goes through the motions."""
    assert_twins(lambda: Noted(lambda module: None), trains=False, ignore=["optimizers"])


def test_max_steps_counts_optimizer_steps() -> None:
    own = assert_twins(lambda: Noted(adamw), 1e-4, max_epochs=-1, max_steps=4, accumulate_grad_batches=2)
    assert own.progress["step"] == 4
