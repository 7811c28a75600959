"""The step's transfers on an engine that delays them: the same numbers as in line, counted and safe to interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, Pipeline
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import Engine, InlineEngine, Lane
from lightning_cpu_offload.offload.worker import Task
from tests.engines import DeferredEngine, Event, Schedule
from tests.order import Order
from tests.programs import same_bits

CPU = torch.device("cpu")
SCHEDULES: list[Schedule] = ["lazy", "eager", *range(12)]

SLOT_BYTES = 32
STEPS = 4


def make_regions() -> list[Region]:
    """86 BF16 and 67 FP32 parameters: 15 chunks for 4 slots. Three never get a gradient, one has no elements."""
    torch.manual_seed(0)
    memory = HostMemory()
    regions = []
    for dtype, sizes in ((torch.bfloat16, (7, 1, 0, 40, 33, 5)), (torch.float32, (3, 64))):
        masters = [Master(f"{dtype}.{size}", nn.Parameter(torch.randn(size))) for size in sizes]
        regions.append(Region(masters, dtype, CPU, memory, SLOT_BYTES))
    return regions


class Program:
    """Backward, step, forward, a change of all masters on the host and forward again, several times.

    On a deferred engine, backward and forward are queued like any kernel; the host goes on without them.
    """

    def __init__(self, engine: Engine, *, hold: bool = False) -> None:
        self.engine = engine
        self.regions = make_regions()
        self.chunks = [(region, chunk) for region in self.regions for chunk in region.chunks]
        assert len(self.chunks) > 3 * RING_DEPTH
        self.pipeline = Pipeline(engine, HostMemory(), SLOT_BYTES, pin=False, hold=hold)
        self.pipeline.reserve(len(self.chunks))
        self.trained = [
            master.tensor
            for region in self.regions
            for master in region.masters
            if master.host.numel() not in (1, 33, 5)
        ]
        for tensor in self.trained:
            tensor.grad = torch.zeros_like(tensor)
        self.outputs: list[Tensor] = []
        self.ends: list[str] = []

    def run(self) -> list[Tensor]:
        """All masters, all weights and what each forward saw."""
        for step in range(STEPS):
            self.backward(step)
            self.pipeline.run(self.chunks, descend)
            self.forward()
            for region in self.regions:
                region.master.flat(0, region.numel).mul_(0.9)
            self.pipeline.run(self.chunks, round_masters, fetch=False)
            self.forward()
        return self.result()

    def run_overlapping(self) -> list[Tensor]:
        """The same of steps that the training thread does not wait for; no change on the host."""
        for step in range(STEPS):
            self.backward(step)
            sources = [region.sources(chunk) for region, chunk in self.chunks]
            flight = Flight(self.chunks, descend, sources)
            flight.finished = lambda step=step: self.ends.append(f"{step} finished")
            flight.landed = lambda step=step: self.ends.append(f"{step} landed")
            self.pipeline.launch(flight)
            self.pipeline.arrive_all()
            self.forward()
            if self.pipeline.hold:
                self.pipeline.before_backward()
        self.pipeline.land()
        return self.result()

    def result(self) -> list[Tensor]:
        """When the device is done, all masters, all weights and what each forward saw."""
        if isinstance(self.engine, DeferredEngine):
            self.engine.run_compute()
        masters = [region.master.flat(0, region.numel) for region in self.regions]
        return [*masters, *(region.weights for region in self.regions), *self.outputs]

    def backward(self, step: int) -> None:
        """Gradients that depend on the weights."""

        def compute() -> None:
            for tensor in self.trained:
                assert tensor.grad is not None
                noise = torch.linspace(-step - 1, step + 1, tensor.numel()).to(tensor.dtype)
                tensor.grad.copy_(tensor.detach() * 0.5 + noise)

        self.launch(
            compute, [tensor.detach() for tensor in self.trained], [t.grad for t in self.trained if t.grad is not None]
        )

    def forward(self) -> None:
        """Reads all weights."""
        weights = [region.weights for region in self.regions]
        self.launch(lambda: self.outputs.extend(weight.clone() for weight in weights), weights, [])

    def launch(self, function: Callable[[], None], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Queue a kernel on the compute lane."""
        if isinstance(self.engine, DeferredEngine):
            self.engine.launch("compute", function, reads, writes)
        else:
            function()


def descend(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    """Host work: gradient descent of the parameters that have a gradient."""
    ranges = [(piece.start, piece.stop) for piece in chunk.pieces if region.has_gradient(piece)]
    for start, stop in ranges:
        plane, master = staged[start - chunk.start : stop - chunk.start], region.master.flat(start, stop)
        master.sub_(plane.float(), alpha=0.1)
        plane.copy_(master)
    return ranges


def round_masters(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    """Host work: send the masters as they are."""
    staged.copy_(region.master.flat(chunk.start, chunk.stop))
    return [(chunk.start, chunk.stop)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_delayed_transfers_change_no_bit(schedule: Schedule) -> None:
    expected = Program(InlineEngine(CPU)).run()
    assert len(expected) == 4 + 2 * 2 * STEPS
    assert all(tensor.isfinite().all() for tensor in expected)
    engine = DeferredEngine(schedule, order=Order() if schedule == "lazy" else None)
    assert same_bits(Program(engine).run(), expected)
    assert engine.races == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hold", [False, True])
def test_steps_that_nobody_waits_for_change_no_bit(hold: bool, schedule: Schedule) -> None:
    expected = Program(InlineEngine(CPU), hold=hold)
    tensors = expected.run_overlapping()
    engine = DeferredEngine(schedule, order=Order() if schedule == "lazy" else None)
    program = Program(engine, hold=hold)
    assert same_bits(program.run_overlapping(), tensors)
    assert engine.races == []
    assert program.ends == expected.ends


def test_each_step_ends_before_the_next_one_is_launched() -> None:
    program = Program(DeferredEngine())
    program.run_overlapping()
    assert program.ends == [f"{step} {what}" for step in range(STEPS) for what in ("finished", "landed")]
    program = Program(DeferredEngine(), hold=True)
    program.run_overlapping()
    assert program.ends == [*(f"{step} finished" for step in range(STEPS)), f"{STEPS - 1} landed"]


def test_held_weights_are_one_step_late() -> None:
    late, exact = Program(DeferredEngine(), hold=True), Program(DeferredEngine())
    first = [region.weights.clone() for region in late.regions]
    late.run_overlapping()
    exact.run_overlapping()
    number = len(first)
    assert same_bits(late.outputs[:number], first)
    assert not same_bits(exact.outputs[:number], first)
    assert same_bits(late.outputs[number : 2 * number], exact.outputs[:number])


# --- the deferred engine itself -----------------------------------------------------------------------------------


def test_copies_wait_for_somebody_to_ask() -> None:
    engine, event = DeferredEngine(), Event()
    target = torch.zeros(2)
    engine.copy("d2h", target, torch.ones(2))
    engine.record(event, "d2h")
    assert target.isnan().all()
    engine.host_wait(event)
    assert target.eq(1).all()


def test_a_wait_is_for_the_last_record_before_it() -> None:
    engine, event = DeferredEngine(), Event()
    first, second = torch.zeros(2), torch.zeros(2)
    engine.copy("h2d", first, torch.ones(2))
    engine.record(event, "h2d")
    engine.wait("compute", event)
    engine.copy("h2d", second, torch.ones(2))
    engine.record(event, "h2d")
    engine.run_compute()
    assert first.eq(1).all()
    assert second.isnan().all()
    engine.host_wait(event)
    assert second.eq(1).all()


def test_an_event_that_was_never_recorded_holds_nobody_up() -> None:
    engine, event = DeferredEngine(), Event()
    engine.copy("h2d", target := torch.zeros(2), torch.ones(2))
    engine.wait("compute", event)
    engine.host_wait(event)
    engine.run_compute()
    assert target.isnan().all()


def test_poison_spares_readers_that_come_first_and_no_others() -> None:
    for ordered in (True, False):
        engine, event = DeferredEngine(), Event()
        slot, sent = torch.ones(2), torch.zeros(2)
        engine.copy("h2d", sent, slot)
        engine.record(event, "h2d")
        if ordered:
            engine.wait("d2h", event)
        engine.copy("d2h", slot, torch.full((2,), 2.0))
        engine.record(event, "h2d")
        engine.host_wait(event)
        assert sent.eq(1).all() == ordered


def test_synchronize_leaves_nothing_queued() -> None:
    engine = DeferredEngine()
    targets = [torch.zeros(2) for _ in range(3)]
    lanes: list[Lane] = ["compute", "d2h", "h2d"]
    for lane, target in zip(lanes, targets, strict=True):
        engine.copy(lane, target, torch.ones(2))
    engine.synchronize()
    assert all(target.eq(1).all() for target in targets)


def test_a_source_that_changes_or_is_freed_is_named() -> None:
    for change, word in ((lambda tensor: tensor.zero_(), "changed"), (lambda tensor: None, "freed")):
        engine, source = DeferredEngine(), torch.ones(2)
        engine.copy("d2h", torch.zeros(2), source)
        change(source)
        if word == "freed":
            del source
        engine.synchronize()
        (finding,) = engine.findings
        assert word in finding
        assert "test_pipeline.py" in finding


def test_host_work_runs_in_order_when_it_is_waited_for() -> None:
    engine, ran = DeferredEngine(), list[int]()
    tasks = [Task(lambda number=number: ran.append(number)) for number in range(3)]
    engine.submit(tasks)
    engine.submit(tasks)
    assert ran == []
    engine.finish(tasks[1])
    assert ran == [0, 1]
    engine.shutdown()
    assert ran == [0, 1, 2]
    assert engine.is_idle


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("schedule", ["lazy", "eager", 0])
def test_unordered_accesses_are_named_on_any_schedule(schedule: Schedule, ordered: bool) -> None:
    engine = DeferredEngine(schedule, order=Order())
    source, staging, event = torch.ones(2), torch.zeros(2), engine.event()
    engine.launch("compute", lambda: source.mul_(2), writes=[source])
    engine.record(event, "compute")
    if ordered:
        engine.wait("d2h", event)
    engine.copy("d2h", staging, source)
    engine.record(event, "d2h")
    engine.host_wait(event)
    assert (engine.races == []) == ordered


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_training_thread_goes_on_unless_it_waits_for_the_host(overlaps: bool) -> None:
    engine, seen, go = InlineEngine(CPU), [], threading.Event()
    engine.overlaps = overlaps
    first = Task(lambda: (seen.append(engine.training_goes_on()), go.set()))

    def until_awaited() -> None:
        while not engine.awaited:
            time.sleep(1e-3)
        seen.append(engine.training_goes_on())

    last = Task(until_awaited)
    engine.submit([first])
    assert go.wait(timeout=30)
    engine.submit([last])
    engine.finish(last)
    seen.append(engine.training_goes_on())
    engine.shutdown()
    assert seen == [overlaps, False, overlaps]


def test_a_number_of_threads_that_was_asked_for_is_what_works() -> None:
    for cpu_threads in (None, 2):
        module = nn.Linear(2, 2)
        settings = Settings(cpu_threads=cpu_threads)
        attachment = Attachment(
            module, [torch.optim.AdamW(module.parameters())], CPU, lambda *_: torch.float32, settings
        )
        assert attachment.host is not None
        engine: Any = attachment.pipeline.engine
        engine.overlaps = True
        assert attachment.threads.leaves_one() == (cpu_threads is None)
        attachment.detach()


@pytest.mark.parametrize("ordered", [True, False])
def test_host_work_must_be_waited_for_before_its_memory_is_used(ordered: bool) -> None:
    engine = DeferredEngine("eager", order=Order())
    with engine.compute():
        master = torch.zeros(4)
        task = Task(lambda: master.add_(1))
        engine.submit([task])
        if ordered:
            engine.finish(task)
        master.add_(1)
    assert (engine.races == []) == ordered
    assert master.eq(2).all()


# --- what is counted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [InlineEngine(CPU), DeferredEngine()], ids=["inline", "deferred"])
def test_report_counts_the_bytes_that_cross(engine: Engine) -> None:
    program = Program(engine)
    with_gradient, all_bytes = 2 * (7 + 40) + 4 * (3 + 64), 2 * 86 + 4 * 67
    program.backward(0)
    program.pipeline.run(program.chunks, descend)
    assert (program.pipeline.report.d2h_bytes, program.pipeline.report.h2d_bytes) == (with_gradient, with_gradient)
    report = program.pipeline.report
    program.pipeline.run(program.chunks, round_masters, fetch=False, report=report)
    assert program.pipeline.report is report
    assert (report.d2h_bytes, report.h2d_bytes) == (with_gradient, with_gradient + all_bytes)
    program.pipeline.run([], descend)
    assert (program.pipeline.report.d2h_bytes, program.pipeline.report.h2d_bytes) == (0, 0)


def test_a_step_without_chunks_moves_nothing() -> None:
    program = Program(DeferredEngine())
    before = [region.weights.clone() for region in program.regions]
    program.pipeline.run([], descend)
    assert same_bits([region.weights for region in program.regions], before)
    assert program.pipeline.report.d2h_bytes == program.pipeline.report.h2d_bytes == 0


# --- an exception in the middle -----------------------------------------------------------------------------------


def test_an_exception_leaves_nothing_queued() -> None:
    engine = DeferredEngine()
    program = Program(engine)
    program.backward(0)
    calls: Iterator[int] = iter(range(len(program.chunks)))

    def fails(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
        if next(calls) == RING_DEPTH + 1:
            raise KeyboardInterrupt
        return descend(region, chunk, staged)

    with pytest.raises(KeyboardInterrupt):
        program.pipeline.run(program.chunks, fails)
    assert engine.is_idle
    assert program.pipeline.working is program.pipeline.arriving is None
    assert all(region.weights.isfinite().all() for region in program.regions)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_interrupted_step_rounds_no_master(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was stepped but not sent must not be taken for weights that someone wrote."""
    monkeypatch.setattr(attach, "SLOT_BYTES", 64)
    torch.manual_seed(0)
    net = nn.Linear(16, 16)
    optimizer = kind(net.parameters(), lr=1e-2)
    attachment = Attachment(net, [optimizer], CPU, lambda *_: torch.bfloat16, Settings())
    steps = 0
    copy = InlineEngine.copy

    def interrupted(engine: Engine, lane: Lane, dst: Tensor, src: Tensor) -> None:
        nonlocal steps
        steps += lane == "h2d"
        if lane == "h2d" and steps == 3:
            raise KeyboardInterrupt
        copy(engine, lane, dst, src)  # type: ignore[arg-type]

    for _ in range(3):
        net(torch.ones(2, 16, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        with monkeypatch.context() as patch:
            patch.setattr(InlineEngine, "copy", interrupted)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                break
    masters = [attachment._masters[parameter].host.clone() for parameter in net.parameters()]
    attachment.detach()
    assert steps >= 3
    assert same_bits([parameter.detach() for parameter in net.parameters()], masters)
    assert all(group["params"] == list(net.parameters()) for group in optimizer.param_groups)
