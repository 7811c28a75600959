"""Lanes and events: the only file that knows streams.

Work is queued on three lanes, each in order, and runs concurrently with the other lanes and with the host:

    compute   ..backward| forward of the next batch ........      the device's current stream
    d2h              |c0|c1|c2|c3|                               gradients leave
    host                |k0|k1|k2|k3|                            the CPU steps chunk after chunk
    h2d                    |w0|w1|w2|w3|                         weights return

An event marks a point of a lane; a lane, or the host, waits for it. Each wait in `pipeline.py` names the hazard it
closes. The engine of a CPU "device" does everything at once, so all of its waits are empty; the very same pipeline
runs on both.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import override

Lane = Literal["compute", "d2h", "h2d"]


class Engine(Protocol):
    """What the pipeline asks of a device."""

    device: torch.device

    def event(self) -> Any:
        """A new event; events are made once and recorded again and again."""

    def record(self, event: Any, lane: Lane) -> None:
        """Mark the end of what is queued on `lane` by now."""

    def wait(self, lane: Lane, event: Any) -> None:
        """Queue nothing more on `lane` before `event` has happened; the host goes on."""

    def host_wait(self, event: Any) -> None:
        """Block the host until `event` has happened."""

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        """Queue `dst.copy_(src)` on `lane`."""

    def synchronize(self) -> None:
        """Block the host until all lanes are empty."""


class InlineEngine(Engine):
    """The engine of a CPU "device": copies happen when they are asked for, and block until they have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @override
    def event(self) -> None:
        return None

    @override
    def record(self, event: None, lane: Lane) -> None:
        pass

    @override
    def wait(self, lane: Lane, event: None) -> None:
        pass

    @override
    def host_wait(self, event: None) -> None:
        pass

    @override
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)

    @override
    def synchronize(self) -> None:
        pass


class AcceleratorEngine(Engine):
    """The engine of any accelerator torch knows: CUDA, ROCm, XPU and out-of-tree backends alike."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Made once: streams and events made per step leak reserved memory.
        self._streams = {"d2h": torch.Stream(device=device), "h2d": torch.Stream(device=device)}

    def _stream(self, lane: Lane) -> torch.Stream:
        # The current stream is asked for at each call: it belongs to the calling thread, and users may change it.
        return torch.accelerator.current_stream(self.device) if lane == "compute" else self._streams[lane]

    @override
    def event(self) -> torch.Event:
        return torch.Event(device=self.device)

    @override
    def record(self, event: torch.Event, lane: Lane) -> None:
        event.record(self._stream(lane))

    @override
    def wait(self, lane: Lane, event: torch.Event) -> None:
        self._stream(lane).wait_event(event)

    @override
    def host_wait(self, event: torch.Event) -> None:
        event.synchronize()

    @override
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        with self._stream(lane):
            dst.copy_(src, non_blocking=True)

    @override
    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def make_engine(device: torch.device) -> Engine:
    """The engine for a device."""
    if device.type == "cpu":
        return InlineEngine(device)
    try:
        return AcceleratorEngine(device)
    except (NotImplementedError, RuntimeError) as error:
        warnings.warn(
            f"torch has no streams for {device} ({error}); transfers block, and nothing overlaps with them.",
            stacklevel=2,
        )
        return InlineEngine(device)


def words(tensor: Tensor) -> Tensor:
    """The bits of a floating-point tensor as integers of the same size, shape and strides kept."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer)
