"""What the test files share: where the project is, a short text, and the command line as a function."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no accelerator")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _single_threaded() -> Iterator[None]:
    """On tensors as small as the tests' a second thread of torch costs more than it brings."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's root, made the current folder: the configs and the README name files from there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-cpu-offload"])  # LightningCLI warns of words meant for pytest
    return ROOT


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """What another test compiled must not keep steps from overlapping here: dynamo counts for the whole process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl+C interrupts, also where tests began in the background, or a Trainer switched it off before."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """40 kB of text in which no line comes twice."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(1700)))
    return path


@pytest.fixture
def tiny_run(text_file: Path, tmp_path: Path) -> list[str]:
    """Options that cut any config of ours down to two optimizer steps of a tiny model, and write to `tmp_path`."""
    return [
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.limit_val_batches=2",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path}",
        f"--trainer.logger.save_dir={tmp_path / 'logs'}",
        "--model.num_layers=1",
        "--model.d_model=32",
        "--model.num_heads=2",
        "--model.sample_tokens=4",
        "--data.context_length=16",
        f"--data.path={text_file}",
        f"--data.cache_dir={tmp_path / 'cache'}",
    ]


@pytest.fixture
def run_module(root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m lightning_cpu_offload` with the given words in a process of its own."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lightning_cpu_offload", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    return run
