"""Which parts of a module are trained, by whom, and since when."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.compat.test_modules import Program
from tests.compat.twin import RUN_RTOL, assert_twins, ours, run
from tests.net import PRECISIONS, Net, batches

UNDER_ADAMW = [
    "tied_weights",
    "shared_module",
    "channels_last",
    "lstm",
    "weight_norm",
    "odd_shapes",
    "other_dtypes",
    "many_tiny_parameters",
    "written_buffers",
    "forces",
]


class UnderAdamW(Program):
    """By the kernel; the large epsilon keeps gradients that are zero but for rounding from becoming full steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize("name", UNDER_ADAMW)
def test_programs_under_adamw(name: str) -> None:
    assert_twins(lambda: UnderAdamW(name), RUN_RTOL)


def test_sparse_gradients_under_adamw_are_refused_as_by_torch() -> None:
    for strategy in ("auto", ours()):
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            run(lambda: UnderAdamW("sparse_embedding"), strategy)


def test_sparse_adam() -> None:
    class Sparse(Program):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SparseAdam(self.parameters(), lr=0.01)

    assert_twins(lambda: Sparse("sparse_embedding"))


class Thaws(Net):
    """A layer frozen at first, trained in the second epoch, frozen again in the third, with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.inner.weight.register_post_accumulate_grad_hook(lambda parameter: self.notes.append(parameter.shape))
        self.inner.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.inner.requires_grad_(self.current_epoch == 1)


def test_frozen_thawed_and_frozen_again() -> None:
    own = assert_twins(Thaws, max_epochs=3)
    assert len([note for note in own.notes if isinstance(note, torch.Size)]) == 3
    assert {"inner.weight", "inner.bias"} <= own.moved
    for precision in ("bf16-mixed", "bf16-true"):
        assert {"inner.weight", "inner.bias"} <= run(Thaws, ours(precision), max_epochs=3).moved


class Owned(Net):
    """Only `outer` is in the optimizer; the rest requires gradients, gets them, and must not move."""

    def __init__(self) -> None:
        super().__init__(lambda net: torch.optim.SGD(net.outer.parameters(), lr=0.1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_of_no_optimizer(precision: str) -> None:
    with pytest.warns(UserWarning, match="require gradients but are in no optimizer"):
        own = run(Owned, ours(precision), max_epochs=2)
    assert {name for name in own.moved if "norm" not in name} == {"outer.weight", "outer.bias"}
    if precision == "32-true":
        assert_twins(Owned, max_epochs=2)


class Grows(Net):
    """Gets a new last layer in the second epoch, and tells the optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.outer = nn.Linear(16, 4)
            self.optimizers().add_param_group({"params": list(self.outer.parameters()), "lr": 0.01})


def test_layer_replaced_during_training() -> None:
    assert_twins(Grows, max_epochs=2)


class Lazy(Net):
    """Its first layer learns its width from the first batch.

    Args:
        when: In which hook a batch is shown to it; None: in none.
    """

    def __init__(self, when: str | None) -> None:
        super().__init__()
        self.when = when
        self.inner = nn.LazyLinear(16)
        if when == "__init__":
            self(batch())

    def configure_model(self) -> None:
        if self.when == "configure_model":
            self(batch())

    def setup(self, stage: str) -> None:
        if self.when == "setup":
            self(batch())


def batch() -> Tensor:
    return next(iter(batches()))


@pytest.mark.parametrize("when", ["__init__", "configure_model", "setup"])
def test_lazy_layers_that_were_shown_a_batch(when: str) -> None:
    own = assert_twins(lambda: Lazy(when), max_epochs=2, trains=False)  # no weights before, so that none has moved
    assert not torch.equal(own.weights["outer.weight"], own.before["outer.weight"])


def test_lazy_layers_that_were_not() -> None:
    with pytest.raises(
        ValueError, match=r"parameter 'inner\.weight' is lazy and has no shape yet.*Run the module once"
    ):
        run(lambda: Lazy(None), ours())


class Nothing(pl.LightningModule):
    """Nothing of it requires gradients, by the kind: no parameters, frozen ones in the optimizer, or no optimizer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.automatic_optimization = False
        self.layers = nn.ModuleDict({} if kind == "empty" else {"layer": nn.Linear(8, 8).requires_grad_(False)})
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.count += self.layers["layer"](batch).mean() if "layer" in self.layers else batch.mean()
        if self.kind == "frozen":
            self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.kind == "frozen" else None


@pytest.mark.parametrize("kind", ["empty", "frozen", "without_optimizer"])
def test_nothing_to_train(kind: str) -> None:
    own = assert_twins(lambda: Nothing(kind))
    assert own.moved == {"count"}


@pytest.mark.slow
def test_whole_module_compiled() -> None:
    """By a backend that changes nothing; nothing is logged in its steps, which dynamo does not bear."""

    def drive(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        compiled: Any = torch.compile(module, backend="eager")
        trainer.fit(compiled, batches())

    assert_twins(Net, drive=drive)


@pytest.mark.parametrize("options", [{"detect_anomaly": True}, {"deterministic": True}, {"benchmark": False}])
def test_debugging_options(options: dict[str, Any]) -> None:
    try:
        assert_twins(Net, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["dropout", "transformer", "checkpoint"])
def test_random_numbers_are_drawn_as_by_stock(name: str) -> None:
    """As many, and in the same places: the next one after training is the same too."""

    def drive(trainer: pl.Trainer, module: pl.LightningModule) -> Tensor:
        trainer.fit(module, batches(), batches())
        return torch.rand(4)

    assert_twins(lambda: Program(name), drive=drive, limit_val_batches=1.0)
    after = run(lambda: Program(name), ours("bf16-true"), drive=drive, limit_val_batches=1.0)
    assert after.notes[-1].dtype == torch.float32


class Autocasts(Net):
    """Chooses its own precision for a part of its step."""

    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(x).float()


def test_autocast_of_the_user() -> None:
    assert_twins(Autocasts)


class Precise(Net):
    """A program in FP64 throughout, by the default dtype."""

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x.double()) + torch.zeros(1).sum()


def test_default_dtype_of_the_user() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        own = assert_twins(lambda: Precise().double())
    finally:
        torch.set_default_dtype(torch.float32)
    assert own.weights["inner.weight"].dtype == torch.float64
