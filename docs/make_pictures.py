"""Makes the pictures of the documentation, in docs/images.

python docs/make_pictures.py                    # timelines: one recorded in a real run here, one by the time model
python docs/make_pictures.py --log logs/gpt_small   # and TensorBoard on that log; needs Chromium
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import lightning.pytorch as pl
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from lightning_cpu_offload import OffloadMonitor
from lightning_cpu_offload.callbacks import draw_step, draw_timeline
from lightning_cpu_offload.callbacks.timeline import Drawn
from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.time import step_time
from lightning_cpu_offload.estimate.work import Rates, Unit, Window
from lightning_cpu_offload.recipes import GPT

IMAGES = Path(__file__).parent / "images"
RATES = Rates(flops=35e12, d2h=24e9, h2d=24e9, host=60e9, device=570e9)
STAGING = Staging(slot_bytes=8 << 20, slots=4)
PORT = 16006


class Model(GPT):
    """The GPT recipe with a plain optimizer and no text to write a sample from."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def record() -> list[Drawn]:
    """Train a GPT of 25M parameters for six steps and return the spans of the last one."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (129,), generator=generator) for _ in range(12)]
    loader = DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        monitor = OffloadMonitor(timeline_every_n_steps=6, trace_path=path, summary=False)
        trainer = pl.Trainer(
            strategy="cpu_offload",
            devices=1,
            accumulate_grad_batches=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            callbacks=[monitor],
        )
        trainer.fit(Model(num_layers=8, d_model=512, num_heads=8), loader)
        events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (lanes[e["tid"]], _what(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"
    ]


def _what(name: str) -> object:
    return int(name.removeprefix("chunk ")) if name.startswith("chunk ") else name


def window() -> Window:
    """Four batches of 512 tokens through the 458M GPT, whose blocks are computed again."""
    width, sizes = 1152, [32000 * 1152]
    for _ in range(24):
        sizes += [3 * width * width, width * width, 4 * width * width, 4 * width * width]
    sizes.append(32000 * width)
    units = tuple(Unit(numel, 2.0 * 512 * numel * (index > 0)) for index, numel in enumerate(sizes))
    return Window(units, accumulate=4, backward=3.0, clip=True)


def picture_of_a_run() -> None:
    """images/timeline_recorded.png."""
    figure = Figure(figsize=(10, 5.5), dpi=110, layout="constrained")
    draw_step(figure, record(), f"recorded: {'a GPU' if torch.accelerator.is_available() else 'the CPU'} as the device")
    _save(figure, "timeline_recorded.png")


def picture_of_the_model() -> None:
    """images/timeline_model.png."""
    policies = ("none", "exact", "delayed", "host")
    figure = Figure(figsize=(10, 9), dpi=110, layout="constrained")
    steps = {policy: step_time(window(), RATES, STAGING, policy) for policy in policies}
    end = max(step.seconds for step in steps.values()) * 1e3
    for axes, (policy, step) in zip(figure.subplots(len(policies), sharex=True), steps.items(), strict=True):
        draw_timeline(axes, step.tasks, f"{policy}: {step.seconds * 1e3:.0f} ms")
        axes.set_xlim(0, 1.02 * end)
        axes.label_outer()
    _save(figure, "timeline_model.png")


def pictures_of_tensorboard(log: Path) -> None:
    """images/tensorboard.png and images/tensorboard_timeline.png."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("chromium: not found. Install it, or leave --log out.")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", log.name, "--port", str(PORT)]
    server = subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.DEVNULL, cwd=log.parent)
    try:
        _wait_for(f"http://localhost:{PORT}/data/plugin/custom_scalars/layout")
        for tab, name, size in (
            ("custom_scalars", "tensorboard.png", "1600,1400"),
            ("images", "tensorboard_timeline.png", "1600,620"),
        ):
            page = f"http://localhost:{PORT}/?darkMode=false#{tab}"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
            options += ["--virtual-time-budget=30000", f"--screenshot={IMAGES / name}"]
            subprocess.run([chromium, *options, page], check=True, stderr=subprocess.DEVNULL)
    finally:
        server.terminate()
        server.wait()


def _wait_for(address: str, seconds: float = 90) -> None:
    """Wait until TensorBoard has read a page of charts from the log."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if b"chart" in urllib.request.urlopen(address, timeout=10).read():
                return
        except OSError:
            pass  # not listening yet
        time.sleep(1)
    raise TimeoutError(f"{address}: no page of charts after {seconds} s. Is the log one that OffloadMonitor wrote?")


def _save(figure: Figure, name: str) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(IMAGES / name)
    print(IMAGES / name)


def main() -> None:
    """Make them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="a TensorBoard log of OffloadMonitor's")
    log = parser.parse_args().log
    IMAGES.mkdir(exist_ok=True)
    picture_of_the_model()
    picture_of_a_run()
    if log is not None:
        pictures_of_tensorboard(log.resolve())


if __name__ == "__main__":
    main()
