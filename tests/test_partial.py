"""Masters and moments that stay on the device: the same training and the same checkpoints, whatever their part."""

from __future__ import annotations

import copy
import math
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.budget import needs
from lightning_cpu_offload.offload.device_step import DeviceStep
from lightning_cpu_offload.offload.resident import choose, resident_bytes
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import InlineEngine
from tests.engines import DeferredEngine, Event
from tests.models import NetworkModule, make_batches, quiet_trainer, train_with_lightning
from tests.order import Order
from tests.reference import Case, Snapshot, all_cases, assert_close, assert_identical, over_a_run, pairwise
from tests.test_correctness_matrix import CHOICES, RUN_RTOL, assert_start_to_end, assert_step_by_step

CPU = torch.device("cpu")
FRACTIONS = [0.0, 0.3, 0.7, 1.0]
SLOT_BYTES = 56
"""14 FP32 or 28 BF16 elements: parameters begin and end inside a chunk, and there are more chunks than slots."""


def train(case: Case, fraction: float, watched: bool = False, **options: Any) -> NetworkModule:
    """The case under the strategy, with a part of the state on the device."""
    precision = CPUOffloadPrecision(case.precision)  # type: ignore[arg-type]
    strategy = CPUOffloadStrategy(device_fraction=fraction, precision_plugin=precision)
    return train_with_lightning(case, watched, strategy=strategy, **options)


# --- the numbers --------------------------------------------------------------------------------------------------


def matrix() -> list[Any]:
    """Every combination of `CHOICES` at every fraction; slow, but for those that make every pair meet."""
    fast = pairwise(**CHOICES, optimizer=["adamw"])
    return [
        pytest.param(
            case, fraction, id=f"{case}-{fraction}", marks=() if case in fast and fraction else pytest.mark.slow
        )
        for case in all_cases(**CHOICES, optimizer=["adamw"])
        for fraction in FRACTIONS
    ]


@pytest.mark.parametrize(("case", "fraction"), matrix())
def test_adamw_agrees_at_every_step(case: Case, fraction: float) -> None:
    assert_step_by_step(train(case, fraction, watched=True))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_adam_with_l2_agrees_at_every_step(precision: str, fraction: float) -> None:
    assert_step_by_step(train(Case(precision=precision, optimizer="adam_l2"), fraction, watched=True))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("precision", CHOICES["precision"])
@pytest.mark.parametrize("structure", CHOICES["structure"])
def test_parameters_may_spread_over_many_chunks(
    structure: str, precision: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", SLOT_BYTES)
    assert_step_by_step(train(Case(structure, precision, optimizer="adamw"), fraction, watched=True))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("structure", CHOICES["structure"])
def test_fp32_agrees_from_start_to_end(structure: str, fraction: float) -> None:
    assert_start_to_end(train(Case(structure, "32-true", optimizer="adamw"), fraction))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_with_torch_operations_on_both_sides_the_part_changes_no_bit(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    case = Case("groups", optimizer="adamw", accumulate=3)
    assert_identical(train(case, fraction).snapshot(), train(case, 0.0).snapshot())


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_the_comparison_notices_a_wrong_step(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DeviceStep.run

    def twice(step: DeviceStep) -> None:
        run(step)
        step.changes[0].mul_(1 + 1e-5)

    monkeypatch.setattr(DeviceStep, "run", twice)
    with pytest.raises(AssertionError):
        assert_step_by_step(train(Case(optimizer="adamw"), fraction, watched=True))


# --- on an engine that delays -------------------------------------------------------------------------------------


def fit_on(engine: Any, fraction: float, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """With torch operations on both sides, whose accesses can be seen."""
    with monkeypatch.context() as patch:
        patch.setattr(attach, "SLOT_BYTES", SLOT_BYTES)
        patch.setattr(attach, "make_engine", lambda device: engine)
        patch.setattr(kernels, "available", lambda: False)
        return train(Case("tied", optimizer="adamw"), fraction).snapshot()


@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("schedule", ["lazy", "eager", *range(4)])
def test_any_schedule_gives_the_same_bits(schedule: Any, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DeferredEngine(schedule, prompt=True)
    expected = fit_on(InlineEngine(CPU), fraction, monkeypatch)
    assert_identical(fit_on(engine, fraction, monkeypatch), expected)
    assert engine.races == []


@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0])
def test_all_accesses_are_ordered(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DeferredEngine("lazy", prompt=True, order=Order())
    with engine.compute():
        fit_on(engine, fraction, monkeypatch)
    assert engine.races == []


class Forgetful(DeferredEngine):
    """Forward does not wait for weights."""

    def wait(self, lane: Any, event: Event) -> None:
        if lane != "compute":
            super().wait(lane, event)


def test_a_wait_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Forgetful("lazy", prompt=True, order=Order())
    with engine.compute(), pytest.warns(UserWarning, match="not finite"):  # poison reaches the loss
        fit_on(engine, 1.0, monkeypatch)
    assert any("compute reads" in race and "h2d writes at pipeline.py" in race for race in engine.races)


# --- by hand ------------------------------------------------------------------------------------------------------


class Loop:
    """A module on the device by hand: 16 x 8 and 8 x 4, then biases."""

    def __init__(self, engine: Any = None, kind: Any = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        self.optimizer = kind(self.net.parameters(), lr=1e-2)
        self.attachment = Attachment(
            self.net, [self.optimizer], CPU, lambda *_: torch.bfloat16, Settings(**settings, cpu_threads=1)
        )

    def backward(self) -> None:
        self.net(torch.ones(2, 16, dtype=torch.bfloat16)).float().pow(2).sum().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def resident(self) -> list[str]:
        masters = [m for region in self.attachment.regions if region.resident for m in region.masters]
        return sorted(master.name for master in masters)


SIZES = {"0.weight": 128, "0.bias": 8, "1.weight": 32, "1.bias": 4}
TOTAL = 12 * sum(SIZES.values())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, []),
        ({"device_fraction": 0.05}, ["0.bias"]),
        ({"device_fraction": 0.75}, ["0.weight"]),
        ({"device_fraction": 0.8}, ["0.bias", "0.weight"]),
        ({"device_fraction": 1.0}, sorted(SIZES)),
        ({"device_memory": 0}, []),
        ({"device_memory": 12 * 128}, ["0.weight"]),
        ({"device_memory": 12 * 128 - 1}, ["0.bias", "1.bias", "1.weight"]),
        ({"device_memory": 1 << 40}, sorted(SIZES)),
    ],
)
def test_the_first_parameters_that_fit_are_resident(settings: dict[str, Any], names: list[str]) -> None:
    loop = Loop(**settings)
    numel = sum(SIZES[name] for name in names)
    memory = loop.attachment.memory
    assert loop.resident() == names
    assert memory.device_bytes == 12 * numel
    assert memory.bytes_by_name.get("masters", 0) == 4 * (172 - numel)
    assert memory.bytes_by_name.get("moments", 0) == 8 * (172 - numel)
    loop.attachment.detach()


def test_a_parameter_of_two_optimizers_counts_with_both_their_moments() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizers = [torch.optim.AdamW([parameter]) for _ in range(2)]
    assert resident_bytes(optimizers) == {parameter: 3 * 20}
    assert choose(resident_bytes(optimizers), 59) == set()
    assert choose(resident_bytes(optimizers), 60) == {parameter}


def test_the_budget_counts_them_on_the_device() -> None:
    plan = {"weight_bytes": 2000, "numel": 600, "state_bytes": 4800, "resident_bytes": 4800}
    needed = needs(**plan)
    assert (needed.host, needed.device) == (7200, 8800)
    assert needs(**plan, on_cpu=True).host == 16_000


def test_bytes_do_not_cross_for_what_is_resident() -> None:
    for fraction, crossing in ((0.0, 344), (0.8, 2 * 36), (1.0, 0)):
        loop = Loop(device_fraction=fraction)
        loop.step()
        report = loop.attachment.report
        assert (report.d2h_bytes, report.h2d_bytes) == (crossing, crossing)
        loop.attachment.detach()


def test_gradients_live_until_the_step_has_landed() -> None:
    """They are read on another lane: their memory must not be given to others before."""
    engine = DeferredEngine("lazy", prompt=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "make_engine", lambda device: engine)
        loop = Loop(device_fraction=1.0)
    loop.backward()
    loop.optimizer.step()
    gradients = [weakref.ref(parameter.grad) for parameter in loop.net.parameters()]
    loop.optimizer.zero_grad()
    assert all(gradient() is not None for gradient in gradients)
    loop.attachment.land()
    assert not any(gradient() is not None for gradient in gradients)
    loop.attachment.detach()


# --- what leaves and what enters ----------------------------------------------------------------------------------


def saved_by(fraction: float, path: Path, ckpt: Path | None = None) -> dict[str, Any]:
    """A checkpoint of the case, trained for one more epoch than `ckpt`."""
    module = NetworkModule(Case("groups", optimizer="adamw"))
    loader: Any = torch.utils.data.DataLoader(make_batches(module.case), batch_size=None)  # type: ignore[arg-type]
    save = pl.callbacks.LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    strategy = CPUOffloadStrategy(device_fraction=fraction, precision_plugin=CPUOffloadPrecision("bf16-mixed"))
    epochs = 1 if ckpt is None else 2
    trainer = quiet_trainer(max_epochs=epochs, accumulate_grad_batches=2, strategy=strategy, callbacks=[save])
    trainer.fit(module, loader, ckpt_path=ckpt)
    after = path.with_suffix(".after")
    trainer.save_checkpoint(after)
    during, end = (torch.load(file, weights_only=True) for file in (path, after))
    assert_identical(snapshot_of(end), snapshot_of(during))
    return during


def snapshot_of(checkpoint: dict[str, Any]) -> Snapshot:
    return Snapshot(checkpoint["state_dict"], checkpoint["optimizer_states"][0])


def structure(value: Any) -> Any:
    """Keys, shapes, dtypes, devices and sizes of storages."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    return [structure(item) for item in value] if isinstance(value, (list, tuple)) else type(value)


@pytest.mark.parametrize("second", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("first", [0.0, 0.5, 1.0])
def test_checkpoints_are_the_same_and_continue_with_another_part(first: float, second: float, tmp_path: Path) -> None:
    plain = saved_by(0.0, tmp_path / "plain.ckpt")
    part = saved_by(first, tmp_path / "part.ckpt")
    assert structure(part) == structure(plain)
    assert_close(snapshot_of(part), snapshot_of(plain), over_a_run(RUN_RTOL))
    ends = [saved_by(f, tmp_path / f"{f}.ckpt", tmp_path / "part.ckpt") for f in (first, second)]
    assert structure(ends[0]) == structure(ends[1])
    assert_close(snapshot_of(ends[1]), snapshot_of(ends[0]), over_a_run(RUN_RTOL))
    with pytest.raises(AssertionError):
        assert_close(snapshot_of(ends[1]), snapshot_of(part), over_a_run(RUN_RTOL))


def test_state_is_loaded_by_hand() -> None:
    plain, resident = Loop(), Loop(device_fraction=1.0)
    for _ in range(3):
        plain.step()
    resident.net.load_state_dict(plain.net.state_dict())
    resident.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))  # torch shares what it loads
    for loop in (plain, resident):
        state = loop.optimizer.state_dict()["state"]
        assert [tensor.device for entry in state.values() for tensor in entry.values()] == [CPU] * 12
    before = snapshots(plain, resident)
    assert_identical(before[1], before[0])
    for loop in (plain, resident):
        loop.step()
    after = snapshots(plain, resident)
    assert_close(after[1], after[0], over_a_run(RUN_RTOL))
    with pytest.raises(AssertionError):
        assert_close(after[1], before[1], over_a_run(RUN_RTOL))
    for loop in (plain, resident):
        loop.attachment.detach()


def snapshots(*loops: Loop) -> list[Snapshot]:
    return [Snapshot(dict(loop.net.state_dict()), loop.optimizer.state_dict()) for loop in loops]


def test_what_was_saved_is_a_copy_that_steps_do_not_change() -> None:
    loop = Loop(device_fraction=1.0)
    loop.step()
    saved, (kept,) = (loop.net.state_dict(), loop.optimizer.state_dict()["state"]), snapshots(loop)
    loop.step()
    assert_identical(Snapshot(saved[0], {"state": saved[1], "param_groups": kept_groups(loop)}), kept)
    loop.attachment.detach()


def kept_groups(loop: Loop) -> list[dict[str, Any]]:
    return loop.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
def test_a_write_to_what_state_dict_returned_is_one_to_the_weight(fraction: float, again: bool) -> None:
    loop = Loop(device_fraction=fraction)
    loop.step()
    shown = loop.net.state_dict()["0.weight"]
    if again:
        assert loop.net.state_dict()["0.weight"] is not None
    shown.fill_(0.25)
    assert loop.net.state_dict()["0.weight"].eq(0.25).all()
    loop.attachment.refresh(cast=False, trains=True)
    assert loop.net[0].weight.eq(0.25).all()
    loop.step()
    assert loop.net.state_dict()["0.weight"].sub(0.25).abs().max() < 0.02  # one step of Adam, of at most lr
    loop.attachment.detach()
    assert loop.net[0].weight.sub(0.25).abs().max() < 0.02


@pytest.mark.parametrize("fraction", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "hidden"])
def test_writes_into_weights_are_adopted(fraction: float, hidden: bool) -> None:
    loop = Loop(device_fraction=fraction)
    loop.step()
    with torch.no_grad():
        (loop.net[0].weight.data if hidden else loop.net[0].weight)[0].fill_(0.5)
    loop.step()
    value = loop.net.state_dict()["0.weight"]
    assert value[0].sub(0.5).abs().max() < 0.02
    loop.attachment.detach()


def test_detach_gives_fp32_on_the_cpu_back() -> None:
    loop = Loop(device_fraction=1.0)
    loop.step()
    (before,) = snapshots(loop)
    loop.attachment.detach()
    assert_identical(snapshots(loop)[0], before)
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in loop.net.parameters())
    plain = copy.deepcopy(loop.optimizer)
    assert plain.state_dict()["state"].keys() == loop.optimizer.state_dict()["state"].keys()


# --- gradients that are not finite, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_whole_step(fraction: float, value: float) -> None:
    loop = Loop(device_fraction=fraction)
    loop.step()
    (before,) = snapshots(loop)
    loop.optimizer.zero_grad()
    loop.backward()
    loop.net[1].bias.grad[0] = value  # type: ignore[index, union-attr]
    with pytest.warns(UserWarning, match=r"the gradient of '1\.bias' is not finite; the step is skipped"):
        loop.optimizer.step()
    assert_identical(snapshots(loop)[0], before)
    loop.step()
    with pytest.raises(AssertionError):
        assert_identical(snapshots(loop)[0], before)
    loop.attachment.detach()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_fraction": 1.5}, r"device_fraction=1\.5: from 0 to 1\."),
        ({"device_fraction": -0.1}, r"device_fraction=-0\.1: from 0 to 1\."),
        ({"device_fraction": math.nan}, r"device_fraction=nan: from 0 to 1\."),
        ({"device_memory": "much"}, r"device_memory='much': a number of bytes, or as in '8GiB'\."),
        (
            {"device_memory": "8GiB", "device_fraction": 0.5},
            r"device_memory='8GiB': device_fraction=0\.5 says the same",
        ),
        (
            {"device_fraction": 0.5, "update": "delayed"},
            r"update='delayed': device_fraction needs update='exact' or",
        ),
        ({"device_memory": "8GiB", "update": "delayed"}, r"update='delayed': device_memory needs update='exact'"),
        ({"device_fraction": 0.5, "gradients": "host"}, r"gradients='host': device_fraction needs gradients='device'"),
        ({"device_memory": 1, "gradients": "auto"}, r"gradients='auto': device_memory needs gradients='device'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        CPUOffloadStrategy(**options)


@pytest.mark.parametrize("device_memory", ["8GiB", "1 GB", 12 * 128, "12"])
def test_device_memory_is_an_amount_of_bytes(device_memory: Any) -> None:
    assert CPUOffloadStrategy(device_memory=device_memory)


@pytest.mark.parametrize("settings", [{"device_fraction": 0.5}, {"device_memory": 8}])
def test_optimizers_that_are_not_stepped_there_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^optimizer=SGD: device_fraction and device_memory keep state"):
        Loop(kind=torch.optim.SGD, **settings)
    with pytest.raises(ValueError, match=r"^optimizer=AdamW: device_fraction and device_memory keep state"):
        Loop(kind=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, amsgrad=True), **settings)


def test_amsgrad_cannot_be_switched_on() -> None:
    loop = Loop(device_fraction=0.5)
    loop.step()
    loop.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"^optimizer=AdamW: .* without amsgrad"):
        loop.step()
    loop.attachment.detach()


def test_what_is_unfrozen_later_is_stepped_on_the_host() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    rule = lambda *_: torch.bfloat16  # noqa: E731
    attachment = Attachment(net, [optimizer], CPU, rule, Settings(device_fraction=1.0))
    net[0].requires_grad_(True)
    net(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    attachment.land()
    assert [(region.resident, len(region.masters)) for region in attachment.regions] == [(True, 2), (False, 2)]
    attachment.detach()


def test_the_plan_names_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        train(Case("plain", optimizer="adamw"), 1.0)
    assert "and 0.0 MiB for stepping 485 of them; the host holds" in caplog.text
