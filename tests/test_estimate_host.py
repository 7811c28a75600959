"""Host bytes of an estimate against what the offload allocates, and against what a process really grows by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cpu_offload import CPUOffloadStrategy, estimate
from lightning_cpu_offload.estimate.choices import PROCESS_BYTES
from lightning_cpu_offload.offload.attach import Attachment, Settings
from tests.estimate_models import Trained

RATES = {"flops": 35e12, "d2h": 24e9, "h2d": 24e9, "host": 60e9, "device": 570e9}


class Small(Trained):
    """Matrices of several sizes, of which a share of the device can be chosen, and a size that divides by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, width, bias=False) for width in (64, 96, 33, 128))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([layer(batch).sum() for layer in self.layers]).sum()


def allocated(options: dict[str, Any]) -> dict[str, int]:
    """Bytes by purpose that the strategy holds on the host after a step, but for the few of its checks."""
    module = Small()
    optimizer = torch.optim.AdamW(module.parameters())
    settings = Settings(**options)
    attachment = Attachment(module, [optimizer], torch.device("cpu"), lambda *_: torch.bfloat16, settings)
    try:
        module.training_step(torch.ones(2, 64, dtype=torch.bfloat16), 0).backward()
        optimizer.step()
        attachment.land()
        return {name: nbytes for name, nbytes in attachment.memory.bytes_by_name.items() if name != "checks"}
    finally:
        attachment.detach()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "early", "nonfinite": "raise"},
        {"update": "delayed"},
        {"gradients": "host"},
        {"device_fraction": 0.4},
        {"update": "early", "nonfinite": "raise", "device_fraction": 0.4, "state_dtype": "bfloat16"},
        {"state_dtype": "bfloat16"},
        {"state_dtype": "float8"},
        {"gradients": "host", "state_dtype": "float8"},
    ],
    ids=str,
)
def test_host_bytes_are_those_the_strategy_allocates(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        module, batch = Small(), torch.zeros(2, 64)
    result = estimate(module, batch, strategy=CPUOffloadStrategy(**options), precision="bf16-true", rates=RATES)
    host = dict(next(row.host for row in result.rows if row.name == result.configured))
    del host["process"]
    expected = allocated(options)
    names = {"moments": "optimizer state", "ring": "planes" if "planes" in host else "ring"}
    expected = {names.get(name, name): nbytes for name, nbytes in expected.items() if nbytes}
    assert set(host) == set(expected)
    for name, nbytes in expected.items():
        # Arenas end at a multiple of 4 bytes, and 8-bit moments at a whole block.
        assert host[name] == pytest.approx(nbytes, abs=64 if name == "optimizer state" else 0), name


HOST_GROWTH = """
import sys, psutil, torch
from lightning_cpu_offload import kernels
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.settings import Settings
kernels.warm_up()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2500, 4000, bias=False) for _ in range(10))
module = Net()
optimizer = torch.optim.AdamW(module.parameters())
rss = psutil.Process().memory_info
before = rss().rss - sum(p.nbytes for p in module.parameters())
attachment = Attachment(module, [optimizer], torch.device("cpu"), lambda o, t, w: torch.bfloat16, Settings())
for parameter in module.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
on_device = sum(p.nbytes + p.grad.nbytes for p in module.parameters())
print(rss().rss - before - on_device)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RSS means something else elsewhere")
def test_host_bytes_of_100m_parameters(root: Path) -> None:
    """What the process grows by in a step, the device's share on this CPU taken off, against the estimate."""

    class Net(Trained):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2500, 4000, bias=False) for _ in range(10))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return torch.stack([layer(batch).sum() for layer in self.layers]).sum()

    with torch.device("meta"):
        module = Net()
    predicted = next(
        row
        for row in estimate(module, torch.zeros(1, 2500), rates=RATES).rows
        if row.name.startswith('gradients="device"')
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", HOST_GROWTH]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    assert int(run.stdout) == pytest.approx(predicted.host_bytes - PROCESS_BYTES, rel=0.02)
