"""What is refused before training, what is announced, and training again."""

from __future__ import annotations

import copy
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.models import quiet_trainer
from tests.net import (
    Foreign,
    Net,
    adamw,
    anatomy,
    assert_as_stock,
    assert_equal,
    batches,
    fit,
    offload,
    sgd,
    snapshots,
    weights,
)
from tests.reference import assert_identical


class TestOptions:
    def test_by_name(self) -> None:
        trainer = fit(Net(), strategy="cpu_offload")
        assert isinstance(trainer.strategy, CPUOffloadStrategy)

    def test_by_instance(self) -> None:
        strategy = offload(pin_memory=False, cpu_threads=1, gradients="device", device="cpu")
        trainer = fit(Net(), strategy=strategy)
        assert trainer.strategy is strategy

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gradients": "nowhere"}, r"gradients='nowhere': .*'device'.*\. "),
            ({"pin_memory": "yes"}, r"pin_memory='yes': .*True, False, 'auto'.*\. "),
            ({"cpu_threads": 0}, r"cpu_threads=0: a positive number.*None"),
            ({"cpu_threads": -2}, r"cpu_threads=-2: a positive number.*None"),
            ({"cpu_threads": "all"}, r"cpu_threads='all': a positive number.*None"),
        ],
    )
    def test_bad_option(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            CPUOffloadStrategy(**options)

    def test_bad_precision_plugin(self) -> None:
        with pytest.raises(ValueError, match=r"precision='16-true': .*'bf16-mixed', 'bf16-true', '32-true'.*Choose"):
            CPUOffloadPrecision("16-true")  # type: ignore[arg-type]

    @pytest.mark.parametrize("precision", ["16-true", "64-true"])
    def test_precision_that_is_not_computed(self, precision: Any) -> None:
        message = (
            rf"precision='{precision}': .*'bf16-mixed'.*'bf16-true'.*Choose one.*CPUOffloadPrecision\(\"32-true\"\)"
        )
        with pytest.raises(ValueError, match=message):
            quiet_trainer(strategy="cpu_offload", precision=precision)

    def test_half_precision_with_a_scaler(self) -> None:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu")  # a Trainer on the CPU replaces "16-mixed" by itself
        with pytest.raises(ValueError, match=r"precision='16-mixed': .*'bf16-mixed'.*Choose one"):
            CPUOffloadStrategy(precision_plugin=plugin)

    @pytest.mark.parametrize("strategy", ["cpu_offload", CPUOffloadStrategy])
    def test_two_devices(self, strategy: Any) -> None:
        strategy = strategy if isinstance(strategy, str) else strategy()
        with pytest.raises(ValueError, match=r"devices=2: .*one device.*devices=1, or devices=\[index\]"):
            quiet_trainer(strategy=strategy, devices=2)


class AssertsDevice(Foreign):
    def update(self, parameter: Tensor, lr: float) -> None:
        assert parameter.is_cuda


class RaisesForDevice(Foreign):
    def update(self, parameter: Tensor, lr: float) -> None:
        raise RuntimeError("expected all tensors to be on a CUDA device")


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer without being one that torch prepared for hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class TestRefusedOptimizers:
    @pytest.mark.parametrize("kind", [AssertsDevice, RaisesForDevice])
    def test_one_for_cuda_only(self, kind: type[Foreign]) -> None:
        net = Net(lambda module: kind(module.parameters()))
        before, shape = weights(net), anatomy(net)
        with pytest.raises(
            ValueError, match=rf"(?s)optimizer=.*{kind.__name__}: .*host memory.*Use one that runs on the CPU"
        ):
            fit(net)
        assert not net.losses
        assert_equal(weights(net), before)
        assert anatomy(net) == shape

    def test_one_of_somebody_on_the_cpu_is_taken_and_not_disturbed(self) -> None:
        trained = assert_as_stock(lambda: Net(lambda module: Foreign(module.parameters())))
        (optimizer,) = trained.trainer.optimizers
        assert optimizer.calls == 3

    def test_wrapper_whose_step_cannot_be_hooked(self) -> None:
        net = Net(lambda module: Lookahead(sgd(module)))
        with pytest.raises(ValueError, match=r"optimizer=.*Lookahead"):
            fit(net)
        assert not net.losses


class TestPlan:
    def plan_of(self, net: Net, caplog: pytest.LogCaptureFixture) -> str:
        with caplog.at_level(logging.INFO):
            fit(net)
        (plan,) = (line for line in caplog.messages if line.startswith("cpu_offload: "))
        return plan

    def test_counts_what_is_stepped_here(self, caplog: pytest.LogCaptureFixture) -> None:
        net = Net(adamw)
        trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
        plan = self.plan_of(net, caplog)
        assert trained == 8 * 16 + 16 + 16 + 16 + 16 * 4 + 4
        assert f"{trained:,} parameters" in plan
        for word in ("bf16-mixed", "AdamW", "pageable"):
            assert word in plan

    def test_counts_bytes(self, caplog: pytest.LogCaptureFixture) -> None:
        class Wide(Net):
            def __init__(self) -> None:
                super().__init__(adamw)
                self.wide = nn.Linear(1024, 1024, bias=False)

            def loss(self, x: Tensor) -> Tensor:
                return super().loss(x) + self.wide(x.new_zeros(1, 1024)).mean()

        plan = self.plan_of(Wide(), caplog)
        assert "2.0 MiB of weights" in plan  # BF16
        held, ring = (float(number) for number in re.findall(r"holds ([0-9.]+) MiB.*ring of ([0-9.]+) MiB", plan)[0])
        assert held - ring == 12  # FP32 master and two moments

    def test_says_how_each_optimizer_is_stepped(self, caplog: pytest.LogCaptureFixture) -> None:
        def make(module: Net) -> Any:
            return [torch.optim.Adam(module.inner.parameters()), torch.optim.SGD(module.outer.parameters(), lr=0.1)]

        class Manual(Net):
            def optimize(self, batch: Tensor, batch_idx: int) -> None:
                self.loss(batch)

        plan = self.plan_of(Manual(make, manual=True), caplog)
        assert "Adam by one-pass kernel" in plan
        assert "SGD by its own step" in plan


class TestAgain:
    def test_one_trainer_fits_twice(self) -> None:
        states = []
        for strategy in (offload("32-true"), "auto"):
            net = Net()
            trainer = quiet_trainer(strategy=strategy, max_epochs=1)
            trainer.fit(net, batches())
            trainer.fit_loop.max_epochs = 2
            trainer.fit(net, batches())
            states.append(snapshots(net, trainer)[0])
        assert_identical(*states)

    @pytest.mark.parametrize("keep_optimizer", [False, True])
    def test_one_module_is_fitted_twice(self, keep_optimizer: bool) -> None:
        states = []
        for precision in ("32-true", None):
            net = Net()
            if keep_optimizer:
                optimizer = sgd(net)
                net.optimizer = lambda module, optimizer=optimizer: optimizer
            fit(net, precision)
            states.append(snapshots(net, fit(net, precision))[0])
        assert_identical(*states)

    def test_kept_adamw_goes_on_counting(self) -> None:
        net = Net()
        optimizer = adamw(net)
        net.optimizer = lambda module: optimizer
        fit(net)
        moments = copy.deepcopy(optimizer.state[net.inner.weight])
        states = []
        fit(net, on_train_start=lambda *_: states.append(copy.deepcopy(optimizer.state[net.inner.weight])))
        assert_equal(states[0], moments)
        assert optimizer.state[net.inner.weight]["step"] == 6

    def test_stock_trainer_goes_on_with_the_module(self) -> None:
        net, other = Net(), Net()
        fit(net, "32-true")
        fit(other, None)
        fit(net, None)
        fit(other, None)
        assert_equal(weights(net), weights(other))

    def test_optimizer_state_is_still_saved_after_a_test(self, tmp_path: Path) -> None:
        net = Net(adamw)
        trainer = fit(net)
        trainer.test(net, batches(), verbose=False)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        (saved,) = torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"]
        assert len(saved["state"]) == 6  # weight and bias of three layers that are trained

    def test_learning_rate_finder_restores_everything(self, tmp_path: Path) -> None:
        net = Net(adamw)
        net.lr = 0.1
        values = weights(net)
        trainer = quiet_trainer(strategy=offload(), max_epochs=1, default_root_dir=tmp_path)
        pl.tuner.Tuner(trainer).lr_find(net, batches(20), num_training=8, update_attr=False)
        assert_equal(weights(net), values)
        other = Net(adamw)
        trainer.fit(net, batches())
        assert_identical(*snapshots(net, trainer), *snapshots(other, fit(other)))

    def test_batch_size_finder_restores_everything(self, tmp_path: Path) -> None:
        class Sized(Net):
            batch_size = 2

            def train_dataloader(self) -> DataLoader:
                return DataLoader(torch.ones(64, 8), batch_size=self.batch_size)  # type: ignore[arg-type]

            val_dataloader = train_dataloader

        net = Sized(adamw)
        values = weights(net)
        trainer = quiet_trainer(strategy=offload(), max_epochs=1, default_root_dir=tmp_path)
        pl.tuner.Tuner(trainer).scale_batch_size(net, max_trials=2, steps_per_trial=1)
        assert net.batch_size > 2
        assert_equal(weights(net), values)

    def test_between_fits_any_checkpoint_may_be_tested(self, tmp_path: Path) -> None:
        states = []
        for strategy in (offload("32-true"), "auto"):
            net = Net()
            trainer = quiet_trainer(strategy=strategy, max_epochs=1)
            trainer.fit(net, batches())
            first, path = weights(net), tmp_path / "first.ckpt"
            trainer.save_checkpoint(path)
            trainer.fit_loop.max_epochs = 2
            trainer.fit(net, batches())
            trainer.test(net, batches(), ckpt_path=path, weights_only=True, verbose=False)
            assert_equal(weights(net), first)
            trainer.fit_loop.max_epochs = 3
            trainer.fit(net, batches())
            states.append(snapshots(net, trainer)[0])
        assert_identical(*states)

    def test_hooks_run_in_the_order_of_stock(self) -> None:
        orders = []
        for precision in ("bf16-mixed", None):
            net, order = Net(), []
            for name in HOOKS:

                def run(name: str, original: Any, *args: Any, order: list[str] = order, **kwargs: Any) -> Any:
                    order.append(name)
                    return original(*args, **kwargs)

                setattr(net, name, partial(run, name, getattr(net, name)))
            fit(net, precision, validate=True, accumulate_grad_batches=2, gradient_clip_val=1.0)
            orders.append(order)
        assert orders[0] == orders[1]
        assert {"on_before_zero_grad", "optimizer_step", "configure_gradient_clipping", "teardown"} <= set(orders[0])


HOOKS = [
    *(name for name in dir(pl.LightningModule) if name.startswith("on_") and name != "on_gpu"),
    "setup",
    "teardown",
    "configure_model",
    "configure_optimizers",
    "configure_gradient_clipping",
    "training_step",
    "validation_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
    "state_dict",
]


class TestOnlyConnected:
    def test_saves_and_loads(self, tmp_path: Path) -> None:
        net, other = Net(), Net()
        with torch.no_grad():
            net.inner.weight.add_(0.123)
        trainer = quiet_trainer(strategy=offload())
        trainer.strategy.connect(net)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        second = quiet_trainer(strategy=offload())
        second.strategy.connect(other)
        second.strategy.load_model_state_dict(second.strategy.load_checkpoint(tmp_path / "x.ckpt", weights_only=True))
        assert_equal(weights(other), weights(net))
