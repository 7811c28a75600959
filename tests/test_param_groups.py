"""What user code and callbacks do to an optimizer while training, and what they see of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateMonitor
from torch import Tensor, nn

from tests.net import (
    PRECISIONS,
    RUN_RTOL,
    Net,
    Rows,
    adamw,
    assert_as_stock,
    assert_close_to_stock,
    assert_equal,
    fit,
    sgd,
    weights,
)
from tests.reference import Snapshot, assert_identical

Optimizer = torch.optim.Optimizer


@pytest.mark.parametrize("make", [sgd, adamw])
class TestGroups:
    """What users do to `param_groups` while training."""

    def check(self, make: Any, hook: Callable[..., None], start: Callable[[Any], Any]) -> None:
        def build() -> Net:
            return Net(lambda module: type(make(module))(start(module), lr=0.01))

        if make is sgd:
            assert_as_stock(build, on_train_batch_start=hook)
        else:
            assert_close_to_stock(build, RUN_RTOL, on_train_batch_start=hook)

    def test_added(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.optimizers[0].add_param_group({"params": [*module.outer.parameters()], "lr": 0.02})

        self.check(make, hook, lambda module: module.inner.parameters())

    def test_added_when_unfrozen(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                module.frozen.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": [*module.frozen.parameters()]})

        self.check(make, hook, lambda module: [p for p in module.parameters() if p.requires_grad])

    def test_unfrozen_in_place(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            module.frozen.requires_grad_(batch_idx != 0)
            module.outer.requires_grad_(batch_idx != 1)

        self.check(make, hook, lambda module: module.parameters())

    def test_moved_to_another_group(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                first, second = trainer.optimizers[0].param_groups
                second["params"].extend(first["params"])
                first["params"].clear()

        self.check(
            make,
            hook,
            lambda module: [
                {"params": [*module.inner.parameters()]},
                {"params": [*module.outer.parameters()], "lr": 0.0, "weight_decay": 0.0},
            ],
        )

    def test_removed(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                (optimizer,) = trainer.optimizers
                for parameter in optimizer.param_groups.pop()["params"]:
                    optimizer.state.pop(parameter, None)

        self.check(
            make, hook, lambda module: [{"params": [*part.parameters()]} for part in (module.inner, module.outer)]
        )

    def test_settings_changed(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.7
                group["weight_decay"] = 0.1 * batch_idx

        self.check(make, hook, lambda module: module.parameters())

    def test_state_put_in_place_of_the_old(self, make: Any) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
            state = trainer.optimizers[0].state
            if batch_idx == 1:
                for name, value in state[module.inner.weight].items():
                    if isinstance(value, Tensor) and value.ndim:
                        state[module.inner.weight][name] = torch.full_like(value, 0.01)
            if batch_idx == 2:
                state.clear()

        self.check(make, hook, lambda module: module.parameters())

    def test_state_loaded_after_a_group_was_added(self, make: Any) -> None:
        """As when finetuning resumes: groups come first, state second, and both before the first step."""
        kind = type(make(Net()))

        options = {"lr": 0.01, "momentum": 0.9} if make is sgd else {"lr": 0.01}

        def build(*parts: str) -> Net:
            def groups(net: Net) -> list[dict[str, Any]]:
                return [{"params": [*net.get_submodule(part).parameters()]} for part in parts]

            return Net(lambda net: kind(groups(net), **options))

        loaded = fit(build("inner", "outer"), "32-true").optimizers[0].state_dict()

        def resume(trainer: pl.Trainer, module: Net) -> None:
            (optimizer,) = trainer.optimizers
            optimizer.add_param_group({"params": [*module.outer.parameters()]})
            optimizer.load_state_dict(copy.deepcopy(loaded))
            assert_identical(Snapshot({}, optimizer.state_dict()), Snapshot({}, loaded))

        fit(build("inner"), on_train_start=resume)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_what_comes_later_is_offloaded_too(kind: type[Optimizer], how: str) -> None:
    seen: list[tuple[torch.dtype, int]] = []

    def change(trainer: pl.Trainer, module: Net, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            module.frozen.requires_grad_(True)
            if how == "added":
                trainer.optimizers[0].add_param_group({"params": [*module.frozen.parameters()]})

    def look(trainer: pl.Trainer, module: Net, *_: Any) -> None:
        seen.append((module.frozen.weight.dtype, trainer.strategy.offload.num_parameters))

    def make(module: Net) -> Optimizer:
        return kind([p for p in module.parameters() if p.requires_grad or how == "unfrozen"], lr=0.01)

    net = Net(make)
    trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    fit(net, on_train_batch_start=change, on_train_batch_end=look)
    later = (torch.bfloat16, trained + net.frozen.weight.numel() + net.frozen.bias.numel())
    assert seen == [(torch.float32, trained), later, later]


class TestOptimizerState:
    def test_that_user_code_loads_stays_fp32(self) -> None:
        source = Net(adamw)
        trained = fit(source, "32-true").optimizers[0].state_dict()
        seen: list[Any] = []

        def load(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            if not seen:
                trainer.optimizers[0].load_state_dict(copy.deepcopy(trained))
                seen.append(copy.deepcopy(trainer.optimizers[0].state_dict()))

        for precision in PRECISIONS:
            seen.clear()
            fit(Net(adamw), precision, on_train_batch_end=load)
            assert_identical(Snapshot({}, seen[0]), Snapshot({}, trained))

    def test_that_user_code_loads_counts(self) -> None:
        source = Net()
        trained = fit(source, None).optimizers[0].state_dict()

        def load(trainer: pl.Trainer, module: Net, batch: Any, index: int) -> None:
            if index == 1:
                trainer.optimizers[0].load_state_dict(trained)

        assert_as_stock(Net, on_train_batch_start=load)

    @pytest.mark.parametrize("make", [sgd, adamw])
    def test_that_does_not_fit_is_refused_and_changes_nothing(self, make: Any) -> None:
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).state_dict()

        def load(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            before = copy.deepcopy(optimizer.state_dict())
            with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
                optimizer.load_state_dict(other)
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict({**other, "param_groups": []})
            assert_identical(Snapshot({}, optimizer.state_dict()), Snapshot({}, before))
            held = optimizer.param_groups[0]["params"]
            assert [id(parameter) for parameter in held] == [id(parameter) for parameter in module.parameters()]

        net, undisturbed = Net(make), Net(make)
        fit(net, on_train_batch_end=load)
        fit(undisturbed)
        assert_equal(weights(net), weights(undisturbed))


class TestHooks:
    """What user code sees of the optimizer and of the gradients, and when."""

    @pytest.mark.parametrize("make", [sgd, adamw])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_lightning_see_the_modules_own_parameters(self, precision: str, make: Any) -> None:
        kind = type(make(Net()))
        seen = set()

        def look(name: str, trainer: pl.Trainer, module: Net, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            assert type(optimizer) is kind
            held = optimizer.param_groups[0]["params"]
            assert [id(parameter) for parameter in held] == [id(parameter) for parameter in module.parameters()]
            assert set(optimizer.state) <= set(held)
            seen.add(name)

        names = [
            name
            for name in dir(pl.Callback)
            if name.startswith(("on_train", "on_fit", "on_before", "on_after", "on_validation"))
        ]
        callback = pl.Callback()
        for name in names:
            setattr(callback, name, partial(look, name))
        callback.on_fit_start = callback.on_fit_end = lambda *_: None  # type: ignore[method-assign]
        fit(Net(make), precision, validate=True, callbacks=[callback])
        assert {"on_before_optimizer_step", "on_after_backward", "on_before_zero_grad", "on_train_batch_end"} <= seen

    @pytest.mark.parametrize("make", [sgd, adamw])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_the_optimizer_see_parameters_before_and_weights_after(self, precision: str, make: Any) -> None:
        """Averaging by step hooks is common: after the step they must find the new weights."""
        seen: dict[str, list[Tensor]] = {"before": [], "after": [], "state_dict": []}
        module = Net(make)

        def look(when: str, optimizer: Optimizer, *_: Any) -> None:
            held = optimizer.param_groups[0]["params"]
            assert [id(parameter) for parameter in held] == [id(parameter) for parameter in module.parameters()]
            seen[when].append(module.inner.weight.detach().float().clone())
            if when == "after":
                seen["state_dict"].append(weights(module)["inner.weight"])

        def build(_: Any) -> Optimizer:
            optimizer = make(module)
            optimizer.register_step_pre_hook(partial(look, "before"))
            optimizer.register_step_post_hook(partial(look, "after"))
            return optimizer

        module.optimizer = build
        undisturbed = Net(make)
        ends: list[Tensor] = []
        fit(module, precision, on_train_batch_end=lambda *_: ends.append(module.inner.weight.detach().float().clone()))
        fit(undisturbed, precision)
        assert_equal(weights(module), weights(undisturbed))
        assert len(seen["after"]) == len(ends) == 3
        assert all(torch.equal(*pair) for pair in zip(seen["after"], ends, strict=True))
        assert torch.equal(seen["state_dict"][-1], module.inner.weight)
        assert all(torch.equal(*pair) for pair in zip(seen["before"][1:], ends, strict=False))

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_see_gradients(self, precision: str) -> None:
        norms: dict[str, list[float]] = {}

        def look(name: str, trainer: pl.Trainer, module: Net, *_: Any) -> None:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
            norms.setdefault(name, []).append(float(torch.nn.utils.get_total_norm([g.float() for g in gradients])))

        names = ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
        fit(Net(), precision, gradient_clip_val=1e-3, **{name: partial(look, name) for name in names})
        assert norms["on_after_backward"] == norms["on_before_optimizer_step"]
        assert min(norms["on_after_backward"]) > 1e-3
        # Clipped gradients are rounded to BF16: to one in 256.
        assert norms["on_train_batch_end"] == pytest.approx([1e-3] * 3, rel=2**-8)

    def test_that_change_gradients_count(self) -> None:
        class Own(Net):
            def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-1e-3, 1e-3)
                torch.nn.utils.clip_grad_norm_(self.parameters(), 5e-3)

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.outer.bias.grad = None
                self.inner.bias.grad.mul_(2)

        assert_as_stock(Own)

    def test_user_step_that_is_overridden(self) -> None:
        class Warmup(Net):
            def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * (batch_idx + 1)
                if batch_idx % 2:
                    optimizer.step(closure=closure)
                else:
                    closure()

        assert_as_stock(Warmup, number=5)


class TestCallbacks:
    def test_backbone_finetuning(self) -> None:
        class Finetuned(Net):
            def __init__(self) -> None:
                super().__init__(
                    lambda module: torch.optim.SGD(filter(lambda p: p.requires_grad, module.parameters()), lr=0.1)
                )
                self.backbone = nn.Sequential(self.inner, self.norm)

        def check(**options: Any) -> None:
            callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)]
            assert_as_stock(Finetuned, max_epochs=3, callbacks=callbacks, **options)

        check()
        net = Finetuned()
        before = weights(net)
        fit(net, max_epochs=2, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
        assert not torch.equal(net.inner.weight, before["inner.weight"])
        assert net.inner.weight.dtype == torch.float32

    @pytest.mark.parametrize("number", [1, 2])
    def test_learning_rate_monitor(self, number: int) -> None:
        class Scheduled(Net):
            def configure_optimizers(self) -> Any:
                optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.inner, self.outer)[:number]]
                schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
                return optimizers, schedulers

            def optimize(self, batch: Tensor, batch_idx: int) -> None:
                for optimizer in self.trainer.strategy._lightning_optimizers:
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()

            def on_train_batch_end(self, *_: Any) -> None:
                for config in self.trainer.lr_scheduler_configs:
                    config.scheduler.step()

        seen = []
        for precision in ("bf16-mixed", None):
            monitor = LearningRateMonitor(logging_interval="step")
            logger = Rows()
            fit(Scheduled(manual=True), precision, callbacks=[monitor], logger=logger, log_every_n_steps=1)
            seen.append((monitor.lrs, logger.rows))
        assert seen[0] == seen[1]
        assert seen[0][1]
