"""No wait can go: each one in the package is left out in turn, and something must notice.

Numbers notice, or a copy whose source changed or was freed, or the order of accesses, or an exception. What nothing
notices is listed with the reason. Six bugs of the kind that only shows on a real device are planted besides.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, Pipeline
from lightning_cpu_offload.offload.transfer import Engine
from tests.engines import Schedule
from tests.forgetting import Scenario, Site, all_sites, passing
from tests.programs import Program, fit, run
from tests.test_pipeline import Program as Transfers
from tests.test_pipeline import descend

EXACT = Program(structure="plain", optimizer="adamw")
DELAYED = replace(EXACT, update="delayed")
HOST = replace(EXACT, gradients="host")
BODY = replace(EXACT, optimizer="sgd")

PROGRAMS = [
    *(EXACT, DELAYED, HOST, BODY, replace(HOST, optimizer="sgd")),
    *(replace(EXACT, habit=habit) for habit in ("reads", "saves", "writes", "zeroes", "skips", "closure")),
    *(replace(DELAYED, habit=habit) for habit in ("reads", "saves", "zeroes", "keeps", "skips", "modal", "recomputes")),
    *(replace(HOST, habit=habit) for habit in ("zeroes", "reads", "saves")),
    *(replace(program, structure="unused", accumulate=1, habit="recomputes") for program in (EXACT, DELAYED)),
    replace(EXACT, structure="unused", habit="keeps"),
    *(replace(program, structure="frozen", habit="unfreezes") for program in (EXACT, DELAYED)),
]
"""What is trained, ordinary things first."""

EARLY = replace(EXACT, update="early", clip="none")

FITS = [EXACT, DELAYED, replace(DELAYED, habit="modal"), EARLY]


def overlap(program: Program, engine: Engine) -> list[Tensor]:
    """The pipeline alone."""
    transfers = Transfers(engine, hold=program.update == "delayed")
    return [*transfers.run_overlapping(), torch.tensor(len(transfers.ends))]


def shrink(program: Program, engine: Engine) -> list[Tensor]:
    """The pipeline alone: every second step is one of two chunks, so that less leaves than arrives."""
    transfers = Transfers(engine, hold=program.update == "delayed")
    for step, number in enumerate((len(transfers.chunks), 2) * 2):
        transfers.backward(step)
        chunks = transfers.chunks[:number]
        transfers.pipeline.launch(Flight(chunks, descend, [region.sources(chunk) for region, chunk in chunks]))
        transfers.pipeline.before_backward()
        transfers.forward()
    transfers.pipeline.land()
    return transfers.result()


def fail(program: Program, engine: Engine) -> list[Tensor]:
    """The pipeline alone, with an error on the host in the middle; what has been sent by then counts."""
    transfers = Transfers(engine)
    chunks = iter(range(RING_DEPTH))
    transfers.backward(0)
    with pytest.raises(StopIteration):
        transfers.pipeline.run(transfers.chunks, lambda *chunk: [next(chunks)] and descend(*chunk))
    return [region.weights.clone() for region in transfers.regions]


SCENARIOS = [
    *(Scenario(run, program, "lazy") for program in PROGRAMS),
    *(Scenario(fit, program, "lazy") for program in FITS),
    *(Scenario(overlap, program, "lazy") for program in (EXACT, DELAYED)),
    Scenario(shrink, DELAYED, "lazy"),
    Scenario(fail, EXACT, "lazy"),
    *(Scenario(run, program, seed) for program in PROGRAMS for seed in (0, 1)),
]

REDUNDANT = {
    "pipeline.catch_up: self.land()": "what comes before the launch passes the gate, and the launch lands",
    "pipeline.wait_for_device: self.engine.synchronize()": "the checks, awaited before, are queued behind all writes",
    "writes.adopt_hidden: self._pipeline.wait_for_device()": "the same wait",
    "writes.adopt_hidden: self._pipeline.wait_for_device()  # the same hazard: the step, on another lane, would come "
    "before what is queued": "what the host does itself is done at once on this engine",
    "hooked._admit: self._host.land()": "there is nothing under way, or its chunks keep their slots",
    "attach.refresh: self.land()": "the second of two: a write into a master has passed the gate",
}
"""Waits that may go, each with the reason."""

ELSEWHERE = {
    "attach.gradient: self.land()": "test_sums.py::test_the_exact_gradient_waits_for_the_step_that_reads_it",
    "masters._on_save: self._land()": "test_delayed.py::test_reading_drains: the module's state, a part's state",
    "attach.masters_shown: self.land()": "test_delayed.py::test_averages_drain_a_step_that_no_gate_guards",
}
"""Waits that the programs here do not show, each with the test that fails without it."""


@pytest.mark.slow
def test_every_wait_is_needed_or_known_to_be_redundant() -> None:
    passed = passing(SCENARIOS)
    unnoticed = []
    for site in (site for site in all_sites() if str(site) not in ELSEWHERE):
        scenarios = passed.get(site, [])
        found = ((scenario.notices(site), scenario) for scenario in scenarios)
        how, scenario = next(((how, scenario) for how, scenario in found if how), ("", None))
        if not how:
            unnoticed.append(str(site))
        print(f"{site}\n    {how or REDUNDANT.get(str(site), 'NOT NOTICED')}  {scenario or ''}", flush=True)
    assert sorted(unnoticed) == sorted(REDUNDANT)


# --- planted bugs -------------------------------------------------------------------------------------------------


def site_of(text: str) -> Site:
    """The one line that reads so."""
    (site,) = (site for site in all_sites() if str(site) == text)
    return site


BUGS = {
    "the kernel before the D2H copy": "pipeline._work: self.engine.host_wait(slot.fetched)",
    "a slot reused before its H2D copy": 'pipeline._fetch: self.engine.wait("d2h", slot.pushed)',
    "forward before the weights": 'pipeline.arrive: self.engine.wait("compute", flight.slots[index].pushed)',
    "the D2H copy before backward": 'pipeline._leave_after_compute: self.engine.wait("d2h", self._ready)',
    "the H2D copy over weights still in use": 'pipeline.launch: self.engine.wait("h2d", self._ready)',
}


@pytest.mark.parametrize("schedule", ["lazy", 0])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, schedule: Schedule) -> None:
    site = site_of(BUGS[bug])
    noticed = [Scenario(run, program, schedule).notices(site) for program in (EXACT, DELAYED)]
    print(bug, noticed)
    assert any(noticed)


@pytest.mark.parametrize("program", [EXACT, DELAYED], ids=str)
def test_a_gradient_that_is_freed_early_is_noticed(program: Program) -> None:
    fetch = Pipeline._fetch

    def fetch_and_free(pipeline: Pipeline, flight: Flight, index: int) -> None:
        fetch(pipeline, flight, index)
        flight.sources[index] = []

    scenario = Scenario(run, program, "lazy")
    assert scenario.notices(None) == ""
    with mock.patch.object(Pipeline, "_fetch", fetch_and_free):
        assert "was freed before it ran" in scenario.notices(None)
