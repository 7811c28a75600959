"""A step recorded on a real device: device events and the host's clock tell one story.

Needs torch, Lightning, numba and pytest, and any accelerator that torch knows; skipped where there is none.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadStrategy, OffloadMonitor
from lightning_cpu_offload.callbacks.recording import spans
from lightning_cpu_offload.offload.transfer import AcceleratorEngine

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type == "mps", reason="torch has no streams for mps")]

CLOCK_SECONDS = 2e-3
"""How far the two clocks may be apart: waking up a thread after an event takes some tens of microseconds."""


class Wide(pl.LightningModule):
    """67 million parameters: sixteen chunks of BF16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="asks the device itself")
def test_device_work_lies_between_the_hosts_moments_around_it() -> None:
    engine = AcceleratorEngine(DEVICE)
    matrix = torch.ones(4096, 4096, device=DEVICE)
    _ = matrix @ matrix
    marks = engine.record_marks()
    begin = time.perf_counter()
    engine.mark("compute", "forward")
    for _ in range(20):
        matrix = matrix @ matrix / 4096
    engine.mark("compute", None)
    engine.synchronize()
    end = time.perf_counter()
    start, stop = (moment() for _, _, moment in marks)
    assert begin - CLOCK_SECONDS <= start < stop <= end + CLOCK_SECONDS
    assert stop - start > 0.5 * (end - begin)  # the host had nothing to do but wait
    engine.shutdown()


OPTIONS: list[dict[str, object]] = [
    {},
    {"update": "delayed", "exact_steps": 0},
    {"gradients": "host"},
    {"device_fraction": 0.5},
    {"state_dtype": "float8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_chunk_goes_out_is_stepped_and_comes_back(options: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    monitor = OffloadMonitor(timeline_every_n_steps=2, trace_path=path, summary=False)
    strategy = CPUOffloadStrategy(**options)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        strategy=strategy, devices=1, max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False
    )
    trainer.fit(Wide(), DataLoader([torch.ones(4096) for _ in range(5)], batch_size=1))
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for step in {event["pid"] for event in events}:
        own = [(lanes[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == step]
        assert {lane for lane, _, _ in own} == {"compute", "d2h", "host", "h2d"}
        for lane in ("d2h", "host", "h2d"):
            ordered = sorted((start, end) for name, start, end in own if name == lane)
            assert all(end >= start for start, end in ordered)
            assert all(end <= start + 1 for (_, end), (start, _) in pairwise(ordered))  # microseconds of float error
    assert spans([]) == []
