"""One module and one Trainer through several runs: what is there before, between and after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from tests.compat.logged import FP32, Logged, per_epoch, trainer
from tests.compat.twin import RUN_RTOL, assert_same, assert_twins, compare, ours, run
from tests.models import quiet_trainer
from tests.net import PRECISIONS, adamw, batches, sgd

EVALUATIONS = ["validate", "test", "predict"]

SEQUENCES = [
    ("validate", "fit"),
    ("fit", "validate", "test", "predict"),
    ("predict", "fit", "predict"),
    ("fit", "fit"),
    ("fit", "test", "fit", "test"),
    ("test", "validate", "fit", "predict", "fit"),
]


def do(pl_trainer: pl.Trainer, module: Any, *names: str) -> list[Any]:
    """Run each by name; a second fit goes on for an epoch more."""
    results = []
    for index, name in enumerate(names):
        if name == "fit":
            pl_trainer.fit_loop.max_epochs = names[: index + 1].count("fit")
            pl_trainer.fit(module, batches(), batches())
        else:
            options = {} if name == "predict" else {"verbose": False}
            results.append(getattr(pl_trainer, name)(module, batches(), **options))
        results.append(copy.deepcopy(module.state_dict()))
        results.append([str(parameter.dtype) for parameter in module.parameters()])
    return results


class TestSequences:
    @pytest.mark.parametrize("names", SEQUENCES, ids=" ".join)
    def test_of_runs_of_one_trainer(self, names: tuple[str, ...]) -> None:
        assert_twins(Logged, drive=lambda t, m: do(t, m, *names), limit_val_batches=1.0)

    def test_with_adamw(self) -> None:
        names = SEQUENCES[-1]
        assert_twins(lambda: Logged(adamw), RUN_RTOL, drive=lambda t, m: do(t, m, *names), limit_val_batches=1.0)

    @pytest.mark.parametrize("name", EVALUATIONS)
    def test_of_one_evaluation_without_fit(self, name: str) -> None:
        assert_twins(Logged, drive=lambda t, m: do(t, m, name), trains=False)

    def test_of_trainers_over_one_module(self) -> None:
        """Each gets a strategy of its kind; the module and what it trained go on."""

        def drive(first: pl.Trainer, module: Any) -> Any:
            kind = "auto" if type(first.strategy).__name__ == "SingleDeviceStrategy" else None
            first.fit(module, batches())
            second = quiet_trainer(strategy=kind or ours(), max_epochs=2)
            second.fit(module, batches())
            return second.optimizers[0].state_dict()

        assert_twins(Logged, drive=drive)

    def test_of_modules_in_one_trainer(self) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
            other = Logged()
            pl_trainer.fit(module, batches())
            pl_trainer.test(other, batches(), verbose=False)
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(other, batches(2))
            return other.state_dict()

        assert_twins(Logged, drive=drive)

    @pytest.mark.parametrize("kind", [1, 2])
    def test_of_strategies_over_one_module(self, kind: int) -> None:
        """Stock training goes on with what was trained here, and the other way round, as if one had done it all."""
        states = []
        for kinds in (("auto", "auto"), ("auto", FP32) if kind == 1 else (FP32, "auto")):
            module = Logged(per_epoch)
            for name in kinds:
                pl_trainer = quiet_trainer(strategy="auto" if name == "auto" else ours(), max_epochs=2)
                pl_trainer.fit(module, batches())
            states.append((dict(module.state_dict()), pl_trainer.optimizers[0].state_dict()))
        compare("states", states[1], states[0])

    def test_optimizers_stay_with_the_trainer(self) -> None:
        """After fit, through an evaluation and until the next fit."""

        def drive(pl_trainer: pl.Trainer, module: Any) -> list[Any]:
            seen = [len(pl_trainer.optimizers)]
            hook = LambdaCallback(on_test_start=lambda t, _: seen.append(t.optimizers[0].state_dict()))
            pl_trainer.callbacks.append(hook)
            pl_trainer.fit(module, batches())
            first = pl_trainer.optimizers[0]
            pl_trainer.test(module, batches(), verbose=False)
            seen += [pl_trainer.optimizers[0] is first, first.state_dict()]
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(module, batches())
            return [*seen, pl_trainer.optimizers[0] is first]

        assert_twins(Logged, drive=drive)


class Configured(Logged):
    """Builds its layers in `configure_model`, and notes how."""

    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.late: nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            self.late = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.notes.append([str(p.dtype) + str(p.device) for p in self.late.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        assert self.late is not None
        return super().forward(x + self.late(x))


class TestConfigureModel:
    @pytest.mark.parametrize("names", SEQUENCES[1:4], ids=" ".join)
    def test_builds_what_stock_builds(self, names: tuple[str, ...]) -> None:
        assert_twins(Configured, drive=lambda t, m: do(t, m, *names), limit_val_batches=1.0)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_starts_from_fp32_values(self, precision: str) -> None:
        """Without a step, the weights are those of stock: never rounded."""
        still = partial(sgd, lr=0.0, momentum=0)
        ignore = ["calls", "checkpoint", "optimizers", "notes", "metrics"]
        states = []
        for strategy in ("auto", ours(precision)):
            outcome = run(lambda: Configured(still), strategy)
            outcome.weights = {k: v for k, v in outcome.weights.items() if "running" not in k}
            states.append(outcome)
        assert_same(*states, ignore=ignore)

    def test_resumes_from_a_checkpoint(self, tmp_path: Path) -> None:
        def drive(pl_trainer: pl.Trainer, module: Any) -> None:
            path = tmp_path / "x.ckpt"
            pl_trainer.fit(module, batches())
            pl_trainer.save_checkpoint(path)
            pl_trainer.fit_loop.max_epochs = 2
            pl_trainer.fit(module, batches(), ckpt_path=path, weights_only=True)

        assert_twins(Configured, drive=drive)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", FP32])
def test_init_module_builds_in_fp32_on_the_cpu(precision: str) -> None:
    """Masters are made of it; stock builds it on the training device in the training dtype."""
    pl.seed_everything(1, verbose=False)
    expected = nn.Linear(4, 4)
    pl.seed_everything(1, verbose=False)
    pl_trainer = quiet_trainer(strategy=ours(precision))
    with pl_trainer.init_module():
        built = nn.Linear(4, 4)
        constant = torch.ones(2)
    compare("built", dict(built.state_dict()), dict(expected.state_dict()))
    assert (constant.dtype, constant.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("inside", ["empty", "with weights"])
def test_init_module_and_fit(inside: str) -> None:
    def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
        with pl_trainer.init_module(empty_init=inside == "empty"):
            built = Logged()
        built.load_state_dict(module.state_dict())
        pl_trainer.fit(built, batches())
        return built.state_dict()

    assert_twins(Logged, drive=drive, trains=False)


class TestEvaluation:
    @pytest.mark.parametrize("name", EVALUATIONS)
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_takes_no_memory_of_the_host(self, name: str, precision: str) -> None:
        sizes = []
        stage = {"validate": "validation"}.get(name, name)
        hook = LambdaCallback(**{f"on_{stage}_start": lambda t, _: sizes.append(t.strategy.offload.memory.nbytes)})
        module = Logged(adamw)
        before = copy.deepcopy(module.state_dict())
        pl_trainer = quiet_trainer(strategy=ours(precision), callbacks=[hook])
        do(pl_trainer, module, name)
        assert sizes == [0]
        compare("weights", dict(module.state_dict()), dict(before))

    @pytest.mark.parametrize("inference_mode", [True, False])
    @pytest.mark.parametrize("sanity", [0, 2, -1])
    def test_during_fit(self, inference_mode: bool, sanity: int) -> None:
        options = {"inference_mode": inference_mode, "num_sanity_val_steps": sanity, "limit_val_batches": 1.0}
        assert_twins(Gradients if not inference_mode else Logged, **options, max_epochs=2)

    def test_with_gradients(self) -> None:
        own = assert_twins(Gradients, drive=lambda t, m: do(t, m, "fit", "test"), inference_mode=False)
        assert any(isinstance(note, Tensor) and note.norm() > 0 for note in own.notes)


class Gradients(Logged):
    """Takes gradients with respect to its inputs while it evaluates."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(x), x)
        self.notes.append(gradient)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_after_fit_the_module_holds_the_masters(precision: str, optimizer: Callable[..., Any]) -> None:
    """FP32 on the CPU, with the bits a checkpoint made at the end has."""
    last: list[dict[str, Tensor]] = []
    module = Logged(optimizer)
    hook = LambdaCallback(on_train_end=lambda t, m: last.append(copy.deepcopy(m.state_dict())))
    pl_trainer = trainer(strategy=ours(precision), max_epochs=2, callbacks=[hook])
    pl_trainer.fit(module, batches())
    compare("weights", dict(module.state_dict()), dict(last[0]))
    assert {str(p.device) for p in module.parameters()} == {"cpu"}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    if precision != FP32:
        assert not torch.equal(module.inner.weight, module.inner.weight.bfloat16().float()), "only BF16 came back"


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end", "on_validation_end", "on_before_zero_grad"])
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_exception_leaves_what_stock_leaves(hook: str, error: BaseException) -> None:
    """And both can train on afterwards."""

    class Fails(Logged):
        failed = 0

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.failed += 1
        if self.failed == 2:
            raise error
        return getattr(Logged, hook)(self, *args, **kwargs)

    setattr(Fails, hook, fail)

    def drive(pl_trainer: pl.Trainer, module: Any) -> Any:
        with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
            pl_trainer.fit(module, batches(), batches())
        state = copy.deepcopy(module.state_dict())
        again = quiet_trainer(strategy=_same_kind(pl_trainer), max_epochs=1)
        again.fit(module, batches())
        return state

    assert_twins(Fails, drive=drive, max_epochs=3, limit_val_batches=1.0)


def _same_kind(pl_trainer: pl.Trainer) -> Any:
    return "auto" if type(pl_trainer.strategy).__name__ == "SingleDeviceStrategy" else ours()


def test_hooks_of_module_callbacks_and_strategy_are_called_as_in_stock() -> None:
    """By Lightning's own record: names, order and number of every call, over several kinds of run."""
    own = assert_twins(
        lambda: Logged(per_epoch),
        drive=lambda t, m: do(t, m, "validate", "fit", "test", "fit", "predict"),
        callbacks=lambda: [LambdaCallback()],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        limit_val_batches=1.0,
        trainer=trainer,
    )
    assert len(own.calls) > 300
    assert any("on_before_optimizer_step" in call for call in own.calls)
