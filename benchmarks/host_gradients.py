"""Time what the host does to gradients that live there: summing up and stepping, kept as they came or widened at once.

    python benchmarks/host_gradients.py [--params N] [--accumulate 1 2 16] [--rounds N] [--threads N]

The two ways take turns on the same memory, and the ratio is that of each round. Both are the package's own: the second
is what it does where something else reads gradients, or where a sum has several. With more than one batch, "kept" is
the wrong guess, as in the first of such windows: what was kept is widened when the second gradient comes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import cycle

import torch
from machine import describe_machine
from torch import Tensor
from ways import CHUNK, OURS_HYPER

from lightning_cpu_offload.kernels import ThreadPool, adamw, physical_cores, warm_up
from lightning_cpu_offload.offload.bits import as_array
from lightning_cpu_offload.offload.memory import HostArena
from lightning_cpu_offload.offload.sums import Sums

RING_DEPTH = 4


class Workload:
    """FP32 weights, moments and sums, and rings of BF16 chunks as the transfers have them: 16 bytes a parameter."""

    def __init__(self, num_params: int, threads: ThreadPool) -> None:
        self.chunks = [(start, min(start + CHUNK, num_params)) for start in range(0, num_params, CHUNK)]
        self.threads = threads
        generator = torch.Generator().manual_seed(0)
        self.param = torch.randn(num_params, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(num_params), torch.zeros(num_params)
        arena = HostArena(num_params)
        arena.flat(0, num_params).zero_()
        self.sums = Sums(arena, threads)
        self.ring = [torch.randn(CHUNK, generator=generator).bfloat16() for _ in range(RING_DEPTH)]
        self.weights = [torch.zeros(CHUNK, dtype=torch.bfloat16) for _ in range(RING_DEPTH)]

    def window(self, accumulate: int, keep: bool) -> tuple[float, float]:
        """Milliseconds of summing up the gradients of so many batches, and of the step."""
        summing, stepping = 0.0, 0.0
        for number in range(accumulate):
            for (start, stop), slot in zip(self.chunks, cycle(self.ring), strict=False):
                slot.copy_(self.ring[0])  # arrives: not timed
                began = time.perf_counter()
                gradient = slot[: stop - start]
                if number:
                    self.sums.add(start, stop, gradient)
                else:
                    self.sums.begin(start, stop, gradient, keep)
                summing += time.perf_counter() - began
        began = time.perf_counter()
        for (start, stop), slot in zip(self.chunks, cycle(self.weights), strict=False):
            for first, last, gradient in self.sums.parts(start, stop):
                self._step(first, last, gradient, slot[first - start : last - start])
        stepping = time.perf_counter() - began
        return summing * 1e3, stepping * 1e3

    def _step(self, start: int, stop: int, gradient: Tensor, weight: Tensor) -> None:
        arrays = (values[start:stop].numpy() for values in (self.exp_avg, self.exp_avg_sq))
        param = self.param[start:stop].numpy()
        adamw(param, as_array(gradient), as_array(weight), *arrays, **OURS_HYPER, threads=self.threads)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=50_331_648, help="parameters; 16 bytes of memory each")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 2, 16], help="batches of a step")
    parser.add_argument("--rounds", type=int, default=11, help="timed windows of each way")
    parser.add_argument("--threads", type=int, default=physical_cores())
    args = parser.parse_args()
    warm_up(host_gradients=True)
    work = Workload(args.params, ThreadPool(args.threads))
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()) + "\n")
    print("| batches | kept / widened | summing, ms: kept | widened | step, ms: kept | widened |")
    print("|---:|---:|---:|---:|---:|---:|")
    for accumulate in args.accumulate:
        rounds = [(work.window(accumulate, True), work.window(accumulate, False)) for _ in range(args.rounds + 1)][1:]
        ratio = statistics.median(sum(kept) / sum(widened) for kept, widened in rounds)
        cells = [statistics.median(each[way][part] for each in rounds) for part in (0, 1) for way in (0, 1)]
        print(f"| {accumulate} | {ratio:.3f} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
