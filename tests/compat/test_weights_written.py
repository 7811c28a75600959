"""Weights that callbacks and hooks read and write while training: averages, pruning, clamping, resets, loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import get_ema_avg_fn

from tests.compat.logged import Logged, mostly_slow, per_epoch
from tests.compat.twin import RUN_RTOL, assert_twins, fit, ours, run
from tests.net import BF16_UNIT, PRECISIONS, adamw


class EveryOther(WeightAveraging):
    """Averages after every other step and at the end of every epoch."""

    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.9))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None or (step_idx or 0) % 2 == 1


class Pruning(ModelPruning):
    """Stock's, as it is on a GPU: on the CPU the reset aliases the initial weights, which the next steps then move."""

    def __init__(self, fn: Any = "l1_unstructured", **options: Any) -> None:
        super().__init__(fn, **{"amount": 0.3, "use_lottery_ticket_hypothesis": False, **options})

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        with_copies = copy.deepcopy(old)
        ModelPruning._copy_param(new, with_copies, name)


Callbacks = Callable[[], Iterable[pl.Callback]]

AVERAGES: dict[str, Callbacks] = {
    "WeightAveraging": lambda: [WeightAveraging()],
    "WeightAveraging of the user's": lambda: [EveryOther()],
    "EMA": lambda: [EMAWeightAveraging(decay=0.9)],
    "EMA on the CPU": lambda: [EMAWeightAveraging(decay=0.9, device="cpu")],
    "EMA without buffers": lambda: [EMAWeightAveraging(decay=0.9, use_buffers=False)],
    "EMA from the third step on": lambda: [EMAWeightAveraging(decay=0.5, update_starting_at_step=2)],
    "EMA of epochs": lambda: [EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=1)],
    "SWA": lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
    "SWA annealed linearly": lambda: [
        StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=0.5, annealing_epochs=2, annealing_strategy="linear")
    ],
    "SWA on the CPU": lambda: [StochasticWeightAveraging(swa_lrs=[0.05], swa_epoch_start=2, device="cpu")],
    "SWA and EMA": lambda: [StochasticWeightAveraging(0.05, 2), EMAWeightAveraging(decay=0.9)],
}

PRUNING: dict[str, Callbacks] = {
    "l1": lambda: [Pruning()],
    "global": lambda: [Pruning(prune.L1Unstructured, use_global_unstructured=True)],
    "structured": lambda: [
        Pruning(
            "ln_structured",
            use_global_unstructured=False,
            pruning_norm=2,
            pruning_dim=0,
            parameter_names=["weight"],
        )
    ],
    "at the end of train epochs": lambda: [Pruning(prune_on_train_epoch_end=True)],
    "kept as masks": lambda: [Pruning(make_pruning_permanent=False)],
    "lottery ticket": lambda: [Pruning(use_lottery_ticket_hypothesis=True)],
    "lottery ticket, resampled": lambda: [Pruning(use_lottery_ticket_hypothesis=True, resample_parameters=True)],
}


class NoNorm(Logged):
    """Only linear layers: structured pruning wants matrices."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm: nn.Module = nn.Identity()


class TestAverages:
    @pytest.mark.parametrize("name", AVERAGES)
    @pytest.mark.parametrize("validate", mostly_slow([0, 1.0], 1.0))
    def test_are_those_of_stock(self, name: str, validate: float) -> None:
        assert_twins(Logged, callbacks=AVERAGES[name], max_epochs=4, limit_val_batches=validate)

    def test_swa_replaces_the_users_scheduler(self) -> None:
        assert_twins(lambda: Logged(per_epoch), callbacks=AVERAGES["SWA"], max_epochs=4)

    def test_swa_leaves_batch_norm_with_statistics_of_its_own_pass(self) -> None:
        own = assert_twins(Logged, callbacks=AVERAGES["SWA"], max_epochs=3, drive=_keep_statistics)
        *_, (mean, count) = own.notes
        assert count == 3, "the statistics are of one pass over three batches"
        torch.testing.assert_close(own.weights["norm.running_mean"], mean)

    @pytest.mark.parametrize("name", ["EMA", "SWA"])
    def test_with_adamw(self, name: str) -> None:
        assert_twins(lambda: Logged(adamw), rtol=RUN_RTOL, callbacks=AVERAGES[name], max_epochs=4, limit_val_batches=1)


def _keep_statistics(trainer: pl.Trainer, module: Any) -> Any:
    """The mean of the inputs of the norm over the last pass, each batch counted the same."""
    means: list[Tensor] = []
    handle = module.norm.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].detach().mean(0)))
    fit(trainer, module)
    handle.remove()
    return torch.stack(means[-3:]).mean(0), int(module.norm.num_batches_tracked)


class TestPruning:
    @pytest.mark.parametrize("name", PRUNING)
    def test_is_that_of_stock(self, name: str) -> None:
        make = NoNorm if name == "structured" else Logged
        own = assert_twins(make, callbacks=PRUNING[name], max_epochs=2, limit_val_batches=1)
        pruned = own.weights.get("inner.weight_mask", own.weights.get("inner.weight"))
        assert (pruned == 0).any(), "nothing was pruned"

    def test_by_torch_in_a_hook(self) -> None:
        assert_twins(PrunesItself, max_epochs=3)

    def test_with_adamw(self) -> None:
        assert_twins(lambda: Logged(adamw), rtol=RUN_RTOL, callbacks=PRUNING["lottery ticket"], max_epochs=2)


class PrunesItself(Logged):
    """Masks its first layer's weight by hand after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.inner.weight[self.inner.weight.abs() < 0.1] = 0.0


def clamp(module: Any) -> None:
    """The critic of a WGAN."""
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def shrink(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.inner.parameters():
            parameter.mul_(0.9)


def fill(module: Any) -> None:
    nn.init.constant_(module.inner.bias, 0.3)


def renormalise(module: Any) -> None:
    with torch.no_grad():
        module.outer.weight.copy_(torch.renorm(module.outer.weight, p=2, dim=0, maxnorm=0.3))


def rebind(module: Any) -> None:
    module.inner.weight.data = module.inner.weight.data * 0.7


def through_numpy(module: Any) -> None:
    module.outer.weight.detach().numpy()[0] = 0.3


def from_a_vector(module: Any) -> None:
    vector = nn.utils.parameters_to_vector(module.inner.parameters())
    nn.utils.vector_to_parameters(vector * 0.8, module.inner.parameters())


def load(module: Any) -> None:
    state = {name: value * 0.9 for name, value in module.state_dict().items() if value.is_floating_point()}
    module.load_state_dict(state, strict=False)


def load_a_part(module: Any) -> None:
    module.inner.load_state_dict({"weight": torch.full((16, 8), 0.05), "bias": torch.full((16,), 0.1)})


def load_by_assigning(module: Any) -> None:
    module.frozen.load_state_dict(
        {name: value * 0.5 for name, value in module.frozen.state_dict().items()}, assign=True
    )


def through_a_state_dict(module: Any) -> None:
    for value in module.outer.state_dict().values():
        value.mul_(0.9)


def replace(module: Any) -> None:
    module.outer.weight = nn.Parameter(module.outer.weight.detach() * 0.5)


WRITES = [
    clamp,
    shrink,
    fill,
    renormalise,
    rebind,
    through_numpy,
    from_a_vector,
    load,
    load_a_part,
    load_by_assigning,
    through_a_state_dict,
    replace,
]

MOMENTS = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_end"]


# Each write at two of the moments; all of them at all four take four times as long and found no more.
PAIRS = [
    pytest.param(write, MOMENTS[(index + shift) % 4], marks=[pytest.mark.slow] if shift else [])
    for shift in (0, 2)
    for index, write in enumerate(WRITES)
]


@pytest.mark.parametrize(("write", "moment"), PAIRS, ids=lambda value: getattr(value, "__name__", value))
def test_a_write_in_a_hook_counts_as_in_stock(write: Callable[[Any], None], moment: str) -> None:
    def hook(trainer: pl.Trainer, module: Any, *_: Any) -> None:
        write(module)

    assert_twins(Logged, callbacks=lambda: [LambdaCallback(**{moment: hook})], max_epochs=2, limit_val_batches=1)


def slow_sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Moves less in a step than BF16 numbers are apart."""
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class ByHand(pl.Callback):
    """The average of what `state_dict` returns after each step, and what checkpoints hold of the one of Lightning."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.checkpoints: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            old = self.average.get(name, value)
            self.average[name] = torch.lerp(old, value, 0.1) if value.is_floating_point() else value.clone()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        self.checkpoints.append(copy.deepcopy(checkpoint["state_dict"]))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ema_in_checkpoints_is_an_average_of_masters(precision: str) -> None:
    by_hand = ByHand()
    callbacks = [EMAWeightAveraging(decay=0.9), by_hand]
    own = run(lambda: Logged(slow_sgd), ours(precision), callbacks=lambda: callbacks, max_epochs=3, limit_val_batches=1)
    for name, expected in by_hand.average.items():
        if name.endswith(("weight", "bias")):
            for value in (by_hand.checkpoints[-1][name], own.weights[name]):
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)  # a sum of nine FP32 numbers


class EpochStarts(pl.Callback):
    """What `state_dict` returns at the start of each epoch, the one for the norm's statistics among them."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append(copy.deepcopy(pl_module.state_dict()))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_swa_is_an_average_of_masters(precision: str) -> None:
    starts = EpochStarts()
    callbacks = [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1), starts]
    run(lambda: Logged(slow_sgd), ours(precision), callbacks=lambda: callbacks, max_epochs=3)
    *states, average = starts.states
    for name in ("inner.weight", "outer.bias", "frozen.weight"):
        mean = torch.stack([state[name] for state in states]).double().mean(0).float()
        torch.testing.assert_close(average[name], mean, rtol=1e-6, atol=1e-7)  # sums of three FP32 numbers


@pytest.mark.parametrize("make", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.05, 1)])
def test_averaging_callbacks_are_left_as_they_were(make: Callable[[], Any]) -> None:
    callback = make()
    run(Logged, ours(), callbacks=lambda: [callback], max_epochs=2)
    assert type(callback) is type(make())
    assert not {name for name in vars(callback) if name.startswith("on_")}


def test_an_average_counts_what_a_hook_wrote_before() -> None:
    """Clamped through `.data`, which leaves no trace, before the callback reads."""

    def clip(trainer: pl.Trainer, module: Any, *_: Any) -> None:
        clamp(module)

    callbacks = [LambdaCallback(on_train_batch_end=clip), EMAWeightAveraging(decay=0.0)]
    own = run(Logged, ours("bf16-mixed"), callbacks=lambda: callbacks)
    # Elements that round to the same BF16 number as the bound are not seen to be clamped.
    assert own.weights["inner.weight"].abs().max() <= 0.2 * (1 + BF16_UNIT)
