"""What others write into the module while the offload is attached reaches the masters, exactly and once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.net import (
    BF16_UNIT,
    PRECISIONS,
    Net,
    adamw,
    assert_as_stock,
    assert_equal,
    fit,
    sgd,
    still,
    weights,
)
from tests.reference import Snapshot, assert_close, over_a_run

TENSORS = ["inner.weight", "inner.bias", "frozen.weight", "frozen.bias"]
"""Trained and not, matrix (BF16 on the device) and vector."""

Write = Callable[[Net, str, Tensor], None]
"""Writes a value into the module's tensor of that name."""


def owner_of(net: Net, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return net.get_submodule(path), last


def in_place(net: Net, name: str, value: Tensor) -> None:
    with torch.no_grad():
        net.get_parameter(name).copy_(value)


def through_data(net: Net, name: str, value: Tensor) -> None:
    net.get_parameter(name).data.copy_(value)


def rebound(net: Net, name: str, value: Tensor) -> None:
    net.get_parameter(name).data = value.clone()


def rebound_in_the_compute_dtype(net: Net, name: str, value: Tensor) -> None:
    parameter = net.get_parameter(name)
    parameter.data = value.to(parameter.dtype)


def loaded(net: Net, name: str, value: Tensor) -> None:
    net.load_state_dict({**net.state_dict(), name: value})


def loaded_into_a_part(net: Net, name: str, value: Tensor) -> None:
    owner, last = owner_of(net, name)
    owner.load_state_dict({last: value}, strict=False)


def through_the_state_dict(net: Net, name: str, value: Tensor) -> None:
    net.state_dict()[name].copy_(value)


EXACT: list[Write] = [rebound, loaded, loaded_into_a_part, through_the_state_dict]
"""Ways on which a value passes in FP32."""

ROUNDED: list[Write] = [in_place, through_data, rebound_in_the_compute_dtype]
"""Ways that lead through the dtype of the compute copy."""


def any_value(current: Tensor) -> Tensor:
    """Values that no BF16 number holds, with one to spare for each row."""
    return torch.linspace(-0.7, 0.9, current.numel()).view_as(current)


def neighbour(current: Tensor) -> Tensor:
    """The next larger FP32 number: nearly everywhere it rounds to the same BF16 number."""
    return torch.nextafter(current, torch.tensor(torch.inf))


def values_after(write: Write, new: Callable[[Tensor], Tensor], precision: str) -> list[dict[str, Tensor]]:
    """Writes to all of `TENSORS` after the first and after the last of three batches, of training that moves nothing.

    Returns:
        What was written last; and what `state_dict` said right after the first write, after one more step, right
        after the last write and after training.
    """
    values: dict[str, Tensor] = {}
    seen: list[dict[str, Tensor]] = []

    def look(module: Net) -> None:
        seen.append({name: value for name, value in weights(module).items() if name in TENSORS})

    def hook(trainer: pl.Trainer, module: Net, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            look(module)
            return
        for name in TENSORS:
            if name not in values:
                values[name] = new(weights(module)[name])
            write(module, name, values[name] if index == 0 else values[name].neg_())
        look(module)

    net = Net(still)
    fit(net, precision, on_train_batch_end=hook)
    look(net)
    first, stepped, last, final = seen
    return [values, {name: -value for name, value in first.items()}, {n: -v for n, v in stepped.items()}, last, final]


@pytest.mark.parametrize("precision", PRECISIONS)
class TestWrites:
    @pytest.mark.parametrize("new", [any_value, neighbour])
    @pytest.mark.parametrize("write", EXACT)
    def test_in_fp32_arrive_exactly(self, write: Write, precision: str, new: Callable[[Tensor], Tensor]) -> None:
        value, *seen = values_after(write, new, precision)
        for state in seen:
            assert_equal(state, value)

    @pytest.mark.parametrize("write", ROUNDED)
    def test_in_the_compute_dtype_arrive_as_rounded(self, write: Write, precision: str) -> None:
        value, *seen = values_after(write, any_value, precision)
        rounded = {name: tensor.bfloat16().float() for name, tensor in value.items()}
        for state in seen:
            assert_equal(state, {n: (value if torch.equal(state[n], value[n]) else rounded)[n] for n in TENSORS})
        if precision == "32-true":
            assert_equal(seen[0], value)

    def test_that_are_lost_would_be_noticed(self, precision: str) -> None:
        value, *seen = values_after(lambda net, name, value: None, any_value, precision)
        for state in seen:
            for name in TENSORS:
                assert not torch.equal(state[name], value[name])


class TestOnce:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_only_what_was_written_is_rounded(self, precision: str) -> None:
        """One element is written through `.data`; its neighbours keep all their bits."""
        before: dict[str, Tensor] = {}

        def hook(trainer: pl.Trainer, module: Net, outputs: Any, batch: Any, index: int) -> None:
            if index == 1:
                before.update(weights(module))
                module.inner.weight.data[3, 4] = 0.625

        net = Net(still)
        fit(net, precision, on_train_batch_end=hook)
        expected = before["inner.weight"]
        expected[3, 4] = 0.625
        assert torch.equal(net.inner.weight, expected)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_exchanged_rows(self, precision: str) -> None:
        seen: list[Tensor] = []

        def hook(trainer: pl.Trainer, module: Net, outputs: Any, batch: Any, index: int) -> None:
            if index == 1:
                data = module.inner.weight.data
                seen.append(weights(module)["inner.weight"])
                data[[0, 5]] = data[[5, 0]]

        net = Net(still)
        fit(net, precision, on_train_batch_end=hook)
        (expected,) = seen
        expected[[0, 5]] = expected[[5, 0]]
        torch.testing.assert_close(net.inner.weight.detach(), expected, rtol=BF16_UNIT, atol=0)
        kept = [row for row in range(16) if row not in (0, 5)]
        assert torch.equal(net.inner.weight[kept], expected[kept])

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_cast_of_the_whole_module_is_no_write(self, precision: str) -> None:
        def cast(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            module.float()

        net = Net(still)
        before = weights(net)
        fit(net, precision, on_train_batch_end=cast)
        assert_equal(*({name: state[name] for name in TENSORS} for state in (weights(net), before)))

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_leaves_tensors_of_their_own_in_the_state_dict(self, precision: str) -> None:
        """A view of something larger would be saved as all of it."""

        def write(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            for parameter in module.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            for name, value in module.state_dict().items():
                assert value.untyped_storage().nbytes() == value.nbytes, name

        fit(Net(), precision, on_train_batch_end=write)

    def test_reaches_a_parameter_that_is_frozen_until_later(self) -> None:
        def hook(trainer: pl.Trainer, module: Net, batch: Any, index: int) -> None:
            if index == 1:
                module.frozen.weight.data.fill_(0.625)
                module.frozen.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": [*module.frozen.parameters()]})

        net = Net(lambda module: torch.optim.SGD([*module.inner.parameters(), *module.outer.parameters()], lr=0.0))
        for precision in PRECISIONS:
            fit(net, precision, on_train_batch_start=hook)
            assert torch.equal(net.frozen.weight, torch.full((16, 16), 0.625)), precision
            net.frozen.requires_grad_(False)

    def test_survives_until_the_step_changes_it(self) -> None:
        """Masters are written, and the step of the same batch starts from what was written."""
        start = torch.full((16, 8), 0.3)

        def hook(trainer: pl.Trainer, module: Net, optimizer: Any) -> None:
            module.inner.weight.data = start.clone()

        def remember(trainer: pl.Trainer, module: Net, optimizer: Any) -> None:
            gradients.append(module.inner.weight.grad.float())

        gradients: list[Tensor] = []
        net = Net(lambda module: torch.optim.SGD(module.inner.parameters(), lr=0.5))
        callback = pl.callbacks.LambdaCallback(on_before_optimizer_step=remember)
        fit(net, number=1, callbacks=[callback], on_before_optimizer_step=hook)
        assert torch.equal(net.inner.weight, start.add(gradients[0], alpha=-0.5))

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_is_what_the_next_forward_computes_with(self, precision: str) -> None:
        outputs: list[Tensor] = []

        def write(trainer: pl.Trainer, module: Net, batch: Any, index: int) -> None:
            module.outer.weight.data = torch.zeros(4, 16)
            module.outer.bias.data = torch.full((4,), 0.5)

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output.detach().float())

        net = Net(still)
        net.outer.register_forward_hook(keep)
        fit(net, precision, on_train_batch_start=write)
        assert len(outputs) == 3
        for output in outputs:
            assert torch.equal(output, torch.full((4, 4), 0.5))


class Critic(Net):
    """A Wasserstein critic: its weights are clamped after every step."""

    limit = 0.125

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-self.limit, self.limit)


class TestClamp:
    def test_equals_stock(self) -> None:
        net = assert_as_stock(Critic)
        assert net.inner.weight.abs().max() == Critic.limit

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_clamps_the_masters(self, precision: str) -> None:
        """Inside the limits all bits stay; outside, masters land on the limit, which is a BF16 number."""
        before: list[dict[str, Tensor]] = []
        after: list[dict[str, Tensor]] = []

        class Watched(Critic):
            def on_train_batch_end(self, *args: Any) -> None:
                before.append(weights(self))
                super().on_train_batch_end(*args)
                after.append(weights(self))

        net = Watched(partial(sgd, lr=0.5))
        fit(net, precision)
        assert all(
            before[0][name].abs().max() > Critic.limit for name in ("inner.weight", "inner.bias", "outer.weight")
        )
        for old, new in zip(before, after, strict=True):
            for name in TENSORS:
                clamped = old[name].clamp(-Critic.limit, Critic.limit)
                inside = old[name].abs() <= Critic.limit
                assert torch.equal(new[name][inside], clamped[inside])
                # A master just outside that rounds to the limit looks unwritten: off by less than a rounding.
                torch.testing.assert_close(new[name], clamped, rtol=BF16_UNIT, atol=0)
        assert_equal(weights(net), after[-1])

    def test_gives_the_weights_of_stock(self) -> None:
        """Most weights end at the limit; gradients too small to show leave BF16 arithmetic no say."""
        ours, stock = (Critic(lambda module: torch.optim.SGD(module.parameters(), lr=1e-5)) for _ in range(2))
        trainer, stock_trainer = fit(ours), fit(stock, None)
        ours_state, stock_state = (
            Snapshot({n: v for n, v in weights(module).items() if n in TENSORS}, trainer.optimizers[0].state_dict())
            for module in (ours, stock)
        )
        assert stock_trainer.global_step == trainer.global_step
        assert_close(ours_state, stock_state, over_a_run(1e-4))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_dict_in_any_hook_is_fp32_and_the_same_as_the_checkpoint(precision: str, tmp_path: Path) -> None:
    hooks: list[str] = []

    def look(hook: str, trainer: pl.Trainer, module: Net, *_: Any) -> None:
        hooks.append(hook)
        state = weights(module)
        assert {value.dtype for name, value in state.items() if "count" not in name and "num" not in name} == {
            torch.float32
        }
        assert_equal(module.inner.state_dict(), {name: state[f"inner.{name}"] for name in ("weight", "bias")})
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        assert_equal(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"], state)

    names = [
        "on_train_start",
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_end",
        "on_train_end",
    ]
    net, undisturbed = Net(adamw), Net(adamw)
    options = {"validate": True, "num_sanity_val_steps": 0}
    fit(net, precision, **options, **{name: partial(look, name) for name in names})
    fit(undisturbed, precision, **options)
    assert set(hooks) == set(names)
    assert_equal(weights(net), weights(undisturbed))
