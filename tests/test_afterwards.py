"""What a run leaves behind: the module as it came, in FP32 on the CPU, with the values it should have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.models import quiet_trainer
from tests.net import (
    PRECISIONS,
    Net,
    adamw,
    anatomy,
    assert_as_stock,
    assert_equal,
    assert_free,
    batches,
    fit,
    offload,
    sgd,
    weights,
)

RUNS = ["fit", "validate", "test", "predict"]


def run(trainer: pl.Trainer, function: str, module: pl.LightningModule) -> None:
    """Fits, validates, tests or predicts."""
    options = {"verbose": False} if function in ("validate", "test") else {}
    getattr(trainer, function)(module, batches(), **options)


def add_forward_hook(net: Net) -> None:
    net.outer.register_forward_hook(lambda *_: None)


def add_state_dict_hook(net: Net) -> None:
    net.norm.register_state_dict_post_hook(lambda *_: None)


def add_gradient_hook(net: Net) -> None:
    net.inner.weight.register_post_accumulate_grad_hook(lambda _: None)


def add_attribute(net: Net) -> None:
    net.inner.forward = net.inner.forward  # type: ignore[method-assign]


def change_parameter(net: Net) -> None:
    net.inner.bfloat16()


def change_buffer(net: Net) -> None:
    net.gain = net.gain.half()


def replace_parameter(net: Net) -> None:
    net.inner.weight = nn.Parameter(net.inner.weight.detach())


TRACES = [
    add_forward_hook,
    add_state_dict_hook,
    add_gradient_hook,
    add_attribute,
    change_parameter,
    change_buffer,
    replace_parameter,
]


@pytest.mark.parametrize("trace", TRACES)
def test_anatomy_shows_every_trace(trace: Callable[[Net], None]) -> None:
    net = Net()
    before = anatomy(net)
    assert anatomy(net) == before
    trace(net)
    assert anatomy(net) != before


def test_assert_free_can_fail() -> None:
    net = Net()
    trainer = fit(net, None)
    (optimizer,) = trainer.optimizers
    assert_free(optimizer, net)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(AssertionError):
        assert_free(optimizer, net)
    handle.remove()
    optimizer.state[net.inner.weight]["momentum_buffer"] = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_free(optimizer, net)


def test_assert_as_stock_can_fail() -> None:
    learning_rates = iter([0.1, 0.1001])
    with pytest.raises(AssertionError, match=r"inner\.weight"):
        assert_as_stock(lambda: Net(partial(sgd, lr=next(learning_rates))))
    with pytest.raises(AssertionError, match="nothing was trained"):
        assert_as_stock(lambda: Net(partial(sgd, lr=0.0)))


class TestAfterwards:
    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("function", RUNS)
    def test_nothing_is_left(self, function: str, precision: str) -> None:
        net = Net(adamw)
        before, values = anatomy(net), weights(net)
        trainer = quiet_trainer(strategy=offload(precision), max_epochs=1)
        run(trainer, function, net)
        assert anatomy(net) == before
        assert trainer.strategy.offload is None
        if function == "fit":
            assert_free(trainer.optimizers[0], net)
            assert not torch.equal(net.inner.weight, values["inner.weight"])
        else:
            assert_equal(weights(net), values)

    @pytest.mark.parametrize("function", RUNS)
    def test_loaded_weights_are_exact(self, function: str, tmp_path: Path) -> None:
        trained = Net()
        fit(trained, number=2).save_checkpoint(tmp_path / "x.ckpt")
        net = Net(partial(sgd, lr=0.0, momentum=0))
        trainer = quiet_trainer(strategy=offload(), max_epochs=1)
        options = {"verbose": False} if function in ("validate", "test") else {}
        getattr(trainer, function)(net, batches(), ckpt_path=tmp_path / "x.ckpt", weights_only=True, **options)
        assert_equal(weights(net), weights(trained))

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_what_is_not_trained_keeps_its_bits(self, precision: str, tmp_path: Path) -> None:
        net = Net()
        net.norm.eval()
        before, seen = weights(net), []

        def look(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            module.norm.eval()
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            seen.append(weights(module))

        fit(net, precision, on_train_batch_start=look)
        saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
        for state in (*seen, saved, weights(net)):
            kept = {name: value for name, value in before.items() if name.split(".")[0] in ("frozen", "gain", "count")}
            statistics = {name: value for name, value in before.items() if "running" in name}
            assert_equal({name: state[name] for name in (*kept, *statistics)}, {**kept, **statistics})

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_running_statistics_are_those_of_fp32_arithmetic(self, precision: str) -> None:
        """From the inputs of the norm: statistics in BF16 would be 1e-3 off."""
        net = Net(partial(sgd, lr=0.0))
        mean = torch.zeros(16)

        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            nonlocal mean
            if net.training:
                mean = 0.9 * mean + 0.1 * args[0].detach().float().mean(0)

        net.norm.register_forward_pre_hook(keep)
        fit(net, precision)
        torch.testing.assert_close(net.norm.running_mean, mean, rtol=1e-5, atol=1e-7)  # FP32 sums in another order

    def test_buffer_that_is_reassigned(self) -> None:
        class Decays(Net):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.gain = self.gain * 0.5
                return super().training_step(batch, batch_idx)

        net, seen = Decays(), []
        fit(net, "bf16-true", on_train_batch_end=lambda trainer, module, *_: seen.append(weights(module)["gain"]))
        assert net.gain.dtype == torch.float32
        assert {gain.dtype for gain in seen} == {torch.float32}
        # Halving is exact; 2**-8 is what rounding 0.3 to BF16 may cost.
        torch.testing.assert_close(net.gain, torch.full((4,), 0.3 / 8), rtol=2**-8, atol=0)

    def test_teardown_may_come_twice_or_early(self) -> None:
        net = Net()
        trainer = fit(net)
        before, values = anatomy(net), weights(net)
        trainer.strategy.teardown()
        trainer.strategy.teardown()
        assert anatomy(net) == before
        assert_equal(weights(net), values)
        early = quiet_trainer(strategy=offload())
        early.strategy.connect(net)
        early.strategy.teardown()
        assert_equal(weights(net), values)

    def test_module_without_parameters(self) -> None:
        class Empty(pl.LightningModule):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("sum", batch.sum())

        trainer = quiet_trainer(strategy=offload())
        trainer.validate(Empty(), batches(), verbose=False)
        expected = torch.stack([batch.sum() for batch in batches()]).mean()
        torch.testing.assert_close(trainer.callback_metrics["sum"], expected)  # a mean of FP32 sums

    def test_module_without_an_optimizer(self) -> None:
        net = Net(lambda module: None)
        before, values = anatomy(net), weights(net)
        fit(net)
        assert anatomy(net) == before
        trained = ("weight", "bias")
        assert_equal(*({k: v for k, v in state.items() if k.endswith(trained)} for state in (weights(net), values)))

    def test_methods_set_on_the_module_are_called_and_stay(self) -> None:
        net, called = Net(), []

        def training_step(batch: Tensor, batch_idx: int) -> Tensor:
            called.append(batch_idx)
            return Net.training_step(net, batch, batch_idx)

        net.training_step = training_step  # type: ignore[method-assign]
        fit(net)
        assert called == [0, 1, 2]
        assert net.training_step is training_step
