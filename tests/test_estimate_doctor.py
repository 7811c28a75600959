"""`doctor`: what it looks at, what it advises, and the exit status."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import pytest
import torch

from lightning_cpu_offload import kernels
from lightning_cpu_offload.__main__ import main
from lightning_cpu_offload.estimate import doctor


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are measured elsewhere."""
    monkeypatch.setattr(doctor, "host_rate", lambda: 60e9)
    monkeypatch.setattr(doctor, "accelerator", lambda: None)


def found() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_everything_is_looked_at() -> None:
    findings = found()
    assert {"CPU", "cores", "RAM", "host step", "versions", "kernel", "device", "system"} <= set(findings)
    assert f"torch {torch.__version__}" in findings["versions"].value
    assert findings["host step"].value.startswith("60.0 GB/s, 467 ms")
    assert not any(finding.serious for finding in findings.values())


def test_a_slow_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_rate", lambda: 8e9)
    assert "memory channel" in found()["host step"].advice


def test_without_numba_the_status_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "IMPORT_ERROR", ImportError("no numba"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "torch operations (no numba)" in out
    assert "! pip install numba" in out


@pytest.mark.parametrize(
    ("attribute", "value", "word"),
    [("release", "5.15.1-microsoft-standard-WSL2", "WSL2"), ("platform", "win32", "Windows")],
)
def test_windows(monkeypatch: pytest.MonkeyPatch, attribute: str, value: str, word: str) -> None:
    if attribute == "release":
        monkeypatch.setattr(platform, "release", lambda: value)
    else:
        monkeypatch.setattr(sys, "platform", value)
    assert word in next(iter(doctor._system())).advice


RATES = {"d2h": 20e9, "h2d": 21e9, "device": 500e9, "flops": 30e12}


class TestDevice:
    def findings(self, monkeypatch: pytest.MonkeyPatch, limit: int, **rates: float) -> dict[str, doctor.Finding]:
        monkeypatch.setattr(doctor, "accelerator", lambda: torch.device("meta"))
        monkeypatch.setattr(doctor, "device_rates", lambda _device: {**RATES, **rates})
        monkeypatch.setattr(doctor, "pinned_limit", lambda: limit)
        return found()

    def test_all_is_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        findings = self.findings(monkeypatch, 4 << 30)
        assert findings["link"].value == "20.0 GB/s to the host, 21.0 GB/s back"
        assert not any(finding.advice for name, finding in findings.items() if name in ("link", "page-locked memory"))

    def test_a_link_with_few_lanes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "16 lanes" in self.findings(monkeypatch, 4 << 30, h2d=3e9)["link"].advice

    def test_too_little_page_locked_memory_is_serious(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finding = self.findings(monkeypatch, 0)["page-locked memory"]
        assert finding.serious
        assert "ulimit -l" in finding.advice


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == 0
    data: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {"name", "value", "advice", "serious"} == set(data[0])
