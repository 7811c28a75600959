"""update="early": the numbers of an exact step, begun under backward; and never a checkpoint between two steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, OffloadMonitor, kernels
from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.pipeline import EARLY_DEPTH, RING_DEPTH, Pipeline
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import InlineEngine
from tests.engines import DeferredEngine
from tests.models import NetworkModule, quiet_trainer, train_with_lightning
from tests.order import Order
from tests.reference import Case, Snapshot, all_cases, assert_identical, assert_same_losses
from tests.test_correctness_matrix import CHOICES

CPU = torch.device("cpu")
SLOT_BYTES = 64
BETWEEN = "between two steps"


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than slots."""
    monkeypatch.setattr(attach, "SLOT_BYTES", SLOT_BYTES)


class Count:
    """How many chunks began early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added = 0
        self.most = 0
        add = Pipeline.add

        def counted(pipeline: Pipeline, flight: Any, *args: Any) -> None:
            add(pipeline, flight, *args)
            self.added += 1
            self.most = max(self.most, len(flight.slots))

        monkeypatch.setattr(Pipeline, "add", counted)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def train(case: Case, update: str, fraction: float = 0.0, **options: Any) -> NetworkModule:
    precision = CPUOffloadPrecision(case.precision)  # type: ignore[arg-type]
    strategy = CPUOffloadStrategy(
        update=update,  # type: ignore[arg-type]
        nonfinite="raise",
        device_fraction=fraction,
        precision_plugin=precision,
    )
    return train_with_lightning(case, strategy=strategy, **options)


CASES = all_cases(
    structure=[*CHOICES["structure"], "batchnorm"],
    precision=CHOICES["precision"],
    accumulate=[1, 3],
    clip=["none"],
    optimizer=["adamw", "adam_l2"],
)
"""Too many for the fast tests are those of Adam, which differ in the kernel only."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c.optimizer == "adamw" else pytest.mark.slow) for c in CASES]
)
def test_no_bit_differs_from_an_exact_step(case: Case, count: Count) -> None:
    exact, early = train(case, "exact"), train(case, "early")
    assert_same_losses(early.losses, exact.losses)
    assert_identical(early.snapshot(), exact.snapshot())
    assert 0 < count.most <= EARLY_DEPTH - RING_DEPTH


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_stays_on_the_device_does_not_begin_early(fraction: float, count: Count) -> None:
    case = Case("groups", clip="none", optimizer="adamw")
    assert_identical(train(case, "early", fraction).snapshot(), train(case, "exact", fraction).snapshot())
    assert (count.added > 0) == (fraction < 1)


def on(engine: Any, update: str, monkeypatch: pytest.MonkeyPatch, case: Case) -> Snapshot:
    with monkeypatch.context() as patch:
        patch.setattr(attach, "make_engine", lambda device: engine)
        patch.setattr(kernels, "available", lambda: False)
        return train(case, update).snapshot()


@pytest.mark.parametrize("structure", ["tied", "unused"])
@pytest.mark.parametrize("schedule", ["lazy", "eager", *range(5)])
def test_any_schedule_gives_the_same_bits(
    schedule: Any, structure: str, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(structure, clip="none", optimizer="adamw")
    engine = DeferredEngine(schedule, prompt=True)
    assert_identical(on(engine, "early", monkeypatch, case), on(InlineEngine(CPU), "exact", monkeypatch, case))
    assert engine.races == []
    assert engine.is_idle
    assert count.added


@pytest.mark.parametrize("structure", ["tied", "unused"])
def test_all_accesses_are_ordered(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DeferredEngine("lazy", prompt=True, order=Order())
    with engine.compute():
        on(engine, "early", monkeypatch, Case(structure, clip="none", optimizer="adamw"))
    assert engine.races == []


def test_no_weight_leaves_under_backward(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward may still read those of before."""
    pushes: list[bool] = []
    push = Pipeline._push

    def noted(pipeline: Pipeline, flight: Any, index: int) -> None:
        pushes.append(flight is pipeline.opened)
        push(pipeline, flight, index)

    monkeypatch.setattr(Pipeline, "_push", noted)
    train(Case("tied", clip="none", optimizer="adamw"), "early")
    assert count.added
    assert len(pushes) > count.added
    assert not any(pushes)


# --- a backward that does not end ---------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Backward reaches `last` first; then, in batch `fails`, an exception or a NaN."""

    def __init__(self, fails: int | None, error: BaseException | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 20)
        self.last = nn.Linear(20, 20)
        self.fails = fails
        self.error = error

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        if batch_idx == self.fails:
            hidden.register_hook(self.fail)
        return self.last(torch.tanh(hidden)).float().pow(2).mean()

    def fail(self, gradient: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return gradient * math.nan

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Save(pl.Callback):
    """Saves while the run is ending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: list[str] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except RuntimeError as error:
            self.errors.append(str(error))


def fit(module: Module, callbacks: Any = (), update: str = "early", **options: Any) -> pl.Trainer:
    torch.manual_seed(1)
    data: Any = torch.utils.data.DataLoader(torch.randn(8, 4, 6), batch_size=None)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        strategy=CPUOffloadStrategy(update=update, nonfinite="raise"),  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=list(callbacks),
        **{"accumulate_grad_batches": 2, **options},
    )
    module.fit_trainer = trainer  # type: ignore[assignment]
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("error", [RuntimeError("out of something"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failing_backward_leaves_no_checkpoint(error: BaseException, tmp_path: Path, count: Count) -> None:
    save, module = Save(tmp_path / "torn.ckpt"), Module(5, error)
    with pytest.warns(UserWarning, match=BETWEEN), pytest.raises((RuntimeError, SystemExit)):
        fit(module, [save])
    assert count.added
    assert len(save.errors) == 1
    assert BETWEEN in save.errors[0]
    with pytest.raises(RuntimeError, match=BETWEEN):
        module.fit_trainer.save_checkpoint(save.path)  # type: ignore[operator, union-attr]
    assert not save.path.exists()
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(tmp_path: Path) -> None:
    save, module = Save(tmp_path / "torn.ckpt"), Module(5)
    with (
        pytest.warns(UserWarning, match=BETWEEN),
        pytest.raises(FloatingPointError, match=r"step 3: the gradient of 'first\.weight' .* had begun the step"),
    ):
        fit(module, [save])
    assert [BETWEEN in error for error in save.errors] == [True]
    assert not save.path.exists()


@pytest.mark.parametrize("batch", [1, 4], ids=["before there is state", "in the middle of a window"])
def test_where_nothing_has_begun_the_run_can_be_saved(batch: int, tmp_path: Path) -> None:
    saved = {}
    for update in ("exact", "early"):
        save = Save(tmp_path / f"{update}.ckpt")
        with pytest.raises(RuntimeError, match="something"):
            fit(Module(batch, RuntimeError("something")), [save], update)
        assert save.errors == []
        checkpoint = torch.load(save.path, weights_only=True)
        saved[update] = Snapshot(checkpoint["state_dict"], checkpoint["optimizer_states"][0])
    assert_identical(saved["early"], saved["exact"])


def test_a_new_fit_may_be_saved(tmp_path: Path) -> None:
    module = Module(5, RuntimeError("something"))
    with pytest.warns(UserWarning, match=BETWEEN), pytest.raises(RuntimeError, match="something"):
        fit(module)
    trainer: Any = module.fit_trainer
    module.fails = None
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4, 6), batch_size=None))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "whole.ckpt")


# --- what must not change under it --------------------------------------------------------------------------------


class Loop:
    """By hand, with a closure: the only way in which a bare loop says which backward is the last."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        settings = Settings(update="early", nonfinite="raise", cpu_threads=1)
        self.attachment = Attachment(self.net, [self.optimizer], CPU, lambda *_: torch.bfloat16, settings)
        for _ in range(2):
            self.step()

    def step(self, then: Any = None) -> None:
        def closure() -> None:
            self.optimizer.zero_grad()
            loss = self.net(torch.ones(2, 16, dtype=torch.bfloat16)).float().pow(2).sum()
            self.attachment.before_backward()
            loss.backward()
            if then is not None:
                then()

        self.optimizer.step(closure)


def test_a_changed_gradient_is_an_error(count: Count) -> None:
    loop = Loop()
    count.added = 0

    def double() -> None:
        assert count.added
        for parameter in loop.net.parameters():
            parameter.grad.mul_(2)  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match=r"the gradient of '1\.(weight|bias)' was changed after backward"):
        loop.step(double)
    with pytest.raises(RuntimeError, match=BETWEEN):
        loop.net.state_dict()
    with pytest.raises(RuntimeError, match=BETWEEN):
        loop.optimizer.state_dict()
    with pytest.warns(UserWarning, match=BETWEEN):
        loop.attachment.detach()


def test_changed_settings_are_an_error() -> None:
    loop = Loop()

    def slower() -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-3

    with pytest.raises(RuntimeError, match="the optimizer's settings were changed between the last backward and the"):
        loop.step(slower)
    with pytest.warns(UserWarning, match=BETWEEN):
        loop.attachment.detach()


def test_a_write_into_a_weight_is_adopted_or_an_error(count: Count) -> None:
    loop = Loop()
    with torch.no_grad():
        loop.net[0].weight[0].fill_(0.5)  # torch saw it: this step begins late
    count.added = 0
    loop.step()
    assert count.added == 0
    assert loop.net.state_dict()["0.weight"][0].sub(0.5).abs().max() < 0.02  # one step of Adam, of at most lr
    loop.net[0].weight.data[0].fill_(0.25)  # only its fingerprint shows it
    loop.step()
    assert count.added > 0
    assert loop.net.state_dict()["0.weight"][0].sub(0.25).abs().max() < 0.02

    def write() -> None:
        with torch.no_grad():
            loop.net[0].weight.add_(1)

    with pytest.raises(RuntimeError, match="written to while its step was on the way"):
        loop.step(write)
    with pytest.warns(UserWarning, match=BETWEEN):
        loop.attachment.detach()


# --- what is refused ----------------------------------------------------------------------------------------------


def hooked(owner: type, hook: str) -> Any:
    return type(f"With{hook}", (owner,), {hook: lambda self, *args, **kwargs: None})


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_callbacks_that_see_gradients_are_refused(hook: str) -> None:
    with pytest.raises(ValueError, match=rf"^With{hook}\.{hook}: update='early' has stepped"):
        fit(Module(None), [hooked(pl.Callback, hook)()])


@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"]
)
def test_modules_that_see_gradients_are_refused(hook: str) -> None:
    with pytest.raises(ValueError, match=rf"^With{hook}\.{hook}: update='early' has stepped"):
        fit(hooked(Module, hook)(None))


def test_our_own_monitor_is_not_refused(count: Count) -> None:
    fit(Module(None), [OffloadMonitor(log_every_n_steps=1)])
    assert count.added


def test_clipping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gradient_clip_val=0\.5: update='early'"):
        fit(Module(None), gradient_clip_val=0.5)


def test_other_optimizers_are_refused() -> None:
    class Other(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters()) for part in (self.first, self.last)]

    class Manual(Two):
        def __init__(self) -> None:
            super().__init__(None)
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"^optimizers=SGD: update='early' is for one"):
        fit(Other(None))
    with pytest.raises(ValueError, match=r"^update='early': .* manual optimization"):
        fit(Manual(), accumulate_grad_batches=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "skip"}, r"nonfinite='skip': update='early' needs nonfinite='raise'"),
        ({"nonfinite": "raise", "gradients": "host"}, r"gradients='host': update='early' needs gradients='device'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        CPUOffloadStrategy(update="early", **options)
