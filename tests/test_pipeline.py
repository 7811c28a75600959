"""The step's transfers on an engine that delays them: the same numbers as in line, and no wait that could go."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.offload import attach, pipeline
from lightning_cpu_offload.offload.attach import Attachment, Settings
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, Pipeline
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import Engine, InlineEngine, Lane, words
from tests.engines import DeferredEngine, Event
from tests.models import quiet_trainer

CPU = torch.device("cpu")
SEEDS: list[int | None] = [None, *range(12)]
"""None: as late as possible."""

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

    On an engine with `launch`, backward and forward are queued like any kernel; the host goes on without them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.regions = make_regions()
        self.chunks = [(region, chunk) for region in self.regions for chunk in region.chunks]
        assert len(self.chunks) > 3 * RING_DEPTH
        self.pipeline = Pipeline(engine, HostMemory(), SLOT_BYTES, pin=False)
        self.trained = [
            master.tensor
            for region in self.regions
            for master in region.masters
            if master.host.numel() not in (1, 33, 5)
        ]
        for tensor in self.trained:
            tensor.grad = torch.zeros_like(tensor)
        self.outputs: list[Tensor] = []

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


def same_bits(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(ours) == len(expected) and all(
        torch.equal(words(one), words(other)) for one, other in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_delayed_transfers_change_no_bit(seed: int | None) -> None:
    expected = Program(InlineEngine(CPU)).run()
    assert len(expected) == 4 + 2 * 2 * STEPS
    assert all(tensor.isfinite().all() for tensor in expected)
    assert same_bits(Program(DeferredEngine(seed)).run(), expected)


# --- no wait can go ---------------------------------------------------------------------------------------------


class ForgetfulEngine(DeferredEngine):
    """Leaves out the waits and records of one line of the package.

    Args:
        seed: As for `DeferredEngine`.
        forget: Number of the line in pipeline.py, or None.

    Attributes:
        lines: The lines that called.
    """

    def __init__(self, seed: int | None = None, forget: int | None = None, *, prompt: bool = False) -> None:
        super().__init__(seed, prompt=prompt)
        self.forget = forget
        self.lines: set[int] = set()

    def record(self, event: Event, lane: Lane) -> None:
        if self._remembers():
            super().record(event, lane)

    def wait(self, lane: Lane, event: Event) -> None:
        if self._remembers():
            super().wait(lane, event)

    def host_wait(self, event: Event) -> None:
        if self._remembers():
            super().host_wait(event)

    def _remembers(self) -> bool:
        frame = sys._getframe(2)
        assert frame.f_code.co_filename == pipeline.__file__
        self.lines.add(frame.f_lineno)
        return frame.f_lineno != self.forget


def ordering_lines() -> list[int]:
    """The lines of pipeline.py that record an event or wait for one."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(pipeline))) if isinstance(node, ast.Call)]
    names = ("record", "wait", "host_wait")
    return [call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]


REDUNDANT: dict[str, str] = {}
"""Lines that may go, each with the reason; none."""


def source(line: int) -> str:
    return linecache.getline(pipeline.__file__, line).strip()


def test_the_program_passes_every_wait_and_record() -> None:
    engine = ForgetfulEngine()
    Program(engine).run()
    assert sorted(engine.lines) == sorted(ordering_lines())
    assert len(engine.lines) >= 10


@pytest.mark.parametrize("line", ordering_lines(), ids=source)
def test_every_wait_and_record_is_needed(line: int) -> None:
    expected = Program(InlineEngine(CPU)).run()
    noticed = any(not same_bits(Program(ForgetfulEngine(seed, line)).run(), expected) for seed in SEEDS)
    assert noticed != (source(line) in REDUNDANT)


def test_redundant_waits_exist() -> None:
    assert set(REDUNDANT) <= {source(line) for line in ordering_lines()}


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


# --- what is counted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [InlineEngine(CPU), DeferredEngine()], ids=["inline", "deferred"])
def test_report_counts_the_bytes_that_cross(engine: Engine) -> None:
    program = Program(engine)
    with_gradient, all_bytes = 2 * (7 + 40) + 4 * (3 + 64), 2 * 86 + 4 * 67
    program.backward(0)
    program.pipeline.run(program.chunks, descend)
    assert (program.pipeline.report.d2h_bytes, program.pipeline.report.h2d_bytes) == (with_gradient, with_gradient)
    program.pipeline.run(program.chunks, round_masters, fetch=False)
    assert program.pipeline.report.d2h_bytes == with_gradient
    assert program.pipeline.report.h2d_bytes == with_gradient + all_bytes
    program.pipeline.new_report()
    assert program.pipeline.report == pipeline.StepReport()


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
    assert engine._pending == []
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


# --- a whole Trainer ----------------------------------------------------------------------------------------------


class TinyModule(pl.LightningModule):
    """An embedding that is also the output layer, a norm, a frozen layer and one that gets no gradient."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(19, 12)
        self.mixer = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.norm = nn.LayerNorm(12)
        self.unused = nn.Linear(12, 3)
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.norm(self.frozen(torch.tanh(self.mixer(self.embedding(batch[:, :-1])))))
        logits = (hidden @ self.embedding.weight.T).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(optimizer: str, precision: Any) -> list[Tensor]:
    """Weights and optimizer state after 4 steps of 2 batches, clipped."""
    module = TinyModule(optimizer)
    trainer = quiet_trainer(
        strategy=CPUOffloadStrategy(),
        precision=precision,
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randint(19, (8, 2, 6)), batch_size=None))  # type: ignore[arg-type]
    states = trainer.optimizers[0].state_dict()["state"].values()
    return [*module.state_dict().values(), *(v.clone() for s in states for v in s.values() if isinstance(v, Tensor))]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_whole_fit_with_delayed_transfers_changes_no_bit(
    optimizer: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", 64)
    expected = fit(optimizer, precision)
    for seed in (None, 0, 1):
        engine = ForgetfulEngine(seed, prompt=True)
        monkeypatch.setattr(attach, "make_engine", lambda device, engine=engine: engine)
        assert same_bits(fit(optimizer, precision), expected)
        assert engine.lines


def test_a_fit_shows_a_forgotten_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", 64)
    expected = fit("adamw", "bf16-mixed")
    (line,) = (line for line in ordering_lines() if source(line) == "self.engine.host_wait(slot.fetched)")
    engine = ForgetfulEngine(None, line, prompt=True)
    monkeypatch.setattr(attach, "make_engine", lambda device: engine)
    assert not same_bits(fit("adamw", "bf16-mixed"), expected)
