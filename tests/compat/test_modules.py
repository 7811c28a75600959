"""Every layer of torch, and every unusual use of tensors, trains as under stock Lightning."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from tests.compat.layers import LAYERS
from tests.compat.oddities import ODDITIES
from tests.compat.twin import Outcome, assert_twins, compare, ours, run

PROGRAMS = {**LAYERS, **ODDITIES}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning")


class Program(pl.LightningModule):
    """Trains one of `PROGRAMS` by SGD, whose arithmetic must be the same to the last bit."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net: Any = PROGRAMS[name]()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02)


EVERY = [pytest.param(name, marks=pytest.mark.slow) if name == "compiled" else name for name in PROGRAMS]

UNFIT = {
    "bf16-true": {"orthogonal", "other_dtypes"},  # BF16 inverses give NaN; `torch.fft` takes no BF16
    "bf16-mixed": set[str](),
}
"""What stock Lightning computes in FP32 only."""


@pytest.mark.parametrize("name", EVERY)
def test_trains_as_stock(name: str) -> None:
    assert_twins(lambda: Program(name), limit_val_batches=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_in_bf16(name: str) -> None:
    """The losses are those of stock FP32 but for rounding, the same weights move, and the module comes back in FP32.

    What a checkpoint holds at the end of training is what is handed back.
    """
    saved: dict[str, Tensor] = {}

    def train(strategy: Any) -> Outcome:
        return run(lambda: Program(name), strategy, callbacks=lambda: [save], limit_val_batches=1.0)

    save = LambdaCallback(on_train_end=lambda trainer, module: saved.update(copy.deepcopy(module.state_dict())))

    stock = train("auto")
    for precision in ("bf16-mixed", "bf16-true"):
        if name in UNFIT[precision]:
            continue
        own = train(ours(precision))
        assert own.tensors == stock.tensors
        assert own.moved >= stock.moved
        compare(precision, dict(own.weights), saved)
        # A few roundings of weights and activations, by 0.4 % each; 0.02 for outputs of either sign, which may cancel.
        torch.testing.assert_close(losses(own), losses(stock), rtol=0.03, atol=0.02)


def losses(outcome: Outcome) -> Tensor:
    """Of the training steps."""
    return torch.stack([note for note in outcome.notes if isinstance(note, Tensor)]).float()
