"""Trains on every rank and writes what each of them saw; a script for real launchers.

    python -m tests.ddp.driver FOLDER PROGRAM

FOLDER holds `input.pt`, what the program is given; each rank writes `PROGRAM.RANK.pt`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def launch(
    folder: Path,
    program: str,
    given: Any = None,
    ranks: int = 2,
    torchrun: bool = False,
    check: bool = True,
    timeout: float = 280,
) -> list[Any]:
    """Run a function of `tests.ddp.programs` on so many ranks.

    Args:
        folder: For input and output.
        program: Name of the function; it gets `folder`, `ranks` and `given`.
        given: What it is given.
        ranks: Number of processes.
        torchrun: Started by it; else by Lightning's own launcher, from rank 0.
        check: Whether the processes must end well.
        timeout: Seconds after which they are taken for hanging.

    Returns:
        What the function returned on each rank; None where it did not.
    """
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if torchrun else []
    own = prepare(folder, program, given, ranks)
    log = folder / f"{program}.log"
    status = run_all([sys.executable, *start, *own], log, timeout)
    assert not check or status == 0, log.read_text()[-12000:]
    return results(folder, program, ranks)


def prepare(folder: Path, program: str, given: Any, ranks: int) -> list[str]:
    """What Python is to be started with, to run a program."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(given, folder / "input.pt")
    return ["-m", "tests.ddp.driver", str(folder), program, str(ranks)]


def results(folder: Path, program: str, ranks: int) -> list[Any]:
    """What it returned on each rank; None where it did not."""
    paths = [folder / f"{program}.{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def run_all(command: list[str], log: Path, timeout: float) -> int:
    """Run a command and all it starts, and end all of them if it takes too long; returns its exit status.

    Raises:
        subprocess.TimeoutExpired: It took too long.
    """
    drop = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "NODE_RANK"}
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(folder: str, program: str, ranks: str) -> None:
    """One rank's part; Lightning's launcher starts the others with the same words."""
    torch.set_num_threads(1)
    programs = importlib.import_module("tests.ddp.programs")
    given = torch.load(Path(folder) / "input.pt", weights_only=False)
    result = getattr(programs, program)(Path(folder), int(ranks), given)
    torch.save(result, Path(folder) / f"{program}.{programs.own_rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
