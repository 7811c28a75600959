"""What `driver` runs on every rank: each function gets a folder, the number of ranks and what the test gave it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cpu_offload import CPUOffloadDDPStrategy, CPUOffloadPrecision, checkpoint
from lightning_cpu_offload.offload import attach
from tests.ddp.events import (
    PLAIN,
    Alone,
    Clamps,
    FullFile,
    Many,
    Raises,
    Spoiled,
    SpoiledAfterwards,
    SwitchesAmsgrad,
    Unfreezes,
    Validates,
    attempt,
)
from tests.models import NetworkModule, make_batches, quiet_trainer
from tests.reference import EPOCHS, Case, Snapshot

NODES = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
"""Machines, as torchrun says."""


def own_rank() -> int:
    """Of this process among all; torchrun says it, and Lightning's own launcher knows one machine."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


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
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keeps the reduced gradients, before they are clipped."""
        grads = {name: parameter.grad for name, parameter in self.network.named_parameters()}
        self.gradients.append({name: grad.clone() for name, grad in grads.items() if grad is not None})

    def snapshot(self) -> Snapshot:
        """What every rank can see."""
        return snapshot(self)


def strategy(case: Case, options: dict[str, Any]) -> CPUOffloadDDPStrategy:
    """The strategy for a case."""
    precision: Any = case.precision
    return CPUOffloadDDPStrategy(precision_plugin=CPUOffloadPrecision(precision), **{"cpu_threads": 1, **options})


def trainer(case: Case, strategy: Any, ranks: int, **options: Any) -> pl.Trainer:
    """A Trainer for a case."""
    return quiet_trainer(
        strategy=strategy,
        devices=ranks // NODES,
        num_nodes=NODES,
        use_distributed_sampler=False,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_value,
        gradient_clip_algorithm=None if case.clip == "none" else case.clip,
        **{"max_epochs": EPOCHS, **options},
    )


def loader(case: Case, ranks: int) -> Any:
    """This rank's part of the batches of a case, in order; Lightning would shuffle them."""
    batches: Any = make_batches(case)
    sampler = DistributedSampler(batches, ranks, own_rank(), shuffle=False)
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
                "gradients": module.gradients,
            }
        )
    return results


def final_weights(module: pl.LightningModule) -> dict[str, Tensor]:
    """What fit leaves in the module."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fitted(folder: Path, run: Run, ranks: int, **options: Any) -> tuple[NetworkModule, pl.Trainer]:
    """A module that records nothing, and the Trainer that has trained it."""
    module = NetworkModule(run.case)
    runner = trainer(run.case, strategy(run.case, run.options), ranks, **options)
    runner.fit(module, loader(run.case, ranks))
    return module, runner


def checkpoints(folder: Path, ranks: int, runs: dict[str, Run]) -> dict[str, dict[str, Snapshot]]:
    """Save each run after its first epoch, within fit and after it, and return what was to be saved.

    `whole` is the state after two epochs without a break.
    """
    attach.SMALL_SLOT_BYTES = 256
    results = {}
    for name, run in runs.items():
        callback = pl.callbacks.ModelCheckpoint(folder / name, filename="within", save_top_k=-1)
        within, runner = fitted(folder, run, ranks, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
        runner.save_checkpoint(folder / name / "after.ckpt")
        runner.save_checkpoint(folder / name / "weights.ckpt", weights_only=True)
        whole, _ = fitted(folder, run, ranks)
        results[name] = {"saved": snapshot(within), "whole": snapshot(whole)}
    return results


class Begin(pl.Callback):
    """Looks at the state with which training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """After the checkpoint was loaded."""
        self.state = snapshot(module)
        self.threads = trainer.strategy.offload.threads.num_threads  # type: ignore[attr-defined]


def resume(folder: Path, ranks: int, given: dict[str, tuple[Run, Path]]) -> dict[str, dict[str, Any]]:
    """Go on from each checkpoint, and return the state at the beginning and at the end."""
    attach.SMALL_SLOT_BYTES = 256
    results = {}
    for name, (run, path) in given.items():
        begin = Begin()
        module = NetworkModule(run.case)
        runner = trainer(run.case, strategy(run.case, run.options), ranks, callbacks=[begin])
        runner.fit(module, loader(run.case, ranks), ckpt_path=path)
        results[name] = {"begin": begin.state, "end": snapshot(module)}
    return results


def as_one_device(folder: Path, ranks: int, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a case with each of these options of the strategy, and return what is left."""
    attach.SMALL_SLOT_BYTES = 256
    case = Case("plain", "32-true", 1, "none", "adamw")
    results = {}
    for name, chosen in options.items():
        begin = Begin()
        module, _ = fitted(folder, Run(case, chosen), ranks, callbacks=[begin])
        results[name] = {"weights": final_weights(module), "state": snapshot(module), "threads": begin.threads}
    return results


def happenings(folder: Path, ranks: int, given: None) -> dict[str, Any]:
    """One odd thing after the other."""
    attach.SMALL_SLOT_BYTES = 256
    found: dict[str, Any] = {}
    data = loader(PLAIN, ranks)

    def fit(kind: type[NetworkModule] = NetworkModule, case: Case = PLAIN, **options: Any) -> Any:
        own = {name: options.pop(name) for name in ("update", "exact_steps") if name in options}
        module = kind(case)
        runner = trainer(case, strategy(case, own), ranks, **options)
        found["message"] = attempt(lambda: runner.fit(module, data))
        return module, runner

    for kind in (Spoiled, SpoiledAfterwards):
        skipped = Skipped()
        module, _ = fit(kind, callbacks=[skipped])
        found[kind.__name__] = skipped.number, found["message"], final_weights(module)

    for update in ("exact", "delayed"):
        alone = Alone()
        fit(callbacks=[alone], update=update, exact_steps=0)
        found[f"alone {update}"] = alone.heard, found["message"]

    _, runner = fit(callbacks=[SwitchesAmsgrad()])
    found["amsgrad"] = found["message"]
    found["static graph"] = attempt(
        lambda: trainer(replace(PLAIN, accumulate=2), strategy(PLAIN, {"static_graph": True}), ranks).fit(
            NetworkModule(PLAIN), data
        )
    )
    fit(case=replace(PLAIN, structure="frozen"), callbacks=[Unfreezes()])
    found["unfrozen"] = found["message"]

    for traceless in (False, True):
        module, _ = fit(callbacks=[Clamps(traceless)])
        found[f"clamped {traceless}"] = final_weights(module)

    module, runner = fit(callbacks=[Raises((0, 1))])
    found["raised"] = found["message"], final_weights(module)
    found["saved after it"] = attempt(lambda: runner.save_checkpoint(folder / "not.ckpt"))

    module, runner = fit()
    if runner.global_rank == 0:
        original, checkpoint._Watched = checkpoint._Watched, lambda file, _: FullFile(file, 3000)  # type: ignore
    found["full disk"] = attempt(lambda: runner.save_checkpoint(folder / "full.ckpt"))
    if runner.global_rank == 0:
        checkpoint._Watched = original
    runner.strategy.barrier()
    runner.save_checkpoint(folder / "room.ckpt")
    found["room"] = snapshot(module)

    average = pl.callbacks.EMAWeightAveraging(device="cpu", decay=0.5)
    watched = Gathering(PLAIN, watched=True)
    trainer(PLAIN, strategy(PLAIN, {}), ranks, callbacks=[average]).fit(watched, data)
    found["averaged"] = watched.trail, final_weights(watched)

    validates = Validates(PLAIN)
    runner = trainer(PLAIN, strategy(PLAIN, {}), ranks, limit_val_batches=2)
    runner.fit(validates, data, data)
    found["validated"] = {name: float(value) for name, value in runner.callback_metrics.items()}

    runner.save_checkpoint(folder / "fitted.ckpt")
    runner.validate(validates, data, verbose=False)
    found["saved after validate"] = attempt(lambda: runner.save_checkpoint(folder / "validated.ckpt"))
    return found


class Skipped(pl.Callback):
    """How many steps were skipped."""

    number = -1

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        """While the offload is there."""
        self.number = trainer.strategy.offload.skipped_steps


def dies(folder: Path, ranks: int, given: None) -> None:
    """One rank is gone in the middle of training."""
    run = trainer(PLAIN, strategy(PLAIN, {"timeout": timedelta(seconds=40)}), ranks, callbacks=[Raises((1,), True)])
    run.fit(NetworkModule(PLAIN), loader(PLAIN, ranks))


def memory(folder: Path, ranks: int, given: dict[str, Any]) -> dict[str, Any]:
    """Host bytes of 20 million parameters, as counted and as the system shows them."""
    module = Many()
    measured = Measured()
    data: Any = DataLoader(torch.ones(2 * ranks, 1))  # type: ignore[arg-type]
    case = Case("plain", "bf16-mixed", 1, "none", "adamw")
    runner = trainer(case, strategy(case, given), ranks, max_epochs=1, callbacks=[measured])
    runner.fit(module, data)
    runner.save_checkpoint(folder / "many.ckpt")
    return {**measured.found, "after": measured.resident(), "weights": [float(part[-1]) for part in module.parts]}


class Measured(pl.Callback):
    """Looks at the arenas after each step."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.arenas: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_unused: Any) -> None:
        """After a step, all that is touched by steps has been."""
        offload = trainer.strategy.offload
        self.arenas = list(trainer.strategy._partition._arenas)
        self.found = {
            "counted": dict(offload.memory.bytes_by_name),
            "resident": self.resident(),
            "parameters": offload.num_parameters,
        }

    def resident(self) -> int:
        """Bytes of the arenas that are in memory."""
        spans = [(arena.array.ctypes.data, arena.array.ctypes.data + arena.array.nbytes) for arena in self.arenas]
        total, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                inside = any(begin < last and first < end for first, last in spans)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
        return total


def loses_a_node(folder: Path, ranks: int, run: Run) -> None:
    """The second rank is gone in the second epoch, after the first was saved."""
    attach.SMALL_SLOT_BYTES = 256
    kept = pl.callbacks.ModelCheckpoint(folder, filename="kept")
    fitted(folder, run, ranks, callbacks=[kept, Raises((1,), kill=True, epoch=1)], enable_checkpointing=True)


def goes_on(folder: Path, ranks: int, given: tuple[Run, Path]) -> dict[str, Any]:
    """Resume from what was saved, train without a break, and count bytes."""
    run, path = given
    resumed = resume(folder, ranks, {"kept": (run, path)})["kept"]
    whole = cases(folder, ranks, [run])[0]
    return {"resumed": resumed, "whole": whole, "sent": {name: sent(ranks, name) for name in ("ours", "ddp")}}


def sent(ranks: int, strategy_name: str) -> float:
    """Bytes that this rank sends over the network in one step, for each parameter in BF16."""
    case = Case("plain", "bf16-true", 1, "none", "adamw")
    chosen: Any = strategy(case, {}) if strategy_name == "ours" else "ddp"
    own = {} if strategy_name == "ours" else {"precision": "bf16-true"}
    traffic = Traffic()
    data: Any = DataLoader(torch.ones(4 * ranks, 1))  # type: ignore[arg-type]
    module = Many()
    trainer(case, chosen, ranks, max_epochs=1, callbacks=[traffic], **own).fit(module, data)
    begin, end = traffic.counts[1], traffic.counts[3]
    return (end - begin) / 2 / sum(part.numel() for part in module.parts)


class Traffic(pl.Callback):
    """Reads the counter of the network between the machines."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """When the step before has landed on all of them."""
        if isinstance(trainer.strategy, CPUOffloadDDPStrategy):
            trainer.strategy.offload.land()  # type: ignore[union-attr]
        trainer.strategy.barrier()
        line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "between:" in line)
        self.counts.append(int(line.partition(":")[2].split()[8]))
