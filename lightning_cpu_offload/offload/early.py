"""Steps that begin under the backward that makes their gradients.

    backward     |..g3|..g2|..g1|               compute
                      |g3|  |g2|  |g1|          d2h: what is complete leaves, while there are slots
                         |k3|  |k2|  |k1|       host
                                |w3|w2|w1|      h2d: only now, as backward reads the weights of before

The arithmetic is that of an exact step. But a backward that fails or is interrupted leaves some masters stepped and
others not: whoever then asks for them gets an error, and never a mixed checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.fused import FusedAdamW
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.trained import Trained
from lightning_cpu_offload.offload.writes import Writes


class Early:
    """Begins the steps of one optimizer.

    Args:
        fused: The kernel over its state.
        trained: What it steps.
        host: Where.
        writes: Finds what others wrote.
    """

    def __init__(self, fused: FusedAdamW, trained: Trained, host: Host, writes: Writes) -> None:
        self._fused = fused
        self._trained = trained
        self._host = host
        self._writes = writes
        self._is_last = False
        self._flight: Flight | None = None
        self._places: dict[Tensor, tuple[Region, int]] = {}
        self._chunks_of: dict[Tensor, list[int]] = {}
        self._missing: dict[int, set[Tensor]] = {}
        self._taken: list[tuple[Tensor, Tensor, int]] = []
        self._handles: list[Any] = []

    def attach(self, region: Region) -> None:
        """Hear of the gradients of a region's parameters."""
        for index, master in enumerate(region.masters):
            self._places[master.tensor] = region, index
            self._handles.append(master.on_gradient(self._on_gradient))

    def detach(self) -> None:
        """Hear of no more gradients."""
        while self._handles:
            self._handles.pop().remove()
        self._flight = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """A backward in here is the last one before the step."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False

    def begin(self) -> None:
        """A backward is about to begin; if it is the last one, what becomes complete is stepped at once."""
        if not self._is_last or any(master.written() for master in self._trained.masters.values()):
            return
        self._is_last = False
        self._fused.begin_early()
        self._missing, self._chunks_of, self._taken = {}, {}, []
        for number, (region, chunk) in enumerate(self._trained.chunks):
            if not region.resident:
                self._missing[number] = {region.masters[piece.index].tensor for piece in chunk.pieces}
                for parameter in self._missing[number]:
                    self._chunks_of.setdefault(parameter, []).append(number)
        flight = Flight([], self._fused.work, checks=self._writes.hidden(), on_device=self._fused.step_on_device)
        flight.decide, flight.landed = self._prepare, self._trained.settle
        self._host.pipeline.open(flight)
        self._flight = flight

    def close(self) -> Flight | None:
        """What has begun, to be completed and launched; None if nothing has.

        Raises:
            RuntimeError: It did not begin with what is there now.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        for parameter, gradient, version in self._taken:
            if parameter.grad is not gradient or gradient._version != version:
                region, index = self._places[parameter]
                raise RuntimeError(
                    f"the gradient of {region.masters[index].name!r} was changed after backward had completed it, but "
                    "update='early' had stepped with it by then. Use update='exact' with what changes gradients."
                )
        if self._fused.settings_changed():
            raise RuntimeError(
                "the optimizer's settings were changed between the last backward and the step, but update='early' had "
                "stepped with them by then. Use update='exact', or change them after the step."
            )
        self._taken = []
        return flight

    def _prepare(self, changed: Tensor) -> bool:
        self._writes.adopt_hidden(changed)
        self._trained.lead()
        return True

    def _on_gradient(self, parameter: Tensor) -> None:
        flight, pipeline = self._flight, self._host.pipeline
        if flight is None or not self._is_laid_out(parameter):
            return
        for number in self._chunks_of.get(parameter, ()):
            missing = self._missing.get(number, set())
            missing.discard(parameter)
            if missing or number not in self._missing:
                continue
            del self._missing[number]
            region, chunk = self._trained.chunks[number]
            if pipeline.has_room(flight) and self._fused.expect(region, chunk):
                pipeline.add(flight, region, chunk)
                for piece in chunk.pieces:
                    stepped = region.masters[piece.index].tensor
                    assert stepped.grad is not None
                    self._taken.append((stepped, stepped.grad, stepped.grad._version))

    def _is_laid_out(self, parameter: Tensor) -> bool:
        region, index = self._places[parameter]
        gradient = parameter.grad
        return (
            gradient is not None
            and gradient.layout == torch.strided
            and gradient.dtype == parameter.dtype
            and gradient.stride() == region.strides[index]
        )
