"""Small trainings as a bare loop writes them, and whole fits of a Trainer, on an engine of the test's choice.

They are made to touch what a step under way touches: weights, gradients and host state are read and written between
steps, as callbacks and odd training loops do.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, kernels
from lightning_cpu_offload.offload import attach, gate, sums
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.bits import words
from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import Engine, InlineEngine
from tests.engines import DeferredEngine, Schedule
from tests.models import STRUCTURES, NetworkModule, build_optimizer, make_batches, make_network, quiet_trainer
from tests.order import Order
from tests.reference import Case

CPU = torch.device("cpu")

SLOT_BYTES = 256
"""Of every staging buffer: more chunks than buffers, even of the smallest network."""

EXACT_STEPS = 1
"""Before the first delayed one."""

CHOICES: dict[str, list[Any]] = {
    "structure": ["plain", "tied", "frozen", "unused", "groups", "batchnorm"],
    "precision": ["bf16-mixed", "bf16-true", "32-true"],
    "accumulate": [1, 2],
    "clip": ["none", "norm", "value"],
    "optimizer": ["adamw", "adam_l2", "sgd"],
    "update": ["exact", "delayed"],
    "gradients": ["device", "device", "host"],
    "habit": [
        "none",
        "reads",
        "saves",
        "writes",
        "zeroes",
        "keeps",
        "skips",
        "closure",
        "recomputes",
        "modal",
        "unfreezes",
    ],
}


@dataclass(frozen=True)
class Program(Case):
    """One training and what its loop does besides.

    Attributes:
        update: "exact", "delayed" or, of fits without clipping, "early".
        gradients: Where they live until the step, "device" or "host".
        habit: "none"; "reads" weights, gradients and state after each step; "saves" and loads them; "writes" into
            weights through `.data`; "zeroes" gradients in place; "keeps" them; "skips" a step with a gradient that is
            NaN; passes a "closure" to the step; "recomputes" with all weights in a backward pass, on a thread of its
            own as far as modes go; is "modal", so that the gate stays open, and loads what it saved; "unfreezes" a
            layer.
    """

    update: str = "exact"
    gradients: str = "device"
    habit: str = "none"

    @property
    def is_possible(self) -> bool:
        """Whether these choices go together."""
        late = self.update == "delayed"
        return not late or (self.optimizer != "sgd" and self.habit != "writes" and self.gradients == "device")

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


def draw_programs(number: int, habits: Sequence[str] = tuple(CHOICES["habit"])) -> list[Program]:
    """Different programs, the same ones at every call."""
    source = random.Random(0)
    drawn: dict[Program, None] = {}
    while len(drawn) < number:
        program = Program(**{name: source.choice(values) for name, values in {**CHOICES, "habit": habits}.items()})
        if program.is_possible:
            drawn[program] = None
    return list(drawn)


@contextmanager
def on_engine(engine: Engine, *, kernel: bool = False, slot_bytes: int = SLOT_BYTES) -> Iterator[None]:
    """Whatever is attached in here runs on `engine`, with many small chunks.

    Args:
        engine: For one attachment.
        kernel: Step with the compiled kernel; else with torch operations, whose accesses can be recorded.
        slot_bytes: Size of a staging buffer.
    """
    patches: list[AbstractContextManager[Any]] = [
        mock.patch.object(attach, "make_engine", return_value=engine),
        mock.patch.object(attach, "SLOT_BYTES", slot_bytes),
        mock.patch.object(sums, "LEAST_KEPT", 1),
        mock.patch.object(sums, "BLOCK", 1),
        mock.patch.object(
            gate, "_something_is_compiled", return_value=False
        ),  # another test may have compiled something
    ]
    if isinstance(engine, DeferredEngine):
        patches.append(mock.patch.object(gate, "_Places", partial(_look, gate._Places, engine)))
    if not kernel:
        patches.append(mock.patch.object(kernels, "available", return_value=False))
    number = torch._C._len_torch_function_stack()
    try:
        with _all(patches):
            yield
    finally:
        while torch._C._len_torch_function_stack() > number:  # a gate that a broken step left closed
            torch.overrides._pop_mode()


def _look(places: Any, engine: DeferredEngine, arriving: Flight | None, working: Flight | None) -> Any:
    """The gate looks at what is under way. A gradient that the host has let go of has left: that is an order, too."""
    found = places(arriving, working)
    if working is not None:
        for sources, task in zip(working.sources, working.tasks[1:], strict=False):
            if not sources:
                engine.saw_end_of(task)
    return found


@contextmanager
def recorded(engine: Engine) -> Iterator[None]:
    """Records all accesses of what runs in here, if the engine has an order."""
    with engine.compute() if isinstance(engine, DeferredEngine) and engine.order is not None else nullcontext():
        yield


def run(program: Program, engine: Engine, *, kernel: bool = False) -> list[Tensor]:
    """All losses, all that was read on the way, and at the end weights and optimizer state, of a bare loop."""
    with on_engine(engine, kernel=kernel), recorded(engine):
        return Loop(program).run()


class Validated(NetworkModule):
    """Validates on the training data, and keeps those losses too; if "modal", keeps its gradients."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if self.case.habit != "modal":  # type: ignore[attr-defined]
            optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.network.loss(batch).detach().clone())


def fit(program: Program, engine: Engine, **options: Any) -> list[Tensor]:
    """All losses, and at the end weights and optimizer state, of a Trainer that validates; it may be "modal"."""
    strategy = CPUOffloadStrategy(
        gradients=program.gradients,  # type: ignore[arg-type]
        update=program.update,  # type: ignore[arg-type]
        exact_steps=EXACT_STEPS,
        nonfinite="raise" if program.update == "early" else "skip",
        cpu_threads=1,
        precision_plugin=CPUOffloadPrecision(program.precision),  # type: ignore[arg-type]
    )
    loader: Any = torch.utils.data.DataLoader(make_batches(program), batch_size=None)  # type: ignore[arg-type]
    with on_engine(engine), recorded(engine):
        module = Validated(program)
        trainer = quiet_trainer(
            strategy=strategy,
            max_epochs=2,
            accumulate_grad_batches=program.accumulate,
            gradient_clip_val=program.clip_value,
            gradient_clip_algorithm=None if program.clip == "none" else program.clip,
            num_sanity_val_steps=0,
            **options,
        )
        with torch.device("cpu") if program.habit == "modal" else nullcontext():
            trainer.fit(module, loader, loader)
    return [*module.losses, *(value for value in module.snapshot().entries.values() if isinstance(value, Tensor))]


Train = Callable[[Program, Engine], list[Tensor]]


@cache
def expected(train: Train, program: Program) -> list[Tensor]:
    """What the inline engine computes."""
    return train(program, InlineEngine(CPU))


def simulated(schedule: Schedule, *, ordered: bool = False) -> DeferredEngine:
    """An engine for code in line, with an order of accesses if asked."""
    return DeferredEngine(schedule, prompt=True, order=Order() if ordered else None)


def same_bits(ours: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are equal, bit for bit; NaN equals itself."""
    return len(ours) == len(others) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        for one, other in zip(ours, others, strict=True)
    )


class Loop:
    """A bare training loop over the case's network, with a habit."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.network: Any = make_network(program.structure)
        named = self.network.named_parameters()
        self.optimizer = build_optimizer(program.optimizer, named, STRUCTURES[program.structure].grouped)
        precision = CPUOffloadPrecision(program.precision)  # type: ignore[arg-type]
        settings = Settings(program.gradients, program.update, EXACT_STEPS, cpu_threads=1)  # type: ignore[arg-type]
        self.attachment = Attachment(self.network, [self.optimizer], CPU, precision.dtype_of, settings)
        self.seen: list[Tensor] = []
        self.num_windows = 0
        self.checkpoint: Any = None

    def run(self) -> list[Tensor]:
        """Train, and return what was seen and what came of it."""
        accumulate = self.program.accumulate
        batches = make_batches(replace(self.program, accumulate=1)) * accumulate
        try:
            for first in range(0, len(batches), accumulate):
                with torch.device("cpu") if self.program.habit == "modal" else nullcontext():
                    self.window(batches[first : first + accumulate])
        finally:
            self.attachment.detach()
        return [*self.seen, *self.saved()]

    def window(self, batches: Sequence[Any]) -> None:
        """Gradients of the batches, a step, and the habit."""
        self.num_windows += 1
        if self.program.habit == "recomputes":
            start = torch.ones((), requires_grad=True)
            result = start * 1.0
            result.register_hook(self.recompute)
            result.backward()
            assert start.grad is not None
            self.seen.append(start.grad)
        for batch in batches[:-1]:
            self.backward(batch)
        if self.program.habit == "closure":
            self.optimizer.step(lambda: self.backward(batches[-1]))
        else:
            self.backward(batches[-1])
            self.optimizer.step()
        self.follow_habit(batches[-1])
        if self.program.habit != "keeps":
            self.optimizer.zero_grad(set_to_none=self.program.habit != "zeroes")

    def follow_habit(self, batch: Any) -> None:
        """What happens between the step and the next batch."""
        habit, odd = self.program.habit, self.num_windows % 2 == 1
        if habit == "reads":
            self.look(batch)
        elif habit == "saves" and odd:
            self.seen += self.saved()
        elif habit == "saves":
            self.load()
        elif habit == "modal" and self.num_windows == 3:
            self.checkpoint = self.checkpointed()
        elif habit == "modal" and self.num_windows > 3:
            self.load(network_first=odd)
        elif habit == "unfreezes" and self.num_windows == 2:
            for parameter in self.network.parameters():
                parameter.requires_grad_(True)
        elif habit == "writes":
            for parameter in self.network.parameters():
                parameter.data.clamp_(-0.25, 0.25)

    def backward(self, batch: Any) -> Tensor:
        """Gradients of one batch, clipped if the program clips (which any number of times is harmless)."""
        with self.precision():
            loss = self.network.loss(self.cast(batch))
        self.seen.append(loss.detach().clone())
        if self.program.habit == "skips" and self.num_windows == 2:
            loss = loss * float("nan")
        (loss / self.program.accumulate).backward()
        self.clip()
        return loss.detach()

    def clip(self) -> None:
        """As users do, before the step."""
        limit = self.program.clip_value
        if limit is not None and self.program.clip == "norm":
            nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        elif limit is not None:
            nn.utils.clip_grad_value_(self.network.parameters(), limit)

    def look(self, batch: Any) -> None:
        """What a monitor reads after a step: gradients, host state, and the loss of the new weights."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        if self.num_windows % 2:
            self.seen += [value.sum() for value in states if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        self.seen += [gradient.float().square().sum() for gradient in gradients[:2]]
        with torch.no_grad(), self.precision():
            self.seen.append(self.network.loss(self.cast(batch)))

    def recompute(self, gradient: Tensor) -> Tensor:
        """Reads all weights in backward, which on an accelerator runs on a thread without the caller's modes."""
        with torch._C.DisableTorchFunction():
            return gradient * torch.stack([weight.detach().float().sum() for weight in self.network.parameters()]).sum()

    def checkpointed(self) -> Any:
        """What a checkpoint holds, copied."""
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return copy.deepcopy(self.network.state_dict()), optimizer

    def load(self, *, network_first: bool = True) -> None:
        """Load the last checkpoint, or one made now."""
        network, optimizer = self.checkpoint or self.checkpointed()
        if network_first:
            self.network.load_state_dict(network)
        self.optimizer.load_state_dict(optimizer)
        if not network_first:
            self.network.load_state_dict(network)

    def saved(self) -> list[Tensor]:
        """Copies of what a checkpoint would hold."""
        tensors = [*self.network.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [tensor.detach().clone() for tensor in tensors]

    def precision(self) -> AbstractContextManager[Any]:
        """What the forward pass computes under."""
        if self.program.precision == "bf16-true":
            return _bf16_by_default()
        mixed = self.program.precision == "bf16-mixed"
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if mixed else nullcontext()

    def cast(self, batch: Any) -> Any:
        """The batch in the compute dtype."""
        if self.program.precision != "bf16-true" or isinstance(batch, Tensor):
            return batch
        return {name: tensor.bfloat16() for name, tensor in batch.items()}


def _bits(tensor: Tensor) -> Tensor:
    return words(tensor) if tensor.is_floating_point() else tensor


@contextmanager
def _bf16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with contexts[0], _all(contexts[1:]):
        yield
