"""The files around the package say the same as the package, and as each other."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_cpu_offload
from lightning_cpu_offload.__main__ import main
from tests.conftest import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
README = ROOT / "README.md"
TARGETS = {"train", "test", "check", "bench", "zoo", "docs", "gpu", "clean", "help"}
COMMANDS = ("python -m lightning_cpu_offload ", "lightning-cpu-offload ")


def test_version_has_one_source() -> None:
    assert version("lightning-cpu-offload") == lightning_cpu_offload.__version__
    assert not re.search(r'^version = "', PYPROJECT, re.MULTILINE)


def test_every_dependency_is_constrained() -> None:
    required = set(re.findall(r'"([A-Za-z0-9-]+)(?:\[\w+\])?>=', PYPROJECT)) - {"setuptools"}
    constrained = set(re.findall(r"^([A-Za-z0-9-]+)==", CONSTRAINTS, re.MULTILINE))
    assert len(required) > 10
    assert required <= constrained


def test_each_target_is_explained_by_make_help() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make (\w+) +\S", shown, re.MULTILINE)) == TARGETS == targets()


def test_old_python_is_refused(tmp_path: Path) -> None:
    """With a Python that says it is old, no environment is made."""
    old = tmp_path / "old_python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command = ["make", "train", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode
    assert f"PYTHON={old}: Python 3.10 or newer is needed." in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_gpu_target_refuses_where_torch_sees_no_accelerator(tmp_path: Path) -> None:
    """An imitation of torch, so that the answer is the same on every machine."""
    blind = tmp_path / "python"
    blind.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    blind.chmod(0o755)
    (tmp_path / "torch.py").write_text(
        "__version__ = '0'\nclass accelerator:\n    is_available = staticmethod(lambda: False)\n"
    )
    refused = subprocess.run(
        ["make", "gpu", f"PYTHON_GPU={blind}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode
    assert "sees no accelerator. Name a Python that does: make gpu PYTHON_GPU=" in refused.stderr
    assert "pytest" not in refused.stdout


def test_ci_runs_the_test_target() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


def test_readme_has_commands() -> None:
    words = {shlex.split(command)[0] for command in readme_commands()}
    assert {"make", "python"} <= words
    assert words <= {"make", "python", "lightning-cpu-offload", "pip", "tensorboard", "git", "cd"}
    assert any(command.startswith("make train") for command in readme_commands())
    assert any(command.startswith("make test") for command in readme_commands())


def test_every_make_command_of_the_readme_names_a_target() -> None:
    for command in readme_commands():
        if command.startswith("make"):
            assert unknown_targets(command) == set(), command


def test_every_run_of_the_readme_parses(root: Path) -> None:
    runs = [command for command in readme_commands() if command.startswith(COMMANDS)]
    assert runs
    for command in runs:
        assert parses(command), command


def test_checkers_of_commands_can_fail(root: Path) -> None:
    assert unknown_targets("make trian ARGS='--trainer.max_steps 2'") == {"trian"}
    for wrong in ("fitt --config configs/gpt_small.yaml", "fit --config configs/gpt_smal.yaml"):
        assert not parses(f"python -m lightning_cpu_offload {wrong}")
    assert not parses("lightning-cpu-offload fit --config configs/gpt_small.yaml --trainer.max_stepz 2")
    assert parses("lightning-cpu-offload fit --config configs/gpt_small.yaml --trainer.max_steps 2")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def readme_commands() -> list[str]:
    """The command lines in the README's bash blocks, continued lines joined, comments left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if shlex.split(line, comments=True)]


def unknown_targets(command: str) -> set[str]:
    words = shlex.split(command, comments=True)[1:]
    return {word for word in words if "=" not in word} - targets()


def parses(command: str) -> bool:
    """Whether the command line accepts all words of `command`; nothing is built or run."""
    prefix = next(prefix for prefix in COMMANDS if command.startswith(prefix))
    words = shlex.split(command.removeprefix(prefix), comments=True)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help" if words[0] == "doctor" else "--print_config"])
    return not stop.value.code
