"""A step by the kernel: it is launched, and the optimizer's body finds no parameters to step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.early import Early
from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.fused import FusedAdamW
from lightning_cpu_offload.offload.gradients import GradientStream
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.nonfinite import is_finite
from lightning_cpu_offload.offload.trained import Trained
from lightning_cpu_offload.offload.writes import Writes


class KernelStep:
    """Launches steps of AdamW or Adam.

    Args:
        fused: The kernel over the optimizer's state.
        trained: What it steps.
        host: Where.
        writes: Finds what others wrote.
        early: Begins steps under backward; None: none does.
    """

    def __init__(
        self, fused: FusedAdamW, trained: Trained, host: Host, writes: Writes, early: Early | None = None
    ) -> None:
        self._fused = fused
        self._trained = trained
        self._host = host
        self._writes = writes
        self._early = early
        self._hidden: list[tuple[dict[str, Any], list[Tensor]]] = []

    def begin(self, due: list[Master], number: int, norm: Tensor | None, clip: Clip) -> None:
        """Launch step `number` of what is due, and hide the parameters from the optimizer's body.

        Args:
            due: Masters of what has a gradient.
            number: Of the step, for messages.
            norm: L2 norm of the gradients if it is known; a scalar on the device.
            clip: What is to be done to gradients that are on the host.
        """
        opened = self._early.close() if self._early is not None else None
        self._fused.begin(due)
        bad: list[str] = []
        flight = (
            self._flight_from_device(due, norm, bad, opened)
            if self._host.stream is None
            else self._flight_from_host(self._host.stream, due, clip, bad)
        )
        flight.finished = partial(self._host.nonfinite.judge, bad, number, begun=opened is not None)
        flight.landed = self._trained.settle
        self._trained.note(due)
        flight.stepped = self._fused.memory()
        first = not self._fused.has_state()
        self._host.pipeline.launch(flight)
        if first:  # as after any optimizer's first step, its state is there
            self._host.pipeline.await_decision()
            flight.stepped = self._fused.memory()
        self.hide()

    def hide(self) -> None:
        """Let the optimizer hold nothing that the kernel steps: to hide each gradient would touch it twice."""
        for group, rest in zip(self._trained.optimizer.param_groups, self._trained.outside(), strict=True):
            self._hidden.append((group, group["params"]))
            group["params"] = rest

    def end(self) -> None:
        """The optimizer holds its parameters again."""
        while self._hidden:
            group, parameters = self._hidden.pop()
            group["params"] = parameters

    def _flight_from_device(
        self, due: Sequence[Master], norm: Tensor | None, bad: list[str], opened: Flight | None
    ) -> Flight:
        finite = is_finite([master.tensor.grad for master in due]) if norm is None else norm.isfinite()
        not_finite = finite.logical_not().to(self._host.pipeline.engine.device, torch.uint8).view(1)
        checks = not_finite if opened is not None else torch.cat([not_finite, self._writes.hidden()])
        if self._host.partition is not None:
            self._host.partition.join(checks)  # else a rank that skips a step would not send its part of it
        flight = opened or Flight([], self._fused.work, on_device=self._fused.step_on_device)
        begun = {(region, chunk.start) for region, chunk in flight.chunks}
        rest = [item for item in self._trained.due_chunks(due) if (item[0], item[1].start) not in begun]
        flight.chunks += rest
        flight.sources += [region.sources(chunk) for region, chunk in rest]
        flight.checks = checks

        def decide(checks: Tensor) -> bool:
            self._writes.adopt_hidden(checks[1:])
            if checks[0]:
                bad.extend(_not_finite(flight) or ["any parameter (but their norm overflows)"])
            return self._go(bad)

        flight.decide = decide
        return flight

    def _flight_from_host(self, stream: GradientStream, due: Sequence[Master], clip: Clip, bad: list[str]) -> Flight:
        stream.complete(master.tensor for master in due)

        def decide(checks: Tensor) -> bool:
            self._writes.adopt_hidden(checks)
            not_finite, norm = stream.measure(due)
            bad.extend(not_finite)
            if not bad:
                self._fused.clip = clip.with_norm(norm)
                stream.clip([master.tensor for master in due], self._fused.clip, later=True)
            return self._go(bad)

        chunks = self._trained.due_chunks(due)
        work = partial(self._fused.work_on_host_gradients, stream.sums)
        return Flight(chunks, work, checks=self._writes.hidden(), decide=decide)

    def _go(self, bad: Sequence[str]) -> bool:
        if not bad:
            self._fused.count()
            self._trained.lead()
        return not bad


def _not_finite(flight: Flight) -> list[str]:
    """Names of the parameters whose gradients are not finite; looks at each of them, once in a rare while."""
    names: dict[str, None] = {}
    for (region, chunk), sources in zip(flight.chunks, flight.sources, strict=True):
        begins = {piece.start: region.masters[piece.index].name for piece in chunk.pieces}
        for source in sources:
            start = source.start
            for tensor in source.tensors:
                if not tensor.isfinite().all():
                    names[begins[start]] = None
                start += tensor.numel()
    return list(names)
