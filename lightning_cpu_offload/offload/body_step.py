"""A step by the optimizer's own body: each parameter is its master while the body runs.

The parameter objects stay where they are, in `param_groups`, as keys of the state and wherever else an optimizer keeps
them; only their data and gradients are exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cpu_offload.offload.accumulators import Decoy
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.flight import StepReport
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.mapped import give_back
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.nonfinite import is_finite
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.trained import Trained
from lightning_cpu_offload.offload.writes import Writes


class BodyStep:
    """Lets an optimizer's body step the masters.

    Args:
        optimizer: The user's object.
        trained: What it steps.
        host: Where.
        writes: Finds what others wrote.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Trained, host: Host, writes: Writes) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._host = host
        self._writes = writes
        self._due: list[Master] = []
        self._parameters: list[tuple[Master, Tensor, Tensor | None, bool, int]] = []
        self._decoys: list[Decoy] = []
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        self._report = StepReport()
        self._began = self._ready = 0.0

    def begin(self, due: list[Master], number: int, clip: Clip) -> None:
        """Bring the gradients to the host and put each master in its parameter's place.

        Args:
            due: Masters of what has a gradient.
            number: Of the step, for messages.
            clip: What is to be done to gradients that are on the host.
        """
        self._began, self._report, self._due = time.perf_counter(), StepReport(), due
        self._writes.adopt_hidden(self._writes.hidden().cpu())
        bad = self._collect(due, clip)
        self._host.nonfinite.judge(bad, number)
        stepped = set() if bad else {master.tensor for master in due}
        for region in self._trained.regions:
            for index, master in enumerate(region.masters):
                self._put(master, master.host, _host_gradient(region, index) if master.tensor in stepped else None)
        for master in self._trained.frozen():
            if master.written():
                master.adopt()
            self._put(master, master.host, None)
        self._trained.lead()
        self._borrow_settings()
        self._ready = time.perf_counter()

    def end(self) -> None:
        """Put the parameters back, and send what the body changed to the device."""
        self.put_back()
        self._report.host_ms += (time.perf_counter() - self._ready) * 1e3
        self._host.pipeline.run(self._trained.chunks, _round_masters, fetch=False, report=self._report)
        self._trained.note(self._due)
        self._trained.settle()
        self._report.total_ms = (time.perf_counter() - self._began) * 1e3

    def put_masters(self) -> None:
        """Let each parameter be its master, without a gradient: what torch makes state like, and where."""
        for master in self._trained.masters.values():
            # A resident one is stood in for: its state would else be on the device twice, before it is taken over.
            self._put(master, _stand_in(master.host) if master.resident else master.host, None)

    def put_back(self) -> None:
        """Put compute copies, gradients and settings back; a gradient that was cleared meanwhile stays cleared."""
        while self._parameters:
            master, put, gradient, had_gradient, version = self._parameters.pop()
            cleared = had_gradient and master.tensor.grad is None
            master.tensor.grad = None
            if master.tensor.data_ptr() != put.data_ptr():
                master.host.copy_(master.tensor.data)  # the body put other storage in its place
            moved = master.tensor._version != version
            master.tensor.data = master.view
            master.tensor.grad = None if cleared else gradient
            if moved and master.tensor not in self._trained.masters:
                master.bind(master.view.copy_(master.host))  # the body wrote to what it does not step
        while self._decoys:
            self._decoys.pop().remove()
        while self._settings:
            group, name, value = self._settings.pop()
            group[name] = value

    def _put(self, master: Master, data: Tensor, gradient: Tensor | None) -> None:
        if self._host.partition is not None:
            self._decoys.append(Decoy(master.tensor))
        before = master.tensor.grad
        master.tensor.grad = None
        master.tensor.data = data
        master.tensor.grad = gradient
        self._parameters.append((master, data, before, gradient is not None, master.tensor._version))

    def _collect(self, due: Sequence[Master], clip: Clip) -> list[str]:
        """Gradients into the regions' arenas; returns the names of those that are not finite."""
        for region in self._trained.regions:
            region.allocate_gradients()
        stream = self._host.stream
        if stream is None:
            if not is_finite([master.tensor.grad for master in due]):
                return [master.name for master in due if not is_finite([master.tensor.grad])]
            self._host.pipeline.run(self._trained.due_chunks(due), _widen_gradients, report=self._report)
            return []
        bad, norm = stream.measure_now(due)
        stream.clip([master.tensor for master in due], clip.with_norm(norm))
        return bad

    def _borrow_settings(self) -> None:
        """Exchange settings that only make sense for device tensors."""
        for group in self._optimizer.param_groups:
            for name, value in list(group.items()):
                host = _on_host(name, value)
                if host is not value:
                    self._settings.append((group, name, value))
                    group[name] = host


def own_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Keep state that came from outside (a constructor, a checkpoint) in host memory that is only the optimizer's."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.detach().to("cpu", copy=True)
                give_back(value)


def _stand_in(master: Tensor) -> Tensor:
    """On the CPU, in the shape and dtype of a master, but of a single element."""
    return torch.zeros((), dtype=master.dtype, device="cpu").expand(master.shape)


def _host_gradient(region: Region, index: int) -> Tensor:
    gradient = region.masters[index].tensor.grad
    assert gradient is not None
    assert region.gradients is not None
    if gradient.layout != torch.strided:
        return gradient.detach().to("cpu", torch.float32)
    return region.view(region.gradients, index)


def _widen_gradients(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    assert region.gradients is not None
    region.gradients.flat(chunk.start, chunk.stop).copy_(staged)
    return []


def _round_masters(region: Region, chunk: Chunk, staged: Tensor) -> list[tuple[int, int]]:
    staged.copy_(region.master.flat(chunk.start, chunk.stop))
    return [(chunk.start, chunk.stop)]


def _on_host(name: str, value: Any) -> Any:
    if name == "capturable" and value:
        return False
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.to("cpu")
    return value
