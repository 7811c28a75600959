"""More than one optimizer, stepped by hand: games, turns, shared parameters, steps inside backward."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.compat.nets import Noted
from tests.compat.twin import RUN_RTOL, assert_twins, ours, run
from tests.models import quiet_trainer

Optimizer = torch.optim.Optimizer
KINDS = {
    "SGD": (torch.optim.SGD, 0.1, 0.0),
    "RMSprop": (torch.optim.RMSprop, 0.01, 0.0),
    "Adam": (torch.optim.Adam, 0.01, RUN_RTOL),
}
"""Class, learning rate, and how far a run may be off: the one-pass Adam rounds in its own order."""


class Gan(pl.LightningModule):
    """Learns to draw from a normal distribution around (2, -1), by a game of two networks.

    Args:
        kind: Optimizer of both.
        lr: Its learning rate.
        way: How the other network is kept out of a turn.
    """

    def __init__(self, kind: type[Optimizer], lr: float, way: str = "toggle") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.kind, self.lr, self.way = kind, lr, way
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return [self.kind(part.parameters(), lr=self.lr) for part in parts], []

    def turn(self, optimizer: Any, loss: Any) -> None:
        if self.way == "toggle":
            self.toggle_optimizer(optimizer)
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        elif self.way == "context":
            with self.toggled_optimizer(optimizer):
                value = loss()
                self.manual_backward(value)
                optimizer.step()
                optimizer.zero_grad()
        else:
            value = loss()
            optimizer.zero_grad()
            value.backward()
            optimizer.optimizer.step()
        self.losses.append(value.detach().clone())

    def draw(self, number: int) -> Tensor:
        """Samples (number, 2)."""
        return self.generator(torch.randn(number, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = nn.functional.binary_cross_entropy_with_logits
        ones = torch.ones(len(batch), 1)

        def of_critic() -> Tensor:
            return loss(self.critic(batch), ones) + loss(self.critic(self.draw(len(batch)).detach()), 0 * ones)

        self.turn(second, of_critic)
        self.turn(first, lambda: loss(self.critic(self.draw(len(batch))), ones))


def play(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Fit on samples of the distribution to be learnt."""
    torch.manual_seed(3)
    data: Any = list(torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(256, 2))
    trainer.fit(module, DataLoader(data, batch_size=32))


@pytest.mark.parametrize("way", ["toggle", "context", "raw"])
@pytest.mark.parametrize("kind", KINDS)
def test_gan(kind: str, way: str) -> None:
    optimizer, lr, rtol = KINDS[kind]
    own = assert_twins(lambda: Gan(optimizer, lr, way), rtol, drive=play)
    assert own.progress["step"] == 16 if way != "raw" else own.progress["step"] == 0
    assert set(own.moved) == set(own.weights)
    assert all(requires_grad for *_, requires_grad in own.tensors.values())


def samples(strategy: Any) -> tuple[Tensor, Tensor]:
    """The mean of samples before and after a game."""
    pl.seed_everything(0, verbose=False)
    module = Gan(torch.optim.Adam, 0.02)
    before = module.draw(500).mean(0).detach()
    play(quiet_trainer(strategy=strategy, max_epochs=5), module)
    torch.manual_seed(4)
    return before, module.draw(500).mean(0).detach()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_gan_learns_what_it_is_shown(precision: str) -> None:
    """In BF16 a game cannot be compared number by number, but its samples must go where those of a plain run go."""
    before, after = samples(ours(precision))
    _, stock = samples("auto")
    assert (after - before).norm() > 1
    assert (after - stock).norm() < 0.1 * (stock - before).norm()


class Shared(Noted):
    """Two optimizers step the same layers, with their own moments, one after another or in turns.

    Args:
        turns: Whether each batch belongs to one of them.
        kinds: Both classes.
        clear: Whether gradients are cleared between the two.
    """

    def __init__(self, turns: bool, kinds: tuple[Any, Any], clear: bool) -> None:
        super().__init__(manual=True)
        self.turns, self.kinds, self.clear = turns, kinds, clear

    def configure_optimizers(self) -> Any:
        first, second = self.kinds
        return first(self.parameters(), lr=0.02), second([*self.inner.parameters(), *self.outer.parameters()], lr=0.01)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if self.turns and batch_idx % 2 != index:
                continue
            loss = self.loss(batch) * (1 + index)
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            optimizer.step()
            if self.clear or index:
                optimizer.zero_grad()


SGD, ADAM, ADAMW, PROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("kinds", [(SGD, PROP), (PROP, ADAMW), (ADAM, ADAMW)], ids=lambda kinds: kinds[0].__name__)
def test_parameters_shared_by_two_optimizers(kinds: tuple[Any, Any], turns: bool, clear: bool) -> None:
    rtol = RUN_RTOL if {ADAM, ADAMW} & set(kinds) else 0.0
    assert_twins(lambda: Shared(turns, kinds, clear), rtol, drive=lambda trainer, module: trainer.fit(module, long()))


def long() -> DataLoader:
    """Six batches."""
    generator = torch.Generator().manual_seed(5)
    data: Any = [torch.randn(4, 8, generator=generator) for _ in range(6)]
    return DataLoader(data, batch_size=None)


def test_shared_parameters_under_automatic_optimization_with_one_frozen_out() -> None:
    """A second optimizer over the same parameters that is never stepped changes nothing."""

    class Idle(Noted):
        def configure_optimizers(self) -> Any:
            self.idle = torch.optim.SGD(self.parameters(), lr=1.0)
            return torch.optim.SGD(self.parameters(), lr=0.1), self.idle

        def optimize(self, batch: Tensor, batch_idx: int) -> None:
            optimizer, _ = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_twins(lambda: Idle(manual=True))


class Turns(Noted):
    """A part trained every batch, another every third, its gradients accumulating in between."""

    def __init__(self, kind: Any, lr: float) -> None:
        super().__init__(manual=True)
        self.kind, self.lr = kind, lr

    def configure_optimizers(self) -> Any:
        return self.kind(self.inner.parameters(), lr=self.lr), self.kind(self.outer.parameters(), lr=self.lr)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        often.step()
        often.zero_grad()
        if batch_idx % 3 == 2:
            self.clip_gradients(seldom, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            seldom.step()
            seldom.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_stepped_at_different_rates(kind: str) -> None:
    optimizer, lr, rtol = KINDS[kind]
    assert_twins(lambda: Turns(optimizer, lr), rtol, drive=lambda trainer, module: trainer.fit(module, long()))


class Contaminated(Noted):
    """The first optimizer's backward leaves gradients in the second's parameters, which add up to its own."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.inner.parameters(), lr=0.1), torch.optim.SGD(self.outer.parameters(), lr=0.1)

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_gradients_of_the_other_network_add_up_as_ever() -> None:
    assert_twins(Contaminated)


class Frozen(Noted):
    """Its first optimizer holds only frozen parameters until the second epoch."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.frozen.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(
            self.outer.parameters(), lr=0.1
        )

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        self.frozen.requires_grad_(self.current_epoch == 1)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*require gradients but are in no optimizer")
def test_an_optimizer_of_frozen_parameters_waits() -> None:
    own = assert_twins(Frozen, max_epochs=3)
    assert "frozen.weight" in own.moved


class InBackward(Noted):
    """Steps each parameter the moment its gradient is there, and frees it: one optimizer for each."""

    def __init__(self, kind: Any, lr: float) -> None:
        super().__init__(manual=True)
        self.kind, self.lr = kind, lr

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizers = {p: self.kind([p], lr=self.lr) for p in trained}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(step)
        return list(optimizers.values())

    def optimize(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_inside_backward(kind: str) -> None:
    optimizer, lr, rtol = KINDS[kind]
    own = assert_twins(lambda: InBackward(optimizer, lr), rtol, max_epochs=2)
    assert {"inner.weight", "outer.bias", "norm.weight"} <= own.moved


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_steps_inside_backward_move_bf16_weights(precision: str) -> None:
    stock = run(lambda: InBackward(torch.optim.SGD, 0.1))
    own = run(lambda: InBackward(torch.optim.SGD, 0.1), ours(precision))
    assert own.moved == stock.moved
