"""Device memory of a training step, by running the module's own `training_step` on fake tensors."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cpu_offload.estimate.fakes import (
    DtypeRule,
    checkpointed,
    fake_batch,
    fake_tensors,
    without_trainer,
    without_values,
)
from lightning_cpu_offload.estimate.replay import Keeping, Replay
from lightning_cpu_offload.estimate.tracker import BATCH, Change, Tracker


class CannotRun(RuntimeError):
    """The module's step does not run on fake tensors; the message says where it stopped."""


@dataclass(frozen=True)
class Compute:
    """How a step computes.

    Attributes:
        rule: The dtype of each parameter and buffer on the device.
        context: Surrounds each step: autocast, for instance.
        convert: What is done to a batch before it.
    """

    rule: DtypeRule = lambda _owner, tensor, _others_write: tensor.dtype
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    convert: Callable[[Any], Any] = lambda batch: batch


@dataclass(frozen=True)
class Choice(Keeping):
    """What is tracked.

    Attributes:
        checkpointing: Whether blocks keep their inputs only.
        round_to: Bytes to which the allocator rounds.
    """

    checkpointing: bool = False
    round_to: int = 512


@dataclass(frozen=True)
class DeviceMemory:
    """Peak of a training step.

    Attributes:
        peak: Bytes in use at once.
        by_category: What they are.
        operation: Where the peak is.
        reserved: Bytes a caching allocator holds for it.
        forward_flops: Operations of one micro-batch's forward, by parameter name.
        backward_flops: Operations of its backward.
        recomputed_flops: Of them, those of activations that are computed again.
        guesses: Operations whose result depends on values, and were answered with one or the most there could be.
    """

    peak: int
    by_category: dict[str, int]
    operation: str
    reserved: int
    forward_flops: dict[str, float] = field(default_factory=dict)
    backward_flops: float = 0.0
    recomputed_flops: float = 0.0
    guesses: tuple[str, ...] = ()

    def plus(self, category: str, nbytes: int) -> DeviceMemory:
        """The same with something that lies there all the time."""
        by_category = {**self.by_category, category: self.by_category.get(category, 0) + nbytes}
        return replace(self, peak=self.peak + nbytes, reserved=self.reserved + nbytes, by_category=by_category)


@dataclass(frozen=True)
class Course:
    """One micro-batch as it ran on fakes.

    Attributes:
        events: What became of memory.
        figures: Operations and guesses, by their names in `DeviceMemory`.
    """

    events: Sequence[Change]
    figures: dict[str, Any]

    def memory(self, keeping: Keeping) -> DeviceMemory:
        """The peak, given what becomes of gradients."""
        replay = Replay(keeping).run(self.events)
        return DeviceMemory(replay.peak, replay.by_category, replay.operation, replay.reserved, **self.figures)


def device_memory(module: Any, batch: Any, compute: Compute, choice: Choice, **options: Any) -> DeviceMemory:
    """Run the module's training step on fakes and return the peak; see `course`, which serves several choices."""
    run = course(module, batch, compute, checkpointing=choice.checkpointing, round_to=choice.round_to, **options)
    return run.memory(choice)


def course(
    module: Any,
    batch: Any,
    compute: Compute,
    *,
    checkpointing: bool = False,
    round_to: int = 512,
    optimizers: int = 1,
    trained: set[int] | None = None,
) -> Course:
    """Run the module's training step on fakes.

    Args:
        module: A LightningModule, built anywhere, "meta" included; it is left as it was.
        batch: One batch, or meta tensors in its place.
        compute: How it computes.
        checkpointing: Whether blocks keep their inputs only.
        round_to: Bytes to which the allocator rounds.
        optimizers: How many the module has.
        trained: Identities of the parameters that an optimizer steps; None: all that require a gradient.

    Raises:
        CannotRun: The step does something that fake tensors cannot.
    """
    run = _Run(module, compute, Tracker(round_to))
    try:
        with run.prepared(batch, optimizers, trained, checkpointing) as fakes:
            run.micro_batch(fakes)
    except Exception as error:
        where = run.tracker.phase
        first_line = str(error).split("\n")[0]
        raise CannotRun(f"{type(module).__name__}, {where}: {type(error).__name__}: {first_line}") from error
    return run.result()


class _Run:
    def __init__(self, module: Any, compute: Compute, tracker: Tracker) -> None:
        self._module, self._compute, self.tracker = module, compute, tracker

    @contextlib.contextmanager
    def prepared(
        self, batch: Any, optimizers: int, stepped: set[int] | None, checkpointing: bool
    ) -> Generator[Any, None, None]:
        """Everything around the run, outermost first."""
        module, mode = self._module, FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(_uncollected())
            stack.enter_context(mode)
            stack.enter_context(fake_tensors(module, self._compute.rule, stepped))
            trainer = stack.enter_context(without_trainer(module, optimizers))
            trainer.strategy.backward = self._backward
            if checkpointing:
                stack.enter_context(checkpointed(module))
            stack.enter_context(without_values())
            stack.enter_context(self.tracker)
            self.tracker.name([*module.named_parameters(), *module.named_buffers()])
            for index, parameter in enumerate(self._trained()):
                hook = partial(self._accumulated, index)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
                self.tracker.left(index, parameter)
            fakes = fake_batch(mode, batch)
            for leaf in torch.utils._pytree.tree_leaves(fakes):
                if isinstance(leaf, Tensor):
                    self.tracker.label(leaf, BATCH)
            yield fakes

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def micro_batch(self, batch: Any) -> None:
        """One forward and, unless the module runs it itself, its backward."""
        self.tracker.phase = "forward"
        batch = self._compute.convert(batch)
        with self._compute.context():
            output = _training_step(self._module, batch)
        if not getattr(self._module, "automatic_optimization", True):
            return
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step returned {type(loss).__name__} in place of a loss")
        self._backward(loss)

    def _backward(self, loss: Tensor, *_args: Any, **options: Any) -> None:
        for parameter in self._trained():
            parameter.grad = None  # each backward makes gradients of its own, whatever becomes of them
        self.tracker.phase = "backward"
        loss.backward(retain_graph=options.get("retain_graph"))
        self.tracker.phase = "forward"

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.tracker.gradient(index, parameter.grad)

    def result(self) -> Course:
        """What was seen."""
        tracker = self.tracker
        figures = {
            "forward_flops": dict(tracker.forward_flops),
            "backward_flops": tracker.backward_flops,
            "recomputed_flops": tracker.recomputed_flops,
            "guesses": tuple(sorted(tracker.guesses)),
        }
        return Course(tuple(tracker.events), figures)


def _training_step(module: Any, batch: Any) -> Any:
    parameters = inspect.signature(module.training_step).parameters
    varargs = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    return module.training_step(batch, 0) if varargs or len(parameters) > 1 else module.training_step(batch)


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without messages of fake tensors, and without oneDNN, whose recurrent layers keep less than other devices' do."""
    logger, onednn = logging.getLogger("torch._subclasses"), torch.backends.mkldnn
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with onednn.flags(enabled=False):
                yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _uncollected() -> Generator[None, None, None]:
    """Without the collector of cycles, which would look through all that torch has imported again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def weight_bytes(module: nn.Module, rule: DtypeRule) -> int:
    """Bytes of all parameters and buffers on the device, tied ones once."""
    seen: dict[int, int] = {}
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None:
                seen.setdefault(id(tensor), tensor.numel() * rule(owner, tensor, False).itemsize)
    return sum(seen.values())
