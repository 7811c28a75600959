"""The kernels in a fresh Python: without the rest of the package, without numba, on other processors."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cpu_offload import kernels

ROOT = Path(__file__).parents[1]
PACKAGE_ALONE = f"""
import sys, types
package = types.ModuleType("lightning_cpu_offload")  # its __init__ would import torch
package.__path__ = [{str(ROOT / "lightning_cpu_offload")!r}]
sys.modules[package.__name__] = package
"""

REPORT = """
import json
kernels.available() and kernels.warm_up()
print(json.dumps([kernels.available(), repr(kernels.IMPORT_ERROR), sorted(sys.modules)]))
"""


def run_alone(code: str, **environment: str) -> str:
    """Run `code` in a fresh Python that has the kernels without the rest of the package; return what it prints."""
    command = [sys.executable, "-c", PACKAGE_ALONE + code]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def import_alone(before: str = "", after: str = "") -> tuple[bool, str, set[str]]:
    """Import the kernels between two pieces of code: are they available, why not, what modules are loaded."""
    printed = run_alone("\n".join([before, "import lightning_cpu_offload.kernels as kernels", after, REPORT]))
    available, reason, modules = json.loads(printed)
    return available, reason, {module.partition(".")[0] for module in modules}


FORBIDDEN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}


def test_kernels_need_neither_torch_nor_lightning() -> None:
    available, _, modules = import_alone()
    assert available
    assert not modules & FORBIDDEN


def test_import_check_notices_torch() -> None:
    assert import_alone(after="sys.modules['torch.nn'] = types")[2] & FORBIDDEN == {"torch"}


def test_kernels_import_without_numba() -> None:
    available, reason, _ = import_alone("sys.modules['numba'] = None", "kernels.ThreadPool(2).map(abs, [-1, 2])")
    assert not available
    assert "numba" in reason


def test_kernels_import_where_numba_cannot_write_its_cache() -> None:
    refuse = "import numba\ndef njit(**options): raise RuntimeError('cannot cache function')\nnumba.njit = njit"
    available, reason, _ = import_alone(refuse)
    assert not available
    assert "cannot cache function" in reason


FINGERPRINT = """
import numpy
print(kernels.__file__, kernels.fingerprint(numpy.zeros(9), threads=kernels.ThreadPool(1)))
"""


def test_kernels_are_cached_elsewhere_where_the_package_cannot_be_written_to(tmp_path: Path) -> None:
    package = tmp_path / "lightning_cpu_offload"
    shutil.copytree(ROOT / package.name / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "__pycache__").write_text("in the way")  # also of a superuser, whom no permission stops
    code = f"package.__path__ = [{str(package)!r}]\nimport lightning_cpu_offload.kernels as kernels" + FINGERPRINT
    home = tmp_path / "home"
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "LOCALAPPDATA": str(home), "NUMBA_CACHE_DIR": ""}
    assert str(package) in run_alone(code, **environment)
    assert list(home.rglob("fingerprint.*.nbc"))


def test_kernels_are_available_here() -> None:
    assert kernels.available()
    assert kernels.IMPORT_ERROR is None
    kernels.warm_up()


STEPS_ALONE = """
import hashlib
import numpy as np
import lightning_cpu_offload.kernels as kernels
x = np.random.default_rng(0).standard_normal((4, 4097)).astype(np.float32)
plane = (x[1].view(np.uint32) >> 16).astype(np.uint16)
x[3] **= 2
options = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, threads=kernels.ThreadPool(1))
for step in (1, 2, 3):
    kernels.adamw(x[0], plane, plane, x[2], x[3], **options, decoupled=True, step=step)
    kernels.adamw(x[0], x[1], x[1], x[2], x[3], **options, decoupled=False, step=step)
print(hashlib.sha256(x.tobytes() + plane.tobytes()).hexdigest())
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names x86 processors")
@pytest.mark.parametrize(("cpu", "features"), [("generic", ""), ("haswell", "+avx2,+fma")])
def test_processor_does_not_change_a_bit(tmp_path: Path, cpu: str, features: str) -> None:
    compile_for = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    assert run_alone(STEPS_ALONE, **compile_for) == run_alone(STEPS_ALONE)


def test_another_step_gives_another_hash() -> None:
    assert run_alone(STEPS_ALONE.replace("weight_decay=0.1", "weight_decay=0.1001")) != run_alone(STEPS_ALONE)
