"""Copies of the module, the optimizer, the strategy and the trainer, made while the offload is attached."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.net import (
    PRECISIONS,
    Net,
    adamw,
    anatomy,
    assert_equal,
    fit,
    weights,
)


class Teacher(Net):
    """Copies itself, and what drives it, in the middle of training."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.copies: dict[str, Any] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer = self.trainer
            whole = {
                "module": self,
                "trainer": trainer,
                "strategy": trainer.strategy,
                "optimizer": trainer.optimizers[0],
            }
            self.copies = {f"pickled {name}": pickle.loads(pickle.dumps(value)) for name, value in whole.items()}
            self.copies |= {f"deep {name}": copy.deepcopy(value) for name, value in whole.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": {}}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a module, of an optimizer, or of what holds them."""
    if isinstance(value, pl.Trainer):
        yield from tensors_in(value.strategy)
    elif isinstance(value, pl.strategies.Strategy):
        yield from tensors_in(value.lightning_module)
        for optimizer in value.optimizers:
            yield from tensors_in(optimizer)
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    else:
        for group in value.param_groups:
            yield from group["params"]
        for state in value.state.values():
            yield from (item for item in state.values() if isinstance(item, Tensor))


class TestCopies:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_made_during_fit_are_on_their_own(self, precision: str) -> None:
        net, undisturbed = Teacher(), Net(adamw)
        fit(undisturbed, precision)
        trainer = fit(net, precision)
        assert_equal(weights(net), weights(undisturbed))
        own = {tensor.data_ptr() for thing in (net, trainer.optimizers[0]) for tensor in tensors_in(thing)}
        values = weights(net)
        for name, value in net.copies.items():
            found = list(tensors_in(value))
            assert found, name
            assert not own & {tensor.data_ptr() for tensor in found if tensor.numel()}, name
            with torch.no_grad():
                for tensor in found:
                    tensor.zero_()
        assert_equal(weights(net), values)

    @pytest.mark.parametrize("kind", ["pickled module", "deep module"])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_the_module_train_elsewhere(self, precision: str, kind: str) -> None:
        net = Teacher()
        fit(net, precision)
        values = weights(net)
        twin = net.copies[kind].float()
        fit(twin, precision)
        assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
        assert_equal(weights(net), values)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_the_module_can_be_called_at_once(self, precision: str) -> None:
        outputs = []

        def call(trainer: pl.Trainer, module: Net, outputs_: Any, batch: Tensor, batch_idx: int) -> None:
            twin = copy.deepcopy(module)
            outputs.append((twin(batch), module(batch)))
            twin(batch).sum().backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()

        net, undisturbed = Net(), Net()
        fit(net, precision, on_train_batch_end=call)
        fit(undisturbed, precision)
        for twin_output, output in outputs:
            assert torch.equal(twin_output, output)
        # The calls above move the statistics of the norm, and with nothing else the training.
        assert_equal(*({k: v for k, v in weights(n).items() if k.startswith("frozen")} for n in (net, undisturbed)))

    def test_made_after_fit(self) -> None:
        net = Net(adamw)
        trainer = fit(net)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert anatomy(twin).keys() == anatomy(net).keys()
            assert_equal(weights(twin), weights(net))
        twin = copy.deepcopy(trainer)
        assert_equal(weights(twin.lightning_module), weights(net))

    def test_of_a_layer_do_not_drag_the_others(self) -> None:
        sizes = []

        class Wide(Net):
            def __init__(self) -> None:
                super().__init__()
                self.wide = nn.Linear(8, 4096)

            def loss(self, x: Tensor) -> Tensor:
                return super().loss(x) + self.wide(x).mean()

        def look(trainer: pl.Trainer, module: Wide, *_: Any) -> None:
            sizes.append(len(pickle.dumps(module.inner)))

        fit(Wide(), on_train_batch_end=look)
        assert max(sizes) < 16 * 1024  # 144 parameters and the module around them; the other layer has 32768
