"""Whole small trainings on an engine that delays transfers and host work: the numbers of the inline engine, always.

A schedule is lazy, eager, or random from a seed. Not one of the bits may depend on it, no copy may find its source
changed. On the lazy one and on one in three of the random ones every two accesses to the same bytes must be ordered by
a launch, an event or a task.
"""

from __future__ import annotations

import pytest

from lightning_cpu_offload import kernels
from lightning_cpu_offload.offload.transfer import InlineEngine
from tests.engines import Schedule
from tests.programs import CPU, Program, Train, draw_programs, expected, fit, run, same_bits, simulated

PROGRAMS = draw_programs(64)
FITS = draw_programs(24, habits=["none"])

FAST = 6
"""Programs of the fast tests."""

FAST_SEEDS = range(5)
SEEDS = range(5, 34)
FIT_SEEDS = range(9)
ORDERED_EVERY = 3
"""One in so many random schedules has its accesses looked at, which makes it take three times as long."""


def is_ordered(schedule: Schedule) -> bool:
    """Whether the order of accesses is looked at, where many schedules are run."""
    return isinstance(schedule, int) and schedule % ORDERED_EVERY == 0


def test_there_are_at_least_2000_random_schedules() -> None:
    num_fits = len(FITS) * len(FIT_SEEDS)
    assert num_fits >= 200
    assert FAST * len(FAST_SEEDS) + len(PROGRAMS) * len(SEEDS) + num_fits >= 2000
    num_ordered_fits = len(FITS) * sum(map(is_ordered, FIT_SEEDS))
    assert len(PROGRAMS) * sum(map(is_ordered, SEEDS)) + num_ordered_fits >= 700


def test_the_programs_meet_every_choice() -> None:
    for programs in (PROGRAMS, FITS):
        assert {program.update for program in programs} == {"exact", "delayed"}
        assert {program.gradients for program in programs} == {"device", "host"}
        assert {program.accumulate for program in programs} == {1, 2}
        assert {program.clip for program in programs} == {"none", "norm", "value"}
        assert {program.precision for program in programs} == {"bf16-mixed", "bf16-true", "32-true"}
        assert {program.optimizer for program in programs} == {"adamw", "adam_l2", "sgd"}
        assert len({program.structure for program in programs}) == 6
    assert len({program.habit for program in PROGRAMS}) == 11


def check(train: Train, program: Program, schedule: Schedule, *, ordered: bool = False) -> None:
    engine = simulated(schedule, ordered=ordered)
    ours = train(program, engine)
    assert engine.races == []
    assert engine.is_idle
    assert same_bits(ours, expected(train, program))


@pytest.mark.parametrize("program", PROGRAMS[:FAST], ids=str)
def test_no_bit_depends_on_the_schedule(program: Program) -> None:
    schedules: list[Schedule] = ["lazy", "eager", *FAST_SEEDS]
    for schedule in schedules:
        check(run, program, schedule, ordered=is_ordered(schedule))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_no_bit_depends_on_many_random_schedules(program: Program) -> None:
    for seed in SEEDS:
        check(run, program, seed, ordered=is_ordered(seed))


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=() if i < FAST else pytest.mark.slow, id=str(p)) for i, p in enumerate(PROGRAMS)]
)
def test_all_accesses_are_ordered(program: Program) -> None:
    check(run, program, "lazy", ordered=True)


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=() if i < 2 else pytest.mark.slow, id=str(p)) for i, p in enumerate(FITS)]
)
def test_a_fit_in_order_changes_no_bit(program: Program) -> None:
    check(fit, program, "lazy", ordered=True)
    check(fit, program, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("program", FITS, ids=str)
def test_no_bit_of_a_fit_depends_on_the_schedule(program: Program) -> None:
    for seed in FIT_SEEDS:
        check(fit, program, seed, ordered=is_ordered(seed))


@pytest.mark.skipif(not kernels.available(), reason="numba is not there")
@pytest.mark.parametrize(
    "program", [Program(), Program(optimizer="adamw"), Program(optimizer="adamw", update="delayed")]
)
def test_no_bit_depends_on_the_schedule_with_the_kernel(program: Program) -> None:
    inline = run(program, InlineEngine(CPU), kernel=True)
    schedules: list[Schedule] = ["lazy", "eager", 0, 1]
    for schedule in schedules:
        engine = simulated(schedule)
        assert same_bits(run(program, engine, kernel=True), inline)
        assert engine.races == []


def test_host_work_runs_under_the_forward_pass() -> None:
    """The gate closes here at all: a random schedule steps some chunks before anybody waits for them."""
    engine = simulated(0)
    run(Program(optimizer="adamw", accumulate=1), engine)
    assert engine.num_early > 0


def test_a_wrong_program_is_noticed() -> None:
    slow, fast = Program(optimizer="adamw"), Program(optimizer="adamw", clip="none")
    assert not same_bits(expected(run, slow), expected(run, fast))
    assert not same_bits(expected(run, slow), expected(run, slow)[:-1])
