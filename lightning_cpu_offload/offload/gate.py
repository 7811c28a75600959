"""Lets the training thread go on while a step is under way, and stops whoever touches what is still on its way.

While the gate is closed, every torch operation of the training thread passes through it. One that is given a weight
that has not arrived, a gradient that has not left, or host memory that is being stepped waits for just that much; all
others go on. So the first layers of the next forward run while the host still steps the last ones, and no hook,
callback or training loop has to know.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.pipeline import Pipeline

_WEIGHT, _GRADIENT, _STEPPED = range(3)

_HARMLESS = {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}


class Gate(TorchFunctionMode):
    """Guards a pipeline's flight on the training thread.

    Args:
        pipeline: Whose flight.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._flights: tuple[Flight | None, Flight | None] = None, None
        self._places: _Places | None = None
        self._entered = False

    def close(self) -> bool:
        """Guard what is under way; False where it cannot be done.

        Another mode may be left before this one, and compiled code reads weights without asking.
        """
        if not (self._pipeline.engine.overlaps or self._pipeline.hold) or _something_is_compiled():
            return False
        if not self._entered:
            if torch._C._len_torch_function_stack():
                return False
            self.__enter__()
            self._entered = True
        return True

    def open(self) -> None:
        """Nothing is under way any more."""
        self._flights, self._places = (None, None), None
        if self._entered and _top_of_stack() is self:
            self._entered = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for what `func` is about to touch, then call it."""
        flights = self._pipeline.arriving, self._pipeline.working
        if func is Tensor.backward:
            self._pipeline.before_backward()
        elif flights != (None, None) and func not in _HARMLESS and getattr(func, "__name__", "") != "__get__":
            self._wait_for(flights, _tensors((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def _wait_for(self, flights: tuple[Flight | None, Flight | None], tensors: Iterable[Tensor]) -> None:
        pipeline = self._pipeline
        if self._places is None or self._flights != flights:
            self._flights, self._places = flights, _Places(*flights)
        weights, gradients, stepped = self._places.last(tensors)
        if stepped >= 0:
            pipeline.rest()
            if pipeline.working is None:
                return
        if weights >= 0:
            pipeline.arrive(weights)
        if gradients >= 0:
            pipeline.depart(gradients)


class _Places:
    """Where in memory things are that are under way: weights that arrive, gradients that leave, stepped host memory."""

    def __init__(self, arriving: Flight | None, working: Flight | None) -> None:
        spans = []
        if arriving is not None:
            for index, (region, chunk) in enumerate(arriving.chunks):
                spans.append((*_span(region.weights[chunk.start : chunk.stop]), _WEIGHT, index))
        if working is not None:
            for index, sources in enumerate(working.sources):
                spans += [(*_span(tensor), _GRADIENT, index) for source in sources for tensor in source.tensors]
            spans += [(*_span(tensor), _STEPPED, 0) for tensor in working.stepped]
        self._spans = sorted(spans)
        self._begins = [span[0] for span in self._spans]

    def last(self, tensors: Iterable[Tensor]) -> list[int]:
        """Numbers of the last chunks whose weights, gradients and host memory these tensors share; -1: of none."""
        found = [-1, -1, -1]
        for tensor in tensors:
            try:
                begin, end = _span(tensor)
            except RuntimeError:
                found[_STEPPED] = 0  # a tensor without memory of its own may stand for any other
                continue
            position = bisect_left(self._begins, end) - 1
            while position >= 0 and self._spans[position][1] > begin:
                _, _, what, index = self._spans[position]
                found[what] = max(found[what], index)
                position -= 1
        return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor's elements and one past the last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _tensors(arguments: Any) -> Iterable[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _tensors(argument)
    elif isinstance(arguments, dict):
        yield from _tensors(tuple(arguments.values()))


def _top_of_stack() -> Any:
    size = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(size - 1) if size else None


def _something_is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
