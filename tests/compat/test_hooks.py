"""Hooks on gradients and on optimizers, registered before, during and after the module is attached."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.compat.nets import BOTH, Noted
from tests.compat.twin import assert_twins, ours, run
from tests.net import batches, sgd

WHERE = [
    ("halves", "__init__"),
    ("halves", "configure_optimizers"),
    ("masks", "on_fit_start"),
    ("notes", "__init__"),
    ("notes", "on_train_batch_start"),
    ("clips when accumulated", "__init__"),
    ("clips when accumulated", "on_train_batch_start"),
    ("drops when accumulated", "configure_optimizers"),
]
"""What a hook does, and where it is registered."""


def clamp(parameter: Tensor) -> None:
    """A hook that writes into the gradient."""
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


class Hooked(Noted):
    """Registers a hook on gradients at some place, once.

    Args:
        kind: What the hook does.
        place: Where it is registered.
    """

    def __init__(self, kind: str, place: str, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.kind, self.place, self.handle = kind, place, None
        self.register("__init__")

    def register(self, place: str) -> None:
        """Register the hook, if this is the place."""
        if place != self.place or self.handle is not None:
            return
        weight = self.inner.weight
        if self.kind == "halves":
            self.handle = weight.register_hook(lambda gradient: gradient * 0.5)
        elif self.kind == "masks":
            mask = (torch.arange(8) % 2).float()
            self.handle = weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
        elif self.kind == "notes":
            self.handle = weight.register_hook(lambda gradient: self.notes.append(gradient.clone()))
        elif self.kind == "clips when accumulated":
            self.handle = weight.register_post_accumulate_grad_hook(clamp)
        elif self.kind == "drops when accumulated":
            self.handle = weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def configure_optimizers(self) -> Any:
        self.register("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.register("on_fit_start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.register("on_train_batch_start")


@pytest.mark.parametrize(("kind", "place"), WHERE)
@BOTH
def test_hooks_on_gradients(kind: str, place: str, optimizer: Any, rtol: float) -> None:
    assert_twins(lambda: Hooked(kind, place, optimizer), rtol, accumulate_grad_batches=2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_hooks_on_gradients_in_bf16(precision: str) -> None:
    own = run(lambda: Hooked("masks", "__init__", sgd), ours(precision))
    moved = own.weights["inner.weight"] != own.before["inner.weight"]
    assert moved.any(0).tolist() == [False, True] * 4


class Activations(Noted):
    """Reads gradients of activations by full backward hooks of its parts, and by `retain_grad`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.outer.register_full_backward_hook(self.keep)

    def keep(self, part: nn.Module, inputs: Any, outputs: Any) -> None:
        self.notes.append([gradient.clone() for gradient in (*inputs, *outputs)])

    def loss(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        hidden.retain_grad()
        self.hidden = hidden
        return self.outer(hidden).square().mean()

    def on_after_backward(self) -> None:
        self.notes.append(self.hidden.grad.clone())


@BOTH
def test_hooks_on_activations(optimizer: Any, rtol: float) -> None:
    assert len(assert_twins(partial(Activations, optimizer), rtol).notes) >= 6


class OnFrozen(Noted):
    """Unfreezes a parameter for as long as it takes to register a hook, and trains it in the second epoch."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        weight = self.frozen.weight
        weight.requires_grad_(True)
        weight.register_post_accumulate_grad_hook(lambda p: self.notes.append(p.grad.clone()))
        weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.current_epoch == 1)


@BOTH
def test_hooks_on_frozen_parameters_survive(optimizer: Any, rtol: float) -> None:
    own = assert_twins(partial(OnFrozen, optimizer), rtol, max_epochs=3)
    assert sum(getattr(note, "shape", None) == (16, 16) for note in own.notes) == 3
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        Noted().frozen.weight.register_post_accumulate_grad_hook(print)


class OfSteps(Noted):
    """Registers hooks on its optimizer's step.

    Args:
        way: What the hooks do.
        optimizer: Makes it.
        raw: Steps torch's own object, by hand and without a closure.
    """

    def __init__(self, way: str, optimizer: Any, raw: bool) -> None:
        super().__init__(optimizer, manual=raw)
        self.way = way

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.way == "notes":
            optimizer.register_step_pre_hook(lambda *_: self.look("before"))
            optimizer.register_step_post_hook(lambda *_: self.notes.append(self.inner.weight.detach().clone()))
        elif self.way == "clears after":
            optimizer.register_step_post_hook(lambda *_: self.zero_grad())
        elif self.way == "averages after":
            self.average = self.inner.weight.detach().clone()
            optimizer.register_step_post_hook(lambda *_: self.average.lerp_(self.inner.weight.detach(), 0.1))
        elif self.way == "clamps after":
            optimizer.register_step_post_hook(lambda *_: self.inner.weight.data.clamp_(-0.2, 0.2))
        elif self.way == "adds before":
            optimizer.register_step_pre_hook(self.add)
        elif self.way == "groups":
            optimizer.register_step_post_hook(self.look_at_groups)
        elif self.way == "other closure":
            optimizer.register_step_pre_hook(self.exchange_closure)
        return optimizer

    def add(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(0.01)

    def exchange_closure(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        return (args[0],), {"closure": lambda: [self.notes.append("closure"), closure()][1]}

    def look_at_groups(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        own = {parameter: name for name, parameter in self.named_parameters()}
        self.notes.append([own[parameter] for parameter in optimizer.param_groups[0]["params"]])
        self.notes.append(sorted(own[parameter] for parameter in optimizer.state))

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_train_end(self) -> None:
        self.notes.append(getattr(self, "average", None))


OF_STEPS = ["notes", "clears after", "averages after", "clamps after", "adds before", "groups", "other closure"]


@pytest.mark.parametrize("raw", [False, True], ids=["closure", "raw"])
@pytest.mark.parametrize("way", OF_STEPS)
@BOTH
def test_hooks_on_steps(way: str, raw: bool, optimizer: Any, rtol: float) -> None:
    """With a closure, pre-hooks fire before it, and see the gradients of the step before."""
    assert_twins(
        lambda: OfSteps(way, optimizer, raw),
        rtol,
        drive=lambda trainer, module: trainer.fit(module, batches(4), batches(4)),
    )


class Late(Noted):
    """Registers its step hooks when training has begun, and removes them again."""

    def on_train_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.handles = [
            optimizer.register_step_pre_hook(lambda *_: self.look("before")),
            optimizer.register_step_post_hook(lambda *_: self.notes.append(self.inner.weight.detach().clone())),
        ]

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            for handle in self.handles:
                handle.remove()


@BOTH
def test_hooks_on_steps_registered_late(optimizer: Any, rtol: float) -> None:
    own = assert_twins(partial(Late, optimizer), rtol)
    assert sum(isinstance(note, tuple) for note in own.notes) == 2


def test_hooks_of_all_optimizers() -> None:
    """Torch's global step hooks, as profilers use them."""
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        assert_twins(Noted)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after"] * 6


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradients_in_a_dtype_of_their_own(precision: str) -> None:
    """A BF16 weight may have FP32 gradients where torch can do so; they reach the masters as BF16 carries them."""

    class Wide(Noted):
        def on_train_start(self) -> None:
            self.outer.bias.grad_dtype = torch.float32
            self.outer.weight.grad_dtype = torch.float32

        def on_after_backward(self) -> None:
            self.outer.weight.grad = torch.full((4, 16), 1 + 2**-12)

    own = run(partial(Wide, sgd), ours(precision))
    step = own.before["outer.weight"] - own.weights["outer.weight"]
    # Three steps with momentum 0.9: 1 + 1.9 + 2.71 times the gradient, rounded by a part in 512 at most.
    expected = torch.full((4, 16), 0.1 * 5.61 * (1 + 2**-12))
    torch.testing.assert_close(step, expected, rtol=1e-6 if precision == "32-true" else 2**-9, atol=1e-6)


def test_hooks_are_gone_afterwards() -> None:
    own_hooks = {}

    class Keeps(Noted):
        def configure_optimizers(self) -> Any:
            own_hooks["optimizer"] = super().configure_optimizers()
            return own_hooks["optimizer"]

    run(Keeps, ours())
    left = {name: len(value) for name, value in vars(own_hooks["optimizer"]).items() if name.endswith("_hooks")}
    assert not any(left.values()), left
