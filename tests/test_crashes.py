"""Runs killed with SIGKILL at random moments: the newest checkpoint loads, and the resumed run is exact."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cpu_offload.atomic import SUFFIX
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from tests.conftest import ROOT
from tests.crashing import ELSEWHERE, PHASES, SAVE, STEP, STEPS, Marker, train, wait_for

KILLS = 60
KILLS_EACH = 12
ATTEMPTS = 150
TIMES = {SAVE: 12, STEP: 6, ELSEWHERE: 12}
"""How often a resumed run at least does each thing."""
LONGEST = {SAVE: 0.03, STEP: 0.008, ELSEWHERE: 0.002}
"""Seconds after its beginning in which a phase is about over: a kill is aimed at a random moment of them."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "forkserver" not in multiprocessing.get_all_start_methods(), reason="forks runs, which this system cannot"
    ),
]


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Starts processes by forking a server that has imported and compiled everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.crashing_server"])
        yield context


@pytest.fixture(scope="module")
def reference(context: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    finish(context, folder, resume=False)
    return folder


def finish(context: Any, folder: Path, resume: bool) -> None:
    """Lets a run come to its end."""
    process = context.Process(target=train, args=(str(folder), resume, False))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def kill(context: Any, folder: Path, target: int, generator: random.Random) -> int | None:
    """Resumes a run and kills it near a phase; returns the phase it was in, None if it came to its end before."""
    marker = Marker(folder / "marker")
    process = context.Process(target=train, args=(str(folder), True))
    process.start()
    wait_for(marker, target, generator.randint(1, TIMES[target]), process, patience=60)
    time.sleep(generator.uniform(0, LONGEST[target]))
    process.kill()
    process.join()
    return marker.phase if process.exitcode == -9 else None


def state(path: Path) -> dict[str, Any]:
    """Everything a run continues from."""
    checkpoint = StreamingCheckpointIO().load_checkpoint(path)
    return {key: checkpoint[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def assert_equal(actual: Any, expected: Any, where: str) -> None:
    """Every element of two nested structures is equal, bit for bit."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def assert_as_reference(folder: Path, reference: Path) -> int:
    """Every checkpoint in the folder loads and equals the reference's of the same step; returns the newest step."""
    steps = []
    for path in sorted(folder.glob("*.ckpt")):
        found = state(path)
        steps.append(found["global_step"])
        assert_equal(found, state(reference / f"step={steps[-1]}.ckpt"), path.name)
        if path.name != "last.ckpt":
            assert path.name == f"step={steps[-1]}.ckpt"
    return max(steps)


def test_the_comparison_can_fail(context: Any, reference: Path, tmp_path: Path) -> None:
    assert assert_as_reference(reference, reference) == STEPS
    checkpoint = torch.load(reference / "last.ckpt", weights_only=True)
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"][0, 0] += 1e-6
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_as_reference(tmp_path, reference)


def test_killed_runs_resume_exactly(
    context: Any, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(0)
    landed: Counter[int] = Counter()
    left_behind = attempts = 0
    while sum(landed.values()) < KILLS or any(landed[phase] < KILLS_EACH for phase in PHASES):
        attempts += 1
        assert attempts <= ATTEMPTS, {PHASES[phase]: number for phase, number in landed.items()}
        folder = tmp_path / str(attempts)
        folder.mkdir()
        shutil.copy(reference / "step=1.ckpt", folder / "last.ckpt")
        phase = kill(context, folder, min(PHASES, key=lambda phase: landed[phase]), generator)
        if phase is None:
            continue
        landed[phase] += 1
        left_behind += len(list(folder.glob(f".*{SUFFIX}")))
        assert_as_reference(folder, reference)
        finish(context, folder, resume=True)
        assert assert_as_reference(folder, reference) == STEPS
        assert not list(folder.glob(f".*{SUFFIX}"))
        shutil.rmtree(folder)
    assert left_behind, "no kill left a temporary file behind, so none came in the middle of writing"
    with capsys.disabled():
        counts = ", ".join(f"{number} {PHASES[phase]}" for phase, number in sorted(landed.items()))
        print(
            f"\n{sum(landed.values())} kills: {counts}; {left_behind} left a temporary file, and it was swept; "
            "all resumed exactly"
        )
