"""What `driver` runs on every rank: each function gets a folder, the number of ranks and what the test gave it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cpu_offload import CPUOffloadDDPStrategy, CPUOffloadPrecision
from lightning_cpu_offload.offload import attach
from tests.models import NetworkModule, make_batches, quiet_trainer
from tests.reference import EPOCHS, Case, Snapshot


@dataclass
class Run:
    """A case with options of the strategy."""

    case: Case
    options: dict[str, Any] = field(default_factory=dict)


def snapshot(module: pl.LightningModule, prefix: str = "network.") -> Snapshot:
    """Masters and optimizer state as every rank can see them."""
    with module.trainer.strategy.gathered():
        weights = {name.removeprefix(prefix): tensor for name, tensor in module.state_dict().items()}
        return Snapshot(weights, module.trainer.optimizers[0].state_dict())


class Gathering(NetworkModule):
    """Looks at masters and state of all ranks after each step."""

    def on_train_start(self) -> None:
        """Counts the chunks, and how many of them are this rank's."""
        regions = self.trainer.strategy.offload.regions
        chunks = [(region, chunk) for region in regions for chunk in region.chunks]
        self.chunks = len(chunks), sum(region.is_owned(chunk) for region, chunk in chunks)

    def snapshot(self) -> Snapshot:
        """What every rank can see."""
        return snapshot(self)


def strategy(case: Case, options: dict[str, Any]) -> CPUOffloadDDPStrategy:
    """The strategy for a case."""
    precision: Any = case.precision
    return CPUOffloadDDPStrategy(cpu_threads=1, precision_plugin=CPUOffloadPrecision(precision), **options)


def trainer(case: Case, strategy: Any, ranks: int, **options: Any) -> pl.Trainer:
    """A Trainer for a case."""
    return quiet_trainer(
        strategy=strategy,
        devices=ranks,
        use_distributed_sampler=False,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_value,
        gradient_clip_algorithm=None if case.clip == "none" else case.clip,
        **{"max_epochs": EPOCHS, **options},
    )


def loader(case: Case, ranks: int) -> Any:
    """This rank's part of the batches of a case, in order; Lightning would shuffle them."""
    batches: Any = make_batches(case)
    sampler = DistributedSampler(batches, ranks, int(os.environ.get("LOCAL_RANK", "0")), shuffle=False)
    return DataLoader(batches, batch_size=None, sampler=sampler)


def cases(folder: Path, ranks: int, runs: list[Run]) -> list[dict[str, Any]]:
    """Train each run, and return its losses, its trail and what was left."""
    attach.SMALL_SLOT_BYTES = 256  # a small network in many chunks
    results = []
    for run in runs:
        print(run, flush=True)  # for the log of a failure
        module = Gathering(run.case, watched=True)
        trainer(run.case, strategy(run.case, run.options), ranks).fit(module, loader(run.case, ranks))
        results.append(
            {
                "losses": [float(loss) for loss in module.losses],
                "trail": module.trail,
                "left": final_weights(module),
                "state": snapshot(module),
                "chunks": module.chunks,
            }
        )
    return results


def final_weights(module: pl.LightningModule) -> dict[str, Tensor]:
    """What fit leaves in the module."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
