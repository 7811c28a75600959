"""Notices writes into compute copies that leave no other trace.

`parameter.data.clamp_(...)` and its like bump no version counter and move no storage. So the bits of all weights are
reduced to a fingerprint when they are pushed, and again before the next step overwrites them. The fingerprint
depends on positions: a changed, moved or exchanged element shows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import words

_COLUMNS = 1024
_LOW_31_BITS = (1 << 31) - 1  # torch shifts int64 arithmetically


class Watch:
    """Remembers the fingerprint of each chunk of each region."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        self._seen: dict[Region, list[int] | Tensor] = {}

    def remember(self, region: Region) -> None:
        """Take the region's weights as they are now for untouched."""
        self._seen[region] = self._fingerprints(region)

    def changed(self, region: Region) -> list[Chunk]:
        """The chunks whose weights are not those remembered."""
        now, seen = self._fingerprints(region), self._seen[region]
        if isinstance(now, Tensor) and isinstance(seen, Tensor):
            equal = (now == seen).tolist()
        else:
            equal = [a == b for a, b in zip(now, seen, strict=True)]
        return [chunk for chunk, same in zip(region.chunks, equal, strict=True) if not same]

    def _fingerprints(self, region: Region) -> list[int] | Tensor:
        parts = [words(region.weights[chunk.start : chunk.stop]) for chunk in region.chunks]
        if region.weights.device.type == "cpu" and kernels.available():
            return [kernels.fingerprint(part.numpy().view(np.uint8), threads=self._threads) for part in parts]
        # Stays on the device: comparing costs one synchronisation per region, remembering none.
        return torch.stack([fingerprint(part) for part in parts]) if parts else torch.empty(0)


def fingerprint(bits: Tensor) -> Tensor:
    """A position-dependent 64-bit hash of an integer vector's bits; int64 scalar on the vector's device.

    The bits are summed eight bytes at a time (a narrower sum would first widen a copy of them all), along the rows and
    along the columns of a table; each sum is then mixed with its place by the finalizer of MurmurHash3, since sums
    that are only weighted lose the top bits of a word.
    """
    ratio = 8 // bits.element_size()
    if bits.storage_offset() % ratio:
        bits = bits.clone()
    whole = bits.numel() // ratio * ratio
    wide = bits[:whole].view(torch.int64)
    body = wide.numel() // _COLUMNS * _COLUMNS
    table = wide[:body].view(-1, _COLUMNS)
    columns = table.sum(dim=0)
    columns[: wide.numel() - body] += wide[body:]
    sums = torch.cat([columns, table.sum(dim=1), bits[whole:].long()])
    mixed = sums + torch.arange(1, sums.numel() + 1, device=bits.device) * 0x1E3779B97F4A7C15
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        mixed = (mixed ^ (mixed >> 33 & _LOW_31_BITS)) * factor
    return (mixed ^ (mixed >> 33 & _LOW_31_BITS)).sum()
