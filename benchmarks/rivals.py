"""Optimizers of other libraries, in an environment and a process of their own, timed one step at a time.

The environment is `benchmarks/.venv`: made when first needed, on top of the torch that runs the benchmark.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from types import TracebackType

FOLDER = Path(__file__).parent
ENVIRONMENT = FOLDER / ".venv"
EXTENSIONS = ENVIRONMENT / "extensions"
PACKAGES = ("deepspeed>=0.19", "bitsandbytes>=0.46", "ninja", "setuptools<81", "wheel")
RIVALS = {"deepspeed": "DeepSpeed CPUAdam, two conversions", "bitsandbytes": "bitsandbytes AdamW8bit, two conversions"}
"""What the worker knows, and its name in the table."""


class RivalError(RuntimeError):
    """A rival cannot be installed, built or run here; the message says why."""


def python() -> Path:
    """Return the Python of the rivals' environment, made if there is none.

    Raises:
        RivalError: If the packages cannot be installed.
    """
    executable = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = ENVIRONMENT / "installed"
    if not done.exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        command = [executable, "-c", "import site; print(site.getsitepackages()[0])"]
        packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        (packages / "torch_of_the_benchmark.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        command = [executable, "-m", "pip", "install", "-q", "--no-build-isolation", *PACKAGES[2:]]
        for install in (command, [*command[:-3], *PACKAGES[:2]]):
            ran = subprocess.run(install, env=_environment(1), capture_output=True, text=True)
            if ran.returncode:
                raise RivalError(f"pip could not install it: {_last_line(ran.stderr)}")
        done.touch()
    return executable


class Rival:
    """A process that holds its own copy of the workload and makes a step when asked.

    Args:
        name: A key of `RIVALS`.
        sizes: Sizes of the tensors.
        num_threads: For torch and OpenMP.

    Raises:
        RivalError: If it cannot make its first step.
    """

    def __init__(self, name: str, sizes: list[int], num_threads: int) -> None:
        executable = python()
        for lock in EXTENSIONS.rglob("lock"):  # of a build that was interrupted: the next would wait for it for ever
            lock.unlink()
        command = [executable, FOLDER / "rivals_worker.py", name, str(num_threads)]
        self._process = subprocess.Popen(
            command, env=_environment(num_threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(json.dumps(sizes))
        self.milliseconds()

    def milliseconds(self) -> float:
        """Make a step; return how long it took."""
        return float(self._ask("step"))

    def __enter__(self) -> Rival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # what it died of stands in its answer
        for answer in stdout:
            kind, _, text = answer.strip().partition(" ")
            if kind == "ok":
                return text
            if kind == "error":
                self._process.wait()
                raise RivalError(text)
        raise RivalError(f"its process ended with {self._process.wait()}")


def _environment(num_threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folder = str(ENVIRONMENT / ("Scripts" if sys.platform == "win32" else "bin"))
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    ours = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS), "OMP_NUM_THREADS": str(num_threads)}
    return {**inherited, "PATH": path, **ours}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
