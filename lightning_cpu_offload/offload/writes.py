"""Lets the masters take over what others wrote into the weights since the last step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.pipeline import Pipeline
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.watch import Watch


class Writes:
    """Writes into one optimizer's weights: those that torch sees, and those that only the watch notices.

    Args:
        regions: Its regions; may grow.
        watch: Remembers the weights.
        pipeline: Whose device may still be writing.
    """

    def __init__(self, regions: Sequence[Region], watch: Watch, pipeline: Pipeline) -> None:
        self._regions = regions
        self._watch = watch
        self._pipeline = pipeline

    def adopt_seen(self) -> None:
        """Take over what torch saw: by a version, by other storage in place of a weight, by a write to the host."""
        for region in self._regions:
            written = [master for master in region.masters if master.written()]
            for master in written:
                _require_exact(master)
                master.adopt()
            if written:
                self._watch.remember(region)

    def hidden(self) -> Tensor:
        """What the watch notices: uint8 for each chunk of each region, on the device."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._pipeline.engine.device)
        return torch.cat([nothing, *(self._watch.changed(region) for region in self._regions)])

    def adopt_hidden(self, changed: Tensor) -> None:
        """Take over what `hidden` found; by now on the host."""
        if not changed.any():
            return
        self._pipeline.wait_for_device()
        flags = iter(changed.tolist())
        for region in self._regions:
            hit = [chunk for chunk in region.chunks if next(flags)]
            for index in sorted({piece.index for chunk in hit for piece in chunk.pieces}):
                _require_exact(region.masters[index])
                region.masters[index].adopt()
        self._pipeline.wait_for_device()  # the same hazard: the step, on another lane, would come before what is queued


def _require_exact(master: Master) -> None:
    if master.ahead:
        raise RuntimeError(
            f"{master.name}: written to while its step was on the way (update='delayed' keeps weights one step behind "
            "their masters, update='early' begins under backward), so it cannot be told what was written. Use "
            "update='exact' with what writes into weights."
        )
