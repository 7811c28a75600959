"""How long a window takes where data-parallel ranks each step a share of the chunks: as `time`, with a network.

    last backward   |..g3|..g2|..g1|                      compute
                         |g3|  |g2|  |g1|                 network: chunks of gradients are summed up on their owners
                                       |g1|g2|g3|         own chunks, as under `exact`: out, host, back
                                           |w1|w2|w3|     network: chunks of weights go from their owners to all

All ranks do the same at the same time, each with chunks of its own, so one of them stands for all: when its k-th chunk
is on the device, so are the k-th chunks of the others, and they are broadcast one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.time import Exact
from lightning_cpu_offload.estimate.work import Load, Rates, Window


@dataclass(frozen=True)
class Network:
    """What joins the ranks.

    Attributes:
        ranks: How many there are.
        rate: Bytes per second that each sends, and receives at the same time.
        latency: Seconds of each operation, for each rank that it passes through.
        to_owner: Gradients are summed up on their owner alone; False: on all ranks, twice the bytes.
    """

    ranks: int
    rate: float
    latency: float = 5e-6
    to_owner: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks!r}: 1 or more. Give the number of processes that train together.")
        if not self.rate > 0:
            raise ValueError(f"rate={self.rate!r}: must be more than 0. Give bytes per second.")

    def seconds(self, nbytes: float, times: int = 1) -> float:
        """How long it takes that `nbytes` pass by every rank, `times` times: in a chain, so in small pieces at once."""
        if self.ranks == 1:
            return 0.0
        return times * (nbytes * (self.ranks - 1) / self.ranks / self.rate + self.latency * (self.ranks - 1))

    def bytes_per_parameter(self, itemsize: int = 2) -> float:
        """Bytes that each rank sends for each parameter in one step, on average over the ranks."""
        return (2 if self.to_owner else 3) * itemsize * (self.ranks - 1) / self.ranks


class Partitioned(Exact):
    """Each rank steps the chunks whose number, divided by the number of ranks, leaves its own.

    Args:
        window: What one rank computes.
        rates: How fast it is.
        staging: Its ring.
        network: What joins it with the others.
    """

    def __init__(self, window: Window, rates: Rates, staging: Staging, network: Network) -> None:
        super().__init__(window, rates, staging)
        self._network = network

    def update(self, ends: Sequence[float]) -> None:
        """Reduce chunk by chunk in the order backward makes them, step what is owned, broadcast in forward order."""
        reduced = self._reduce(ends)
        begin = self.line.add("net", "norm", self._network.seconds(0.0, times=2), self.check(), reduced)
        ranks = self._network.ranks
        for first in range(0, len(self.loads), ranks):
            self._step_and_share(self.loads[first : first + ranks], begin)

    def _reduce(self, ends: Sequence[float]) -> float:
        complete = {load: max(ends[index] for index in load.units) for load in self.loads}
        moment = 0.0
        for load in sorted(self.loads, key=complete.__getitem__):
            seconds = self._network.seconds(load.nbytes, times=1 if self._network.to_owner else 2)
            moment = self.line.add("net", "reduce", seconds, complete[load])
        return moment

    def _step_and_share(self, loads: Sequence[Load], begin: float) -> None:
        """The next chunk of each rank: the largest of them is ours."""
        moment = self.through_slot(max(loads, key=lambda load: load.step_bytes), begin, begin)
        for load in loads:
            moment = self.line.add("net", "broadcast", self._network.seconds(load.nbytes), moment)
            for index in load.units:
                self._weights[index] = max(self._weights[index], moment)


def partitioned_time(window: Window, rates: Rates, staging: Staging, network: Network, windows: int = 4) -> float:
    """Seconds of one window in the steady state, with the masters and moments spread over the ranks."""
    schedule = Partitioned(window, rates, staging, network)
    ends = [schedule.run() for _ in range(windows)]
    return ends[-1] - ends[-2]
