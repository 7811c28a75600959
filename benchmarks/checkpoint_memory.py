"""Peak memory while a checkpoint is saved and while a run resumes from it, beside training's own.

    python benchmarks/checkpoint_memory.py [--params N] [--json PATH]

Every row is a process of its own on the CPU: it trains a few steps, without a checkpoint, with one saved, or resumed
from one. What counts is the resident memory of the process at its highest, as Linux keeps it (VmHWM).
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadStrategy

LIMIT_MIB = 64
STEPS = 4
WIDTH = 1024
VOCABULARY = 32_000
STRATEGIES: dict[str, Callable[[], Any]] = {
    "this package": lambda: CPUOffloadStrategy(cpu_threads=1),
    "stock Lightning": lambda: "auto",
}


@dataclass
class Peak:
    """What one process needed, in MiB.

    Attributes:
        strategy: The strategy it trained with.
        what: `train`, `save` or `resume`.
        peak: Highest resident memory of the process.
        growth: By how much saving raised it over what it was just before; 0 where nothing is saved.
        file: Size of the checkpoint.
    """

    strategy: str
    what: str
    peak: float
    growth: float
    file: float


class Stack(pl.LightningModule):
    """An embedding and as many square layers as make `num_params` parameters."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        depth = max(1, (num_params - VOCABULARY * WIDTH) // (4 * WIDTH * WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(depth))
        self.growth = 0.0
        self.save_to: str | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A scalar that depends on every layer."""
        hidden = self.embedding(batch)
        for layer in self.layers:
            hidden = hidden + layer(hidden).unflatten(-1, (4, WIDTH)).mean(-2)
        return hidden.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with two moments for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves after the last step."""
        if self.save_to is not None and batch_idx == STEPS - 1:
            before = status("VmRSS")
            highest = status("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
            self.trainer.save_checkpoint(self.save_to)
            self.growth = status("VmHWM") - before
            self.highest = highest


def status(name: str) -> float:
    """A line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def measure(strategy: str, what: str, num_params: int, path: str) -> Peak:
    """Trains in this process, which must be a fresh one."""
    torch.set_num_threads(1)
    module = Stack(num_params)
    module.save_to = path if what == "save" else None
    loader: Any = DataLoader([torch.arange(8)[None]] * STEPS, batch_size=None)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        max_epochs=2 if what == "resume" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=path if what == "resume" else None)
    peak = max(status("VmHWM"), getattr(module, "highest", 0.0))
    size = os.path.getsize(path) / 2**20 if os.path.exists(path) else 0.0
    return Peak(strategy, what, peak, module.growth, size)


def measure_all(num_params: int, folder: str) -> list[Peak]:
    """Every row, each in a process of its own."""
    peaks = []
    for strategy in STRATEGIES:
        path = os.path.join(folder, f"{strategy.split()[0]}.ckpt")
        for what in ("train", "save", "resume"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks.append(pool.apply(measure, (strategy, what, num_params, path)))
    return peaks


def table(peaks: list[Peak]) -> str:
    """The rows in Markdown, with what each needs above training's own."""
    own = {peak.strategy: peak.peak for peak in peaks if peak.what == "train"}
    lines = [
        "| strategy | process | peak, MiB | above training's own | growth while saving | file, MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for peak in peaks:
        above = peak.peak - own[peak.strategy]
        lines.append(
            f"| {peak.strategy} | {peak.what} | {peak.peak:,.0f} | {above:+,.0f} | {peak.growth:,.0f} "
            f"| {peak.file:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and say whether this package keeps within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=200_000_000, help="parameters of the model, at least 37 million")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed tensors leave at once, so that peaks can be compared
    with tempfile.TemporaryDirectory(dir=".") as folder:
        peaks = measure_all(options.params, folder)
    print(table(peaks))
    ours = [peak for peak in peaks if peak.strategy == "this package"]
    most = max(max(peak.peak - ours[0].peak, peak.growth) for peak in ours)
    print(f"\nthis package: {most:,.0f} MiB above training's own at most, limit {LIMIT_MIB}")
    if options.json:
        machine = {
            "date": datetime.date.today().isoformat(),
            "platform": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "params": options.params,
        }
        options.json.write_text(json.dumps({**machine, "peaks": [asdict(peak) for peak in peaks]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
