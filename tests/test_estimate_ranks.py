"""The time of data-parallel ranks: closed forms at the limits, and the order of work on the network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cpu_offload.estimate.ranks import Network, Partitioned, partitioned_time
from lightning_cpu_offload.estimate.schedule import Staging
from lightning_cpu_offload.estimate.time import step_time
from lightning_cpu_offload.estimate.work import Rates, Unit, Window

ENDLESS = 1e30
RATES = Rates(flops=35e12, d2h=24e9, h2d=24e9, host=60e9, device=570e9)
STAGING = Staging(slot_bytes=1 << 14, slots=3)
UNITS = tuple(Unit(8192, 2.0 * 8192 * 512) for _ in range(64))  # one chunk each
WINDOW = Window(UNITS, accumulate=2, clip=True)


def test_one_rank_is_the_strategy_of_one_device() -> None:
    for accumulate in (1, 3):
        window = Window(UNITS, accumulate, clip=True)
        alone = step_time(window, RATES, STAGING, "exact").seconds
        assert partitioned_time(window, RATES, STAGING, Network(1, 1e9)) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_where_only_the_host_takes_time_it_is_shared(ranks: int) -> None:
    rates = Rates(ENDLESS, ENDLESS, ENDLESS, 60e9, ENDLESS)
    seconds = partitioned_time(WINDOW, rates, STAGING, Network(ranks, ENDLESS, latency=0.0))
    assert seconds == pytest.approx(28 * 64 * 8192 / 60e9 / ranks, rel=1e-9)


@pytest.mark.parametrize(("to_owner", "times"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_where_only_the_network_takes_time_it_carries_gradients_and_weights(
    ranks: int, to_owner: bool, times: int
) -> None:
    rates = Rates(ENDLESS, ENDLESS, ENDLESS, ENDLESS, ENDLESS)
    network = Network(ranks, 1e9, latency=0.0, to_owner=to_owner)
    seconds = partitioned_time(WINDOW, rates, STAGING, network)
    assert seconds == pytest.approx(times * 2 * 64 * 8192 * (ranks - 1) / ranks / 1e9, rel=1e-9)
    assert seconds == pytest.approx(network.bytes_per_parameter() * 64 * 8192 / 1e9, rel=1e-9)


def test_latency_counts_for_each_operation_and_rank() -> None:
    rates = Rates(ENDLESS, ENDLESS, ENDLESS, ENDLESS, ENDLESS)
    seconds = partitioned_time(WINDOW, rates, STAGING, Network(4, ENDLESS, latency=1e-6))
    operations = 64 + 2 + 64  # a reduction and a broadcast of each chunk, and one sum of squares there and back
    assert seconds == pytest.approx(operations * 3e-6, rel=1e-9)


def test_order_on_the_network() -> None:
    schedule = Partitioned(WINDOW, RATES, STAGING, Network(4, 10e9))
    end = schedule.run()
    schedule.run()
    net = [task for task in schedule.line.tasks if task.lane == "net"]
    reductions, broadcasts = net[:64], net[65:129]
    assert {task.name for task in reductions} == {"reduce"}
    assert net[64].name == "norm"
    assert {task.name for task in broadcasts} == {"broadcast"}
    steps = [task for task in schedule.line.tasks if task.lane == "host"][:16]
    pushes = [task for task in schedule.line.tasks if task.lane == "h2d"][:16]
    assert reductions[0].start < end <= reductions[-1].end  # under the backward, but for the last of it
    assert min(step.start for step in steps) >= net[64].end  # no step before the norm is known
    for first, push in zip(broadcasts[::4], pushes, strict=True):
        assert first.start >= push.end - 1e-15  # nothing is sent before it is there
    forwards = [task for task in schedule.line.tasks if task.name == "forward"]
    second = next(task for task in forwards if task.start >= end)
    assert second.start >= broadcasts[0].end
    assert second.start < broadcasts[-1].end


@pytest.mark.parametrize("bad", [{"ranks": 0, "rate": 1e9}, {"ranks": 2, "rate": 0.0}])
def test_what_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Give"):
        Network(**bad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_benchmark_prints_every_number_of_ranks(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    command = [sys.executable, "benchmarks/scaling.py", "--models", "458M", "--json", str(out)]
    settings = {"check": True, "capture_output": True, "text": True, "timeout": 180}
    printed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, **settings).stdout
    assert len(printed.splitlines()) == 2 + 2 * 8
    rows = json.loads(out.read_text())["rows"]
    assert [row["ranks"] for row in rows[:8]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert rows[0]["efficiency"] == 1
