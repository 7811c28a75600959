"""Device memory of a training step, by running the module's own `training_step` on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cpu_offload.estimate.allocator import reserved_peak
from lightning_cpu_offload.estimate.fakes import (
    DtypeRule,
    WorstCase,
    checkpointed,
    fake_batch,
    fake_tensors,
    without_trainer,
    without_values,
)
from lightning_cpu_offload.estimate.tracker import BATCH, GRADIENTS, IN_FLIGHT, MemoryTracker

Gradients = Literal["device", "host"]


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
class Choice:
    """What is tracked.

    Attributes:
        gradients: Where they live until the step.
        in_flight_bytes: Gradients that may wait on the device for their way out, for `gradients="host"`.
        accumulating: Whether the window has more than one micro-batch, so that gradients of the one before are there.
        checkpointing: Whether blocks keep their inputs only.
        round_to: Bytes to which the allocator rounds.
    """

    gradients: Gradients = "device"
    in_flight_bytes: int = 64 << 20
    accumulating: bool = True
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
        guesses: Operations whose result depends on values, and were answered with one or the most there could be.
    """

    peak: int
    by_category: dict[str, int]
    operation: str
    reserved: int
    forward_flops: dict[str, float] = field(default_factory=dict)
    backward_flops: float = 0.0
    guesses: tuple[str, ...] = ()

    def plus(self, category: str, nbytes: int) -> DeviceMemory:
        """The same with something that lies there all the time."""
        by_category = {**self.by_category, category: self.by_category.get(category, 0) + nbytes}
        return replace(self, peak=self.peak + nbytes, reserved=self.reserved + nbytes, by_category=by_category)


def device_memory(
    module: Any,
    batch: Any,
    compute: Compute,
    choice: Choice,
    *,
    optimizers: int = 1,
    trained: set[int] | None = None,
) -> DeviceMemory:
    """Run the module's training step on fakes and return the peak.

    Args:
        module: A LightningModule, built anywhere, "meta" included; it is left as it was.
        batch: One batch, or meta tensors in its place.
        compute: How it computes.
        choice: What is tracked.
        optimizers: How many the module has.
        trained: Identities of the parameters that an optimizer steps; None: all that require a gradient.

    Raises:
        CannotRun: The step does something that fake tensors cannot.
    """
    run = _Run(module, compute, choice)
    try:
        with run.prepared(batch, optimizers, trained) as fakes:
            run.micro_batch(fakes)
    except Exception as error:
        where = run.tracker.phase
        first_line = str(error).split("\n")[0]
        raise CannotRun(f"{type(module).__name__}, {where}: {type(error).__name__}: {first_line}") from error
    return run.result()


class _Run:
    def __init__(self, module: Any, compute: Compute, choice: Choice) -> None:
        self._module, self._compute, self._choice = module, compute, choice
        self.tracker = MemoryTracker(choice.round_to)
        self._worst_case = WorstCase()
        self._in_flight: deque[Tensor] = deque()

    @contextlib.contextmanager
    def prepared(self, batch: Any, optimizers: int, stepped: set[int] | None) -> Generator[Any, None, None]:
        """Everything around the run, outermost first."""
        module, mode = self._module, FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(mode)
            stack.enter_context(fake_tensors(module, self._compute.rule, stepped))
            trainer = stack.enter_context(without_trainer(module, optimizers))
            trainer.strategy.backward = self._backward
            if self._choice.checkpointing:
                stack.enter_context(checkpointed(module))
            stack.enter_context(without_values())
            stack.enter_context(self.tracker)
            stack.enter_context(self._worst_case)
            self.tracker.name([*module.named_parameters(), *module.named_buffers()])
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            for parameter in trained:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._accumulated).remove)
            if self._choice.accumulating:
                self._leave_gradients(trained)
            fakes = fake_batch(mode, batch)
            for leaf in torch.utils._pytree.tree_leaves(fakes):
                if isinstance(leaf, Tensor):
                    self.tracker.label(leaf, BATCH)
            yield fakes

    def _leave_gradients(self, parameters: list[nn.Parameter]) -> None:
        """What the micro-batch before has left: all gradients, or those that backward made last, on their way."""
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
            self.tracker.label(parameter.grad, GRADIENTS)
            if self._choice.gradients == "host":
                if sum(gradient.nbytes for gradient in self._in_flight) >= self._choice.in_flight_bytes:
                    parameter.grad = None
                    break
                self._accumulated(parameter)

    def micro_batch(self, batch: Any) -> None:
        """One forward and, unless the module runs it itself, its backward."""
        self.tracker.phase = "forward"
        batch = self._compute.convert(batch)
        with self._compute.context():
            output = _training_step(self._module, batch)
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and getattr(self._module, "automatic_optimization", True):
            self._backward(loss)

    def _backward(self, loss: Tensor, *_args: Any, **options: Any) -> None:
        self.tracker.phase = "backward"
        loss.backward(retain_graph=options.get("retain_graph"))
        self.tracker.phase = "forward"

    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._choice.gradients == "device":
            self.tracker.label(gradient, GRADIENTS)
            return
        # The link may be the slowest: as much as the cap allows is taken to be still on its way.
        parameter.grad = None
        self.tracker.label(gradient, IN_FLIGHT)
        self._in_flight.append(gradient)
        while len(self._in_flight) > 1 and sum(g.nbytes for g in self._in_flight) > self._choice.in_flight_bytes:
            self._in_flight.popleft()

    def result(self) -> DeviceMemory:
        """What was seen."""
        tracker = self.tracker
        return DeviceMemory(
            peak=tracker.peak,
            by_category=tracker.peak_by_category,
            operation=tracker.peak_operation,
            reserved=max(tracker.peak, reserved_peak(tracker.trace)),
            forward_flops=dict(tracker.forward_flops),
            backward_flops=tracker.backward_flops,
            guesses=tuple(sorted(self._worst_case.guesses)),
        )


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


def weight_bytes(module: nn.Module, rule: DtypeRule) -> int:
    """Bytes of all parameters and buffers on the device, tied ones once."""
    seen: dict[int, int] = {}
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None:
                seen.setdefault(id(tensor), tensor.numel() * rule(owner, tensor, False).itemsize)
    return sum(seen.values())
