"""Sums of gradients on the host: what is kept as it came reads, adds and steps as what is widened at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.kernels import ThreadPool
from lightning_cpu_offload.offload import attach, sums
from lightning_cpu_offload.offload.attach import Attachment, Settings
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.memory import HostArena
from lightning_cpu_offload.offload.sums import COPIED, Sums
from lightning_cpu_offload.offload.transfer import InlineEngine
from tests.engines import Schedule
from tests.models import NetworkModule, train_with_lightning
from tests.programs import Loop, Program, fit, on_engine, recorded, run, same_bits, simulated
from tests.reference import Case, HostGradientLoop, all_cases, assert_identical, assert_same_losses
from tests.test_correctness_matrix import CHOICES, assert_step_by_step
from tests.test_schedules import check

CPU = torch.device("cpu")
WHERE = [pytest.param(True, id="kernel"), pytest.param(False, id="torch")]


@pytest.fixture(autouse=True)
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the tests' tensors are."""
    monkeypatch.setattr(sums, "LEAST_KEPT", 1)
    monkeypatch.setattr(sums, "BLOCK", 1)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each gradient that a step read as it had come."""
    found: list[int] = []
    parts = Sums.parts

    def noted(self: Sums, start: int, stop: int) -> Any:
        for first, last, gradient in parts(self, start, stop):
            if gradient.dtype == torch.bfloat16:
                found.append(last - first)
            yield first, last, gradient

    monkeypatch.setattr(Sums, "parts", noted)
    return found


def gradient(numel: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_sums(numel: int) -> Sums:
    arena = HostArena(numel)
    arena.flat(0, numel).fill_(float("nan"))
    return Sums(arena, ThreadPool(2))


# --- one region -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", WHERE)
@pytest.mark.parametrize("numel", [1, 2, 3, 100, COPIED, COPIED + 1, 2 * COPIED + 1, 11 * COPIED + 7])
def test_widened_or_not_the_numbers_are_the_same(numel: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: kernel)
    first, second = gradient(numel, 0), gradient(numel, 1)
    ours, others = make_sums(numel), make_sums(numel)
    squares = [each.begin(0, numel, first, keep) for each, keep in ((ours, True), (others, False))]
    # The squares are exact and their sums are made in the same order, whatever holds the numbers.
    assert squares[0] == squares[1] == pytest.approx(float(first.double().square().sum()), rel=1e-12)
    ((_, _, as_it_came),) = ours.parts(0, numel)
    ((_, _, widened),) = others.parts(0, numel)
    assert as_it_came.dtype == torch.bfloat16
    assert widened.dtype == torch.float32
    assert torch.equal(as_it_came, first)
    assert torch.equal(widened, first.float())
    assert ours.add(0, numel, second) == others.add(0, numel, second)
    assert torch.equal(ours.total(0, numel), first.float() + second.float())
    assert torch.equal(others.total(0, numel), first.float() + second.float())


def test_pieces_are_widened_alone() -> None:
    values = [gradient(numel, numel) for numel in (5, 40, 7, 1)]
    borders = [0, 5, 45, 52, 53]
    table = make_sums(53)
    for value, start, stop, keep in zip(values, borders, borders[1:], (False, True, True, True), strict=False):
        table.begin(start, stop, value, keep)
    whole = torch.cat(values)

    def shown(start: int, stop: int) -> list[tuple[int, int, torch.dtype]]:
        found = list(table.parts(start, stop))
        assert torch.equal(torch.cat([part.float() for _, _, part in found]), whole[start:stop].float())
        return [(first, last, part.dtype) for first, last, part in found]

    wide, narrow = torch.float32, torch.bfloat16
    assert shown(0, 53) == [(0, 5, wide), (5, 45, narrow), (45, 52, narrow), (52, 53, narrow)]
    assert shown(3, 47) == [(3, 5, wide), (5, 45, narrow), (45, 47, narrow)]
    assert shown(10, 20) == [(10, 20, narrow)]
    assert list(table.parts(2, 2)) == []
    assert torch.equal(table.total(30, 31), whole[30:31].float())  # a part of it is asked for, all of it is widened
    assert shown(0, 53) == [(0, 45, wide), (45, 52, narrow), (52, 53, narrow)]
    table.begin(5, 45, values[1], True)
    table.begin(45, 52, values[2], False)
    assert shown(0, 53) == [(0, 5, wide), (5, 45, narrow), (45, 52, wide), (52, 53, narrow)]
    table.total(0, 53)
    assert shown(0, 53) == [(0, 53, wide)]


def test_a_new_gradient_may_be_cut_otherwise() -> None:
    table, old, new = make_sums(20), gradient(20, 0), gradient(20, 1)
    table.begin(0, 20, old, True)
    table.begin(0, 12, new[:12], True)
    table.begin(12, 20, new[12:], True)
    assert torch.equal(torch.cat([part for _, _, part in table.parts(0, 20)]), new)
    table.begin(0, 20, old, True)
    assert torch.equal(table.total(0, 20), old.float())


def test_only_what_is_worth_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def dtype(start: int, stop: int, values: Tensor) -> torch.dtype:
        table = make_sums(1 << 19)
        table.begin(start, stop, values, True)
        ((_, _, part),) = table.parts(start, stop)
        return part.dtype

    enough = sums.LEAST_KEPT
    assert dtype(128, enough + 128, gradient(enough, 0)) == torch.bfloat16
    assert dtype(128, enough + 128, gradient(enough, 0, torch.float32)) == torch.float32
    assert dtype(0, enough - 128, gradient(enough - 128, 0)) == torch.float32
    assert dtype(64, enough + 64, gradient(enough, 0)) == torch.float32  # in the middle of a block of 8-bit moments
    assert dtype(0, enough + 64, gradient(enough + 64, 0)) == torch.float32


# --- trainings ------------------------------------------------------------------------------------------------------


def train(case: Case, watched: bool = False, **options: Any) -> NetworkModule:
    precision = CPUOffloadPrecision(case.precision)  # type: ignore[arg-type]
    strategy = CPUOffloadStrategy(gradients="host", precision_plugin=precision, **options)
    return train_with_lightning(case, watched, strategy=strategy)


CASES = all_cases(
    structure=CHOICES["structure"],
    precision=["bf16-true"],
    accumulate=[1, 2],  # of five batches: the last window is of one
    clip=["none", "norm"],
    optimizer=["adamw"],
)


@pytest.mark.parametrize("slot_bytes", [56, 1 << 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_bit_depends_on_what_is_kept(
    case: Case, slot_bytes: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", slot_bytes)
    ours = train(case)
    assert (len(kept) > 0) == (case.accumulate == 1)
    monkeypatch.setattr(sums, "LEAST_KEPT", 1 << 30)
    kept.clear()
    others = train(case)
    assert not kept
    assert_same_losses(ours.losses, others.losses)
    assert_identical(ours.snapshot(), others.snapshot())


@pytest.mark.parametrize("structure", ["plain", "odd"])
def test_each_step_is_that_of_the_reference(structure: str, kept: list[int]) -> None:
    assert_step_by_step(train(Case(structure, "bf16-true", 1, "none", "adamw"), watched=True), HostGradientLoop)
    assert kept


def train_reduced(state_dtype: str, least: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """384, 24, 72 and 3 parameters, in this order."""
    monkeypatch.setattr(sums, "LEAST_KEPT", least)
    return Windows(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 3)), state_dtype=state_dtype).run()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8"])
def test_no_bit_of_reduced_states_depends_on_it(
    state_dtype: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_reduced(state_dtype, 1 << 30, monkeypatch)
    assert not kept
    monkeypatch.setattr(sums, "BLOCK", 128)
    assert same_bits(train_reduced(state_dtype, 1, monkeypatch), expected)
    assert set(kept) == {384}
    monkeypatch.setattr(sums, "BLOCK", 1)  # blocks of 8-bit moments stepped in two parts are rounded twice
    assert same_bits(train_reduced(state_dtype, 1, monkeypatch), expected) == (state_dtype == "bfloat16")


class Windows:
    """Windows of one backward pass, with something between it and the step.

    Args:
        between: Called before each step.
        num_passes: Backward passes of each step, if not one.
    """

    def __init__(
        self,
        net: nn.Module,
        between: Callable[[Attachment], Any] = lambda _: None,
        num_passes: Callable[[int], int] = lambda _: 1,
        **settings: Any,
    ) -> None:
        self.between, self.num_passes = between, num_passes
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.net = net.bfloat16().float()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        options = Settings("host", cpu_threads=1, **settings)
        self.attachment = Attachment(net, [self.optimizer], CPU, lambda *_: torch.bfloat16, options)

    def run(self, steps: int = 5) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * 16).view(2, 16).bfloat16()
        for step in range(steps):
            for number in range(self.num_passes(step)):
                self.net(x * (number + 16**step)).float().square().mean().backward()
            self.between(self.attachment)
            self.optimizer.step()
            self.optimizer.zero_grad()
        state = self.optimizer.state_dict()["state"]
        return [
            *(value.clone() for value in self.net.state_dict().values()),
            *(value.clone() for values in state.values() for value in values.values()),
        ]


def test_who_reads_gradients_has_them_summed_up(kept: list[int]) -> None:
    """The one who reads in every step costs no widening: only the first step after a silent one is kept in vain."""
    seen: list[Tensor] = []
    net = nn.Linear(16, 3)
    Windows(net, lambda attachment: seen.append(attachment.gradient(net.weight))).run()  # type: ignore[arg-type]
    assert set(kept) == {3}  # the bias: nobody looks at it
    silent: list[Tensor] = []
    other = nn.Linear(16, 3)
    Windows(other, lambda attachment: silent.append(attachment._masters[other.weight].host.clone())).run()
    assert 48 in kept
    assert len(seen) == 5
    assert same_bits([net.weight.detach()], [other.weight.detach()])


@pytest.mark.parametrize("num_passes", [lambda step: 1 + step % 2, lambda step: 2, lambda step: 3 - step // 2])
def test_more_gradients_than_expected_are_added(num_passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for least in (1, 1 << 30):
        monkeypatch.setattr(sums, "LEAST_KEPT", least)
        results.append(Windows(nn.Linear(16, 3), num_passes=num_passes).run())
    assert same_bits(*results)


def test_the_comparison_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Windows(nn.Linear(16, 3)).run()
    widen = Sums._as_it_came
    monkeypatch.setattr(Sums, "_as_it_came", lambda self, start, stop: widen(self, start, stop).flip(0))
    assert not same_bits(Windows(nn.Linear(16, 3)).run(), expected)


# --- on the way -----------------------------------------------------------------------------------------------------

PROGRAMS = [
    Program("plain", "bf16-true", 1, "none", "adamw", gradients="host", habit=habit)
    for habit in ("none", "reads", "zeroes", "keeps", "skips", "saves")
]
FITS = [replace(PROGRAMS[0], clip=clip) for clip in ("norm", "value")]


def test_the_programs_keep_what_came(kept: list[int]) -> None:
    """All but those in which somebody reads every gradient, or the step clips every element in FP32."""
    for train_it, program in [*((run, each) for each in PROGRAMS), *((fit, each) for each in FITS)]:
        kept.clear()
        train_it(program, InlineEngine(CPU))
        assert (len(kept) > 0) == (program.habit != "keeps" and program.clip != "value")


@pytest.mark.filterwarnings("ignore:the gradient of .* was read on the device", "ignore:step .* the step is skipped")
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_no_bit_depends_on_the_schedule_and_accesses_are_ordered(program: Program) -> None:
    schedules: list[Schedule] = ["lazy", "eager", 0, 1]
    for schedule in schedules:
        check(run, program, schedule, ordered=True)


@pytest.mark.parametrize("program", FITS, ids=str)
def test_no_bit_of_a_fit_depends_on_the_schedule_and_accesses_are_ordered(program: Program) -> None:
    check(fit, program, "lazy", ordered=True)
    check(fit, program, 0, ordered=True)


@pytest.mark.filterwarnings("ignore:the gradient of .* was read on the device")
@pytest.mark.parametrize("schedule", ["lazy", 0, 1])
def test_the_exact_gradient_waits_for_the_step_that_reads_it(schedule: Schedule) -> None:
    """Clipping it, or widening it, in its place would change what the host still steps with."""

    class Looks(Loop):
        def clip(self) -> None:
            self.attachment.optimizers[0].clip = Clip(max_norm=0.01)  # as the strategy does it

        def follow_habit(self, batch: Any) -> None:
            if self.num_windows % 2:  # after one that nobody looked at, so that gradients are kept
                self.seen += [self.attachment.gradient(p) for p in self.network.parameters()]

    engine, results = simulated(schedule, ordered=True), []
    for each in (engine, InlineEngine(CPU)):
        with on_engine(each), recorded(each):
            results.append(Looks(PROGRAMS[0]).run())
    assert same_bits(*results)
    assert engine.races == []
