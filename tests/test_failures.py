"""Training that ends in an exception or in Ctrl+C leaves the module as it would be left by stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_cpu_offload.offload.attach import Attachment
from tests.models import quiet_trainer
from tests.net import (
    PRECISIONS,
    Foreign,
    Net,
    adamw,
    anatomy,
    assert_equal,
    assert_free,
    batches,
    fit,
    offload,
    weights,
)


def raise_in_body(net: Net, error: BaseException) -> None:
    """The optimizer steps its first parameter, and fails."""

    class Fails(Foreign):
        def update(self, parameter: Tensor, lr: float) -> None:
            parameter.add_(parameter.grad, alpha=-lr)
            if self.calls == 2:
                raise error

    net.optimizer = lambda module: Fails(module.parameters())


def raise_in(hook: str, skip: int, net: Net, error: BaseException) -> None:
    """The hook runs `skip` times, and then fails."""
    original = getattr(net, hook)
    calls = iter(range(100))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == skip:
            raise error
        return original(*args, **kwargs)

    setattr(net, hook, fail)


FAILURES: dict[str, Callable[[Net, BaseException], None]] = {
    "setup": partial(raise_in, "setup", 0),
    "configure_optimizers": partial(raise_in, "configure_optimizers", 0),
    "on_fit_start": partial(raise_in, "on_fit_start", 0),
    "training_step": partial(raise_in, "training_step", 1),
    "on_after_backward": partial(raise_in, "on_after_backward", 1),
    "on_train_batch_end": partial(raise_in, "on_train_batch_end", 1),
    "validation_step": partial(raise_in, "validation_step", 1),
    "optimizer.step": raise_in_body,
}


class TestFailures:
    def fit_until(self, where: str, error: BaseException, strategy: Any, expected: Any, *callbacks: Any) -> Net:
        net = Net()
        FAILURES[where](net, error)
        before = anatomy(net)
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
        trainer.callbacks.extend(callbacks)
        with pytest.raises(expected):
            trainer.fit(net, batches(), batches())
        if strategy != "auto":
            assert anatomy(net) == before
            assert trainer.strategy.offload is None
            for optimizer in trainer.optimizers:
                assert_free(optimizer, net)
        return net

    @pytest.mark.parametrize("where", FAILURES)
    @pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_leave_what_stock_leaves(self, where: str, error: BaseException) -> None:
        expected = RuntimeError if isinstance(error, RuntimeError) else SystemExit
        ours = self.fit_until(where, error, offload("32-true"), expected)
        stock = self.fit_until(where, error, "auto", expected)
        assert_equal(weights(ours), weights(stock))

    @pytest.mark.parametrize("where", FAILURES)
    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_leave_the_masters(self, where: str, precision: str) -> None:
        seen: list[dict[str, Tensor]] = []
        look = pl.callbacks.LambdaCallback(on_exception=lambda trainer, module, error: seen.append(weights(module)))
        net = self.fit_until(where, RuntimeError("no"), offload(precision), RuntimeError, look)
        assert_equal(weights(net), seen[0])

    def test_interrupt_in_the_middle_of_the_host_step(self) -> None:
        """Masters that are stepped already, with weights that have not been sent, stay as they are."""
        net, before = Net(partial(adamw, lr=1e-5)), {}

        def interrupt_next_push(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                before.update(weights(module))
                engine = trainer.strategy.offload.pipeline.engine
                original = engine.copy

                def copy_or_raise(lane: str, dst: Tensor, src: Tensor) -> None:
                    if lane == "h2d":
                        raise KeyboardInterrupt
                    original(lane, dst, src)

                engine.copy = copy_or_raise

        with pytest.raises(SystemExit):
            fit(net, on_train_batch_start=interrupt_next_push)
        # One step of AdamW moves no element by more than lr, but for rounding and the decay; BF16 is 1e-3 apart here.
        for name in ("inner.weight", "outer.weight"):
            moved = (weights(net)[name] - before[name]).abs()
            assert moved.max() < 1.1e-5, f"{name}: an element moved by {moved.max()}"

    def test_dead_device_does_not_hide_the_error(self) -> None:
        class Fails(Foreign):
            def update(self, parameter: Tensor, lr: float) -> None:
                if self.calls == 1:
                    raise RuntimeError("the first one")

        def switch_off(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            engine = trainer.strategy.offload.pipeline.engine
            original = engine.copy

            def copy_in_only(lane: str, dst: Tensor, src: Tensor) -> None:
                if lane == "h2d":
                    raise RuntimeError("the device is gone")
                original(lane, dst, src)

            engine.copy = copy_in_only

        net = Net(lambda module: Fails(module.parameters()))
        before, values = anatomy(net), weights(net)
        with pytest.raises(RuntimeError, match="the first one"):
            fit(net, on_train_batch_start=switch_off)
        assert anatomy(net) == before
        assert torch.equal(weights(net)["inner.weight"], values["inner.weight"])

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "optimizer.step"])
    def test_are_saved_with_what_was_trained(self, where: str, precision: str, tmp_path: Path) -> None:
        save = pl.callbacks.OnExceptionCheckpoint(tmp_path)
        net = self.fit_until(where, RuntimeError("no"), offload(precision), RuntimeError, save)
        saved = torch.load(save.ckpt_path, weights_only=True)
        assert_equal(saved["state_dict"], weights(net))
        assert len(saved["optimizer_states"]) == 1

    def test_shape_that_was_changed_does_not_hide_the_error(self) -> None:
        def spoil(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            module.inner.weight.data = torch.zeros(3)
            raise RuntimeError("the first one")

        with pytest.warns(UserWarning, match="inner.weight"), pytest.raises(RuntimeError, match="the first one"):
            fit(Net(), on_train_batch_end=spoil)

    def test_attaching_fails_half_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(Attachment, "_convert_rest", refuse)
        net = Net()
        before, values = anatomy(net), weights(net)
        with pytest.raises(MemoryError, match="no room"):
            fit(net)
        assert anatomy(net) == before
        assert_equal(weights(net), values)
