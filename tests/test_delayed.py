"""`update="delayed"`: each window computes with the weights of the step before the last, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.settings import Settings
from tests.models import (
    STRUCTURES,
    NetworkModule,
    build_optimizer,
    falling,
    make_batches,
    make_network,
    quiet_trainer,
    train_reference,
    train_with_lightning,
)
from tests.programs import CPU, same_bits
from tests.reference import (
    Case,
    ReferenceLoop,
    Snapshot,
    all_cases,
    assert_close,
    assert_identical,
    assert_same_losses,
    over_a_run,
)

RUN_RTOL = 1e-5
"""As for exact updates by the kernel: it rounds in its own order, about 1e-6 a step, over ten steps."""

CASES = [
    *all_cases(
        structure=list(STRUCTURES), precision=["bf16-mixed"], accumulate=[1, 2], clip=["norm"], optimizer=["adamw"]
    ),
    *all_cases(structure=["plain"], precision=["bf16-true", "32-true"], clip=["value"], optimizer=["adam_l2"]),
]


class Late(ReferenceLoop):
    """After the first steps the weights become the masters of the step before."""

    exact_steps = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_steps = 0

    def step(self) -> None:
        self.before = {name: master.clone() for name, master in self.masters.items()}
        super().step()

    def push(self) -> None:
        self.num_steps += 1
        for name, weight in self.network.named_parameters():
            late = self.num_steps > self.exact_steps
            weight.data.copy_(self.before[name] if late else self.masters[name])


class NeverExact(Late):
    exact_steps = 0


class LaterThanAsked(Late):
    """A wrong reference: one exact step more."""

    exact_steps = 2


def delayed(case: Case, exact_steps: int = 1, **options: Any) -> CPUOffloadStrategy:
    precision = CPUOffloadPrecision(case.precision, **options)  # type: ignore[arg-type]
    return CPUOffloadStrategy(update="delayed", exact_steps=exact_steps, precision_plugin=precision)


@contextmanager
def by_torch() -> Iterator[None]:
    """Steps by torch operations, as where numba is missing: the reference's own arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "available", lambda: False)
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference_bit_for_bit(case: Case) -> None:
    with by_torch():
        module = train_with_lightning(case, strategy=delayed(case))
    loop = train_reference(case, Late)
    assert_same_losses(module.losses, loop.losses)
    assert_identical(module.snapshot(), loop.snapshot())


@pytest.mark.parametrize("exact_steps", [0, 1, 2, 40])
def test_the_first_steps_are_exact(exact_steps: int) -> None:
    case = Case(optimizer="adamw")
    kind: type[ReferenceLoop] = {0: NeverExact, 1: Late, 2: LaterThanAsked, 40: ReferenceLoop}[exact_steps]
    with by_torch():
        module = train_with_lightning(case, strategy=delayed(case, exact_steps))
    loop = train_reference(case, kind)
    assert_same_losses(module.losses, loop.losses)
    assert_identical(module.snapshot(), loop.snapshot())


@pytest.mark.parametrize("kind", [ReferenceLoop, NeverExact, LaterThanAsked])
def test_another_lateness_is_noticed(kind: type[ReferenceLoop]) -> None:
    case = Case(optimizer="adamw")
    with by_torch():
        module = train_with_lightning(case, strategy=delayed(case))
    loop = train_reference(case, kind)
    with pytest.raises(AssertionError):
        assert_same_losses(module.losses, loop.losses)
    with pytest.raises(AssertionError):
        assert_close(module.snapshot(), loop.snapshot(), over_a_run(RUN_RTOL))


@pytest.mark.skipif(not kernels.available(), reason="numba is not there")
@pytest.mark.parametrize("optimizer", ["adamw", "adam_l2"])
def test_the_kernel_agrees(optimizer: str) -> None:
    case = Case(precision="32-true", optimizer=optimizer)  # a last bit cannot flip the rounding of a weight
    module, loop = train_with_lightning(case, strategy=delayed(case)), train_reference(case, Late)
    assert_close(module.snapshot(), loop.snapshot(), over_a_run(RUN_RTOL))
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(loop.losses), rtol=RUN_RTOL, atol=0)


# --- drained where exactness is asked for -------------------------------------------------------------------------


class Reader:
    """A bare loop of delayed steps, to be looked at between two of them."""

    def __init__(self) -> None:
        self.case = Case(precision="32-true", optimizer="adamw", accumulate=1, clip="none")
        self.network: Any = make_network("plain")
        self.optimizer = build_optimizer("adamw", self.network.named_parameters(), grouped=False)
        settings = Settings(update="delayed", exact_steps=1)
        self.attachment = Attachment(self.network, [self.optimizer], CPU, lambda _, tensor, __: tensor.dtype, settings)
        self.batches = iter(make_batches(self.case))

    def step(self) -> None:
        self.network.loss(next(self.batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_and_land_twice(self) -> None:
        for _ in range(2):
            self.step()
            self.attachment.land()

    @property
    def is_drained(self) -> bool:
        """Whether nothing is under way, and weights and masters agree."""
        pipeline = self.attachment.pipeline
        assert pipeline is not None
        return pipeline.working is None and all(
            torch.equal(master.view, master.host) for master in self.attachment._masters.values()
        )


@pytest.fixture
def reader() -> Iterator[Reader]:
    loop = Reader()
    for _ in range(3):
        loop.step()
    assert not loop.is_drained
    yield loop
    loop.attachment.detach()


def show_masters(attachment: Attachment) -> None:
    with attachment.masters_shown(for_writing=True):
        pass


READS: dict[str, Callable[[Reader], Any]] = {
    "the module's state": lambda loop: loop.network.state_dict(),
    "a part's state": lambda loop: loop.network.inner.state_dict(),
    "the optimizer's state": lambda loop: loop.optimizer.state_dict(),
    "a moment": lambda loop: loop.optimizer.state[loop.network.inner.weight]["exp_avg"].sum(),
    "loading": lambda loop: loop.network.load_state_dict(loop.network.state_dict()),
    "averages": lambda loop: show_masters(loop.attachment),
    "validation": lambda loop: loop.attachment.refresh(cast=False, trains=False),
}


def test_averages_drain_a_step_that_no_gate_guards() -> None:
    """Another mode is active, so what they touch lands nothing."""
    with BaseTorchFunctionMode():
        loop = Reader()
        for _ in range(3):
            loop.step()
        assert not loop.is_drained
        show_masters(loop.attachment)
        assert loop.is_drained
        loop.attachment.detach()


@pytest.mark.parametrize("what", READS)
def test_reading_drains(reader: Reader, what: str) -> None:
    READS[what](reader)
    assert reader.is_drained
    reader.step()
    assert not reader.is_drained


def test_a_training_step_does_not_drain(reader: Reader) -> None:
    reader.attachment.refresh(cast=False, trains=True)
    reader.network.loss(next(reader.batches)).backward()
    assert not reader.is_drained


class Recorder(NetworkModule):
    """Validates with the first batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.validated: list[tuple[Tensor, dict[str, Tensor]]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self.network.named_parameters()}
        self.validated.append((self.network.loss(batch).detach().clone(), weights))


def test_validation_sees_the_last_step() -> None:
    case = Case(precision="32-true", optimizer="adamw")
    module = Recorder(case)
    loader: Any = torch.utils.data.DataLoader(make_batches(case), batch_size=None)  # type: ignore[arg-type]
    masters: list[dict[str, Tensor]] = []

    def look(*_unused: Any) -> None:
        masters.append({name: value.clone() for name, value in module.network.state_dict().items()})

    trainer = quiet_trainer(
        strategy=delayed(case), max_epochs=2, limit_val_batches=1, callbacks=[LambdaCallback(on_validation_end=look)]
    )
    trainer.fit(module, loader, loader)
    assert len(module.validated) == len(masters) >= 2
    for (_, weights), expected in zip(module.validated, masters, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


# --- checkpoints --------------------------------------------------------------------------------------------------


def fit_epochs(case: Case, epochs: int, folder: Path | None = None, checkpoint: Path | None = None) -> NetworkModule:
    """Trains, saves after each epoch, and may go on from a checkpoint."""
    module = NetworkModule(case)
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1) if folder else None
    trainer: Any = quiet_trainer(
        strategy=delayed(case),
        max_epochs=epochs,
        accumulate_grad_batches=case.accumulate,
        **({"callbacks": [saving], "enable_checkpointing": True} if saving else {}),
    )
    loader: Any = torch.utils.data.DataLoader(make_batches(case), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module


@pytest.fixture
def checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `quiet_trainer` take a checkpoint callback."""
    monkeypatch.setattr("tests.test_delayed.quiet_trainer", _saving_trainer)


def _saving_trainer(**options: Any) -> Any:
    import lightning.pytorch as pl

    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", enable_model_summary=False, **{**defaults, **options})


@pytest.mark.usefixtures("checkpointed")
def test_a_checkpoint_holds_the_last_step_and_is_one_for_any_trainer(tmp_path: Path) -> None:
    case = Case(precision="32-true", optimizer="adamw", clip="none")
    with by_torch():
        module = fit_epochs(case, 1, tmp_path)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)
    weights = {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}
    assert_identical(Snapshot(weights, saved["optimizer_states"][0]), module.snapshot())
    loop = Late(make_network("plain"), lambda named: build_optimizer("adamw", named, False), falling, case)
    assert_identical(module.snapshot(), loop.fit(make_batches(case), 1).snapshot())


@pytest.mark.usefixtures("checkpointed")
def test_a_resumed_run_goes_on_from_a_drained_one(tmp_path: Path) -> None:
    """A checkpoint drains, so a run that saved at the same moment is the one to compare with."""
    case = Case(precision="bf16-mixed", optimizer="adamw", clip="none")
    with by_torch():
        expected = fit_epochs(case, 2, tmp_path / "whole")
        fit_epochs(case, 1, tmp_path / "half")
        resumed = fit_epochs(case, 2, tmp_path / "again", tmp_path / "half" / "epoch=0.ckpt")
    assert same_bits([expected.losses[len(expected.losses) // 2]], [resumed.losses[0]])
    assert set(expected.snapshot().entries) == set(resumed.snapshot().entries)
    for key, value in expected.snapshot().entries.items():
        if key.endswith("/step"):
            assert torch.equal(resumed.snapshot().entries[key], value)


# --- writes by others ---------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda network: nn.init.ones_(network.inner.weight),
    "through .data": lambda network: network.inner.weight.data.fill_(1),
    "other data": lambda network: setattr(network.inner.weight, "data", torch.ones(24, 12)),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_between_delayed_steps_is_refused(reader: Reader, how: str) -> None:
    WRITES[how](reader.network)
    with pytest.raises(RuntimeError, match=r"inner\.weight: written to while its step was on the way.*update='exact'"):
        reader.step_and_land_twice()


@pytest.mark.parametrize("how", WRITES)
def test_a_write_into_drained_weights_is_taken_over(reader: Reader, how: str) -> None:
    reader.attachment.land()
    WRITES[how](reader.network)
    assert reader.network.state_dict()["inner.weight"].eq(1).all()
    reader.step()
    state = reader.network.state_dict()["inner.weight"]
    assert (state - 1).abs().max() <= 0.05  # one step of AdamW from there


def test_an_optimizer_that_cannot_be_late_says_so() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    device = torch.device("cpu")
    with pytest.warns(UserWarning, match=r"update='delayed' is for Adam and AdamW: SGD makes exact steps"):
        attachment = Attachment(net, [optimizer], device, lambda *_: torch.bfloat16, Settings(update="delayed"))
    attachment.detach()
