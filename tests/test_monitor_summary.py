"""The table at the end of a fit."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_cpu_offload import OffloadMonitor
from lightning_cpu_offload.callbacks.summary import Summary, plain
from tests.net import Net, adamw, fit, sgd


def table(capsys: pytest.CaptureFixture[str], net: Net, **options: Any) -> str:
    """What a run prints."""
    capsys.readouterr()
    fit(net, callbacks=[OffloadMonitor(1, **options)], number=4)
    return capsys.readouterr().out


@pytest.fixture(params=["rich", "plain"])
def printer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With rich, and as if it were not installed."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich.console", None)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    return request.param


class TestTable:
    @pytest.mark.parametrize("make", [adamw, sgd])
    def test_says_what_the_run_cost(self, printer: str, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
        shown = table(capsys, Net(make))
        assert "cpu_offload: 244 parameters stepped on the host" in shown
        for row in ("optimizer steps", "samples/s", "time of a step", "host step", "host: masters", "device: weights"):
            assert row in shown, row
        assert ("of what the kernel reaches alone" in shown) == (make is adamw)
        assert ("|" in shown or "\u2502" in shown) == (printer == "rich")

    def test_is_left_out_on_request_and_under_other_strategies(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "cpu_offload" not in table(capsys, Net(adamw), summary=False)
        capsys.readouterr()
        fit(Net(adamw), None, callbacks=[OffloadMonitor(1)])
        assert "optimizer steps" not in capsys.readouterr().out


class TestSummary:
    def test_means_are_over_the_records_that_have_a_name(self) -> None:
        summary = Summary(steps=2_000)
        summary.add({"host_step_ms": 10.0, "h2d_gb_per_s": 4.0, "skipped_steps": 1.0, "host_bytes/ring": 1e6})
        summary.add({"host_step_ms": 20.0, "skipped_steps": 3.0, "host_bytes/ring": 2e6})
        assert dict(summary.rows()) == {
            "optimizer steps": "2,000, 3 skipped",
            "host step": "15.0 ms",
            "  while they move": "4.0 GB/s",
            "host: ring": "2.0 MB",
        }

    def test_plain_text_is_flush(self) -> None:
        assert plain([("a", "1 ms"), ("longer", "10 ms")], "title") == "title\na        1 ms\nlonger  10 ms"

    def test_of_nothing_is_short(self) -> None:
        assert Summary().rows() == [("optimizer steps", "0")]
