"""Notices writes into compute copies that leave no other trace.

`parameter.data.clamp_(...)` and its like bump no version counter and move no storage. So the bits of all weights are
reduced to a fingerprint as they arrive on the device, and again before the next step overwrites them. The fingerprint
depends on positions: a changed, moved or exchanged element shows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.bits import words
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import Engine

_COLUMNS = 1024
_LOW_31_BITS = (1 << 31) - 1  # torch shifts int64 arithmetically


class Watch:
    """Remembers the fingerprint of each chunk of each region."""

    def __init__(self, threads: ThreadPool, engine: Engine) -> None:
        self._threads = threads
        self._engine = engine
        self._seen: dict[Region, Tensor] = {}

    @torch.no_grad()
    def remember(self, region: Region) -> None:
        """Take the region's weights as they are now for untouched."""
        self._seen[region] = self._fingerprints(region)

    def pushed(self, region: Region, chunk: Chunk) -> None:
        """Take a chunk's weights for untouched as they are when the h2d lane has come to here."""
        bits, seen = words(region.weights[chunk.start : chunk.stop]), self._seen[region]
        seen = seen[region.number(chunk)]

        def fingerprint_chunk() -> None:
            seen.copy_(self._fingerprint(bits))

        self._engine.launch("h2d", fingerprint_chunk, reads=[bits], writes=[seen])

    @torch.no_grad()
    def changed(self, region: Region) -> Tensor:
        """Whether the weights of each chunk are not those remembered: uint8[number of chunks], on the device."""
        return (self._fingerprints(region) != self._seen[region]).to(torch.uint8)

    def _fingerprint(self, bits: Tensor) -> Tensor:
        if _by_kernel(bits):
            value = kernels.fingerprint(bits.numpy().view(np.uint8), threads=self._threads)
            return torch.tensor(value - (1 << 64) if value >> 63 else value)
        return fingerprint(bits)

    def _fingerprints(self, region: Region) -> Tensor:
        bits = words(region.weights)
        if _by_kernel(bits) or region.chunk_numel * bits.element_size() % 8:
            parts = [self._fingerprint(bits[chunk.start : chunk.stop]) for chunk in region.chunks]
            return torch.stack(parts) if parts else torch.empty(0, dtype=torch.int64)
        # Whole chunks all at once: a few kernels in all, and not for each of them.
        whole = region.numel // region.chunk_numel * region.chunk_numel
        size = region.chunk_numel * bits.element_size() // 8
        table = bits[:whole].view(torch.int64).view(-1, size)
        return torch.cat([_hash(table, bits[:0]), *(fingerprint(rest)[None] for rest in [bits[whole:]] if len(rest))])


def fingerprint(bits: Tensor) -> Tensor:
    """A position-dependent 64-bit hash of an integer vector's bits; int64 scalar on the vector's device."""
    ratio = 8 // bits.element_size()
    if bits.storage_offset() % ratio:
        bits = bits.clone()
    whole = bits.numel() // ratio * ratio
    return _hash(bits[:whole].view(torch.int64)[None], bits[whole:])[0]


def _hash(wide: Tensor, rest: Tensor) -> Tensor:
    """A hash of each row of `wide`, int64[rows, words], with the words of `rest` at its end.

    The bits are summed eight bytes at a time (a narrower sum would first widen a copy of them all), along the rows and
    along the columns of a table; each sum is then mixed with its place by the finalizer of MurmurHash3, since sums
    that are only weighted lose the top bits of a word.
    """
    rows, size = wide.shape
    body = size // _COLUMNS * _COLUMNS
    table = wide[:, :body].unflatten(1, (body // _COLUMNS, _COLUMNS))
    columns = table.sum(dim=1)
    columns[:, : size - body] += wide[:, body:]
    sums = torch.cat([columns, table.sum(dim=2), rest.long().expand(rows, -1)], dim=1)
    mixed = sums + torch.arange(1, sums.shape[1] + 1, device=wide.device) * 0x1E3779B97F4A7C15
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        mixed = (mixed ^ (mixed >> 33 & _LOW_31_BITS)) * factor
    return (mixed ^ (mixed >> 33 & _LOW_31_BITS)).sum(dim=1)


def _by_kernel(bits: Tensor) -> bool:
    return bits.device.type == "cpu" and kernels.available()
