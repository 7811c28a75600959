"""Shows the masters where the module's tensors are, for code that averages or exchanges weights."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from lightning_cpu_offload.offload.accumulators import Decoy
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.watch import Watch


@contextmanager
def shown(
    masters: Iterable[Master], for_writing: bool, hit: frozenset[Master] = frozenset(), reduced: bool = False
) -> Generator[None, None, None]:
    """Meanwhile each tensor is its master: FP32, on the host, with what others wrote into it since the last step.

    Args:
        masters: Between two steps: none is ahead of its compute copy.
        for_writing: Whether the values may change; then the compute copies follow them.
        hit: Those that were written to without a trace, as `hit_without_trace` finds them.
        reduced: Whether torch's DDP reduces their gradients, which hangs on their accumulators.
    """
    masters = list(masters)
    copies = []
    decoys = [Decoy(master.tensor) for master in masters] if reduced else []
    for master in masters:
        if for_writing:
            master.adopt()
        copies.append(master.tensor.data)
        value = master.current() if master in hit or master.written() else master.host
        master.tensor.data = value.to("cpu")
    try:
        yield
    finally:
        for master, copy in zip(masters, copies, strict=True):
            if for_writing:
                _take_over(master)
            else:
                master.tensor.data = copy
        for decoy in decoys:
            decoy.remove()


def hit_without_trace(regions: Iterable[Region], watch: Watch) -> frozenset[Master]:
    """Masters whose weights are not what the watch remembers: written to through `.data`, say."""
    hit: set[Master] = set()
    for region in regions:
        for chunk, changed in zip(region.chunks, watch.changed(region).tolist(), strict=True):
            if changed:
                hit.update(region.masters[piece.index] for piece in chunk.pieces)
    return frozenset(hit)


@torch.no_grad()
def _take_over(master: Master) -> None:
    data = master.tensor.data
    if data.data_ptr() != master.host.data_ptr():
        master.host.copy_(data)  # other storage was put in its place
    master.view.copy_(master.host)
    master.bind(master.view)
