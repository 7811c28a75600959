"""How long a training window takes under each policy, from what it computes and moves: nothing is run.

Every policy hands its work to the lanes in the order the offload does, over the chunks of the offload's own plan:

    none      everything in sequence: backward, gradients out, host step, weights back
    exact     once the last backward has ended, chunk after chunk: out, host, back; the next forward starts each
              parameter's work when that parameter is back
    early     chunks whose gradients are complete go out during the last backward already (no clipping, and a
              gradient that is not finite raises); their weights return when backward no longer reads them
    delayed   the host steps under the next window; its weights return one window later
    partial   a part of the parameters is stepped on the device, the others as in exact
    early partial   the others as in early
    host      gradients leave in every micro-batch and are added up on the host
    device    AdamW on the device: what the others are compared with
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cpu_offload.estimate.schedule import (
    ADD_BYTES,
    CLIP_BYTES,
    DEVICE_STEP_BYTES,
    STORE_BYTES,
    SUM_BYTES,
    Schedule,
    Staging,
)
from lightning_cpu_offload.estimate.timeline import LANES, Lane, Task, busy
from lightning_cpu_offload.estimate.work import Load, Rates, Unit, Window


class Device(Schedule):
    """AdamW on the device, which needs no look at the gradients before it begins, but for clipping."""

    def update(self, ends: Sequence[float]) -> None:
        """Clip and step."""
        nbytes = DEVICE_STEP_BYTES + CLIP_BYTES * self.window.clip
        self.line.add("compute", "step", nbytes * self.window.numel / self.rates.device)


class Sequential(Schedule):
    """Nothing overlaps."""

    def update(self, ends: Sequence[float]) -> None:
        """Every lane in turn."""
        moment = self.check()
        for lane in (self.fetch, self.step, self.push):
            for load in self.loads:
                moment = lane(load, moment)
        self._weights = [moment] * len(self._weights)


class Exact(Schedule):
    """All chunks in forward order, once the gradients are known to be good."""

    def update(self, ends: Sequence[float]) -> None:
        """The pipeline, beside it the device's share."""
        begin = self.check()
        self.step_resident(begin)
        self.pipeline(self.loads, begin)


class Partial(Exact):
    """A part of the parameters is stepped on the device."""

    shares = True


class Early(Schedule):
    """As many chunks as there are slots leave during the last backward."""

    clips = False

    def __init__(self, window: Window, rates: Rates, staging: Staging) -> None:
        super().__init__(window, rates, staging)
        self._slots = [0.0] * staging.early_slots

    def update(self, ends: Sequence[float]) -> None:
        """In the order in which gradients are complete, then the others in forward order."""
        complete = {load: max(ends[index] for index in load.units) for load in self.loads}
        end = max(ends, default=0.0)
        begun = [load for load in sorted(self.loads, key=complete.__getitem__) if complete[load] < end]
        begun = begun[: self.staging.early_slots - self.staging.slots]
        self._next_slot = 0
        for load in begun:
            self.through_slot(load, complete[load], end)
        self.step_resident(end)
        early = set(begun)
        self.pipeline((load for load in self.loads if load not in early), end)


class EarlyPartial(Early):
    """The same for what is not stepped on the device."""

    shares = True


class Delayed(Schedule):
    """One window behind, through a host plane for every chunk."""

    def __init__(self, window: Window, rates: Rates, staging: Staging) -> None:
        super().__init__(window, rates, staging)
        self._stepped: dict[Load, float] = {}
        self._left = [0.0] * len(window.units)  # when each parameter's gradient has left the device

    def whole_backward(self) -> None:
        """In one piece once all gradients of the window before are known to have left."""
        if not any(self._left):
            super().whole_backward()
            return
        for index in reversed(range(len(self._left))):
            self.backward(index)
        self._left = [0.0] * len(self._left)

    def backward(self, index: int, *after: float) -> float:
        """Waits for the gradient of the window before to have left."""
        return super().backward(index, self._left[index], *after)

    def update(self, ends: Sequence[float]) -> None:
        """Weights of the window before return, then gradients leave, each in the plane its weights came from."""
        begin = self.check()
        pushed = {load: self.push(load, begin, done) for load, done in self._stepped.items()}
        for load in self.loads:
            arrived = self.fetch(load, begin, pushed.get(load, 0.0))
            for index in load.units:
                self._left[index] = max(self._left[index], arrived)
            self._stepped[load] = self.step(load, arrived)


class Host(Schedule):
    """Gradients leave chunk by chunk as backward completes them, in every micro-batch."""

    def __init__(self, window: Window, rates: Rates, staging: Staging) -> None:
        super().__init__(window, rates, staging)
        self._leaving = sorted(self.loads, key=lambda load: load.units[0], reverse=True)
        self._made = 0  # bytes of gradients so far
        self._gone: list[int] = []  # of them, on their way out with each chunk and those before it
        self._arrived: list[float] = []  # when each of those chunks has left the device

    def micro_batches(self) -> list[float]:
        """Every backward streams."""
        ends: list[float] = []
        for micro_batch in range(self.window.accumulate):
            self.forward()
            ends = self._stream(STORE_BYTES if micro_batch == 0 else ADD_BYTES)
        return ends

    def update(self, ends: Sequence[float]) -> None:
        """The host steps from its sums; the lane's order sees to it that all of them are complete."""
        end = max(ends, default=0.0)
        for load in self.loads:
            nbytes = load.step_bytes + load.numel * (SUM_BYTES - load.itemsize)  # the sum in place of a gradient
            self.push(load, self.step(load, nbytes=nbytes), end)

    def _stream(self, bytes_per_parameter: int) -> list[float]:
        """One backward, the way out of its gradients, and what the host does with them."""
        ends = [0.0] * len(self.window.units)
        place = 0
        for index in reversed(range(len(ends))):
            ends[index] = self.backward(index, self._room_for(self.window.units[index]))
            while place < len(self._leaving) and self._leaving[place].units[0] >= index:
                self._leave(self._leaving[place], ends[index], bytes_per_parameter)
                place += 1
        return ends

    def _room_for(self, unit: Unit) -> float:
        """When enough gradients have left for one more; the cap makes way for one that is larger than itself."""
        nbytes = unit.numel * unit.itemsize
        self._made += nbytes
        to_leave = self._made - max(self.staging.in_flight_bytes, nbytes)
        if to_leave <= 0 or not self._gone:
            return 0.0
        return self._arrived[min(bisect_left(self._gone, to_leave), len(self._gone) - 1)]

    def _leave(self, load: Load, complete: float, bytes_per_parameter: int) -> None:
        slot = self._next_slot % len(self._slots)
        self._next_slot += 1
        arrived = self.fetch(load, complete, self._slots[slot])
        nbytes = bytes_per_parameter * load.numel
        self._slots[slot] = self.line.add("host", "add", nbytes / self.rates.host, arrived)
        self._gone.append(load.nbytes + (self._gone[-1] if self._gone else 0))
        self._arrived.append(arrived)


POLICIES: dict[str, type[Schedule]] = {
    "device": Device,
    "none": Sequential,
    "exact": Exact,
    "early": Early,
    "early partial": EarlyPartial,
    "delayed": Delayed,
    "partial": Partial,
    "host": Host,
}


@dataclass(frozen=True)
class StepTime:
    """One window in the steady state, from the end of one last backward to the end of the next.

    Attributes:
        seconds: How long it takes.
        busy: Seconds each lane works in it.
        tasks: The work itself, moved so that the window begins at 0.
    """

    seconds: float
    busy: dict[Lane, float]
    tasks: tuple[Task, ...]

    @property
    def exposed(self) -> float:
        """Seconds in which the device does not compute."""
        return self.seconds - self.busy["compute"]


def step_time(window: Window, rates: Rates, staging: Staging, policy: str, windows: int = 4) -> StepTime:
    """The time of one window in the steady state.

    Args:
        window: What is computed between two optimizer steps.
        rates: How fast the machine is.
        staging: The ring and what goes with it.
        policy: One of `POLICIES`.
        windows: How many to run; the last one is taken.

    Raises:
        ValueError: The policy is not known, or needs what the window does not have.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(map(repr, POLICIES))}. Choose one of them.")
    if window.clip and not POLICIES[policy].clips:
        raise ValueError(f"policy={policy!r}: needs all gradients for the norm first. Take 'exact', or clip=False.")
    schedule = POLICIES[policy](window, rates, staging)
    ends = [schedule.run() for _ in range(windows)]
    begin, end = ends[-2:]
    tasks = schedule.line.between(begin, end)
    lanes = {lane: busy(tasks, lane, begin, end) for lane in LANES}
    moved = (Task(task.lane, task.name, task.start - begin, task.end - begin) for task in tasks)
    return StepTime(end - begin, lanes, tuple(moved))
