"""The thread pool: results, exceptions, forks and exits; and the count of cores, on made-up machines."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_cpu_offload.kernels import threads
from lightning_cpu_offload.kernels.threads import ThreadPool, physical_cores

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and affinity masks")


def run_python(code: str) -> str:
    """Run `code`, with `ThreadPool` at hand, in a fresh Python that must end within a minute."""
    setup = f"import sys; sys.path.insert(0, {str(ROOT / 'lightning_cpu_offload' / 'kernels')!r})\n"
    code = setup + "import os, time\nfrom threads import ThreadPool, physical_cores\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_items", [0, 1, 2, 100])
def test_map_returns_every_result_in_order(num_threads: int, num_items: int) -> None:
    pool = ThreadPool(num_threads)
    assert pool.map(lambda x: x * x, range(num_items)) == [x * x for x in range(num_items)]


def test_map_runs_on_that_many_threads_at_once() -> None:
    barrier = threading.Barrier(3, timeout=30)

    def meet(_: int) -> int:
        barrier.wait()
        return threading.get_ident()

    names = ThreadPool(3).map(meet, range(3))
    assert len(set(names)) == 3
    assert threading.get_ident() in names


def test_two_at_once_cannot_meet_three() -> None:
    barrier = threading.Barrier(3, timeout=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        ThreadPool(2).map(lambda _: barrier.wait(), range(3))


def test_one_thread_less_works_while_one_is_left_to_somebody_else() -> None:
    pool, leaves = ThreadPool(3), [False]
    pool.leaves_one = lambda: leaves[0]
    for leaves[0], working in ((False, 3), (True, 2), (False, 3)):
        barrier = threading.Barrier(working, timeout=30)

        def meet(_: int, barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            return threading.get_ident()

        # As many threads as there should be meet in pairs or threes; one more would find nobody.
        assert len(set(pool.map(meet, range(2 * working)))) == working


def test_the_only_thread_works_whatever_is_left_to_others() -> None:
    pool = ThreadPool(1)
    pool.leaves_one = lambda: True
    assert pool.map(abs, [-1, -2]) == [1, 2]


def test_one_item_stays_on_the_calling_thread_and_starts_no_other() -> None:
    before = set(threading.enumerate())
    pool = ThreadPool(4)
    assert pool.map(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]
    assert not set(threading.enumerate()) - before


def test_threads_are_kept_between_calls_and_end_with_shutdown() -> None:
    before = set(threading.enumerate())  # those of other tests may end at any moment
    pool = ThreadPool(2)
    for _ in range(20):
        barrier = threading.Barrier(2, timeout=30)
        pool.map(lambda _, barrier=barrier: barrier.wait(), range(2))
        assert len(set(threading.enumerate()) - before) == 1
    pool.shutdown()
    assert not set(threading.enumerate()) - before
    assert pool.map(abs, [-1, -2]) == [1, 2]
    pool.shutdown()
    pool.shutdown()


def test_a_slow_thread_does_not_hold_up_the_others() -> None:
    rest_done = threading.Semaphore(0)

    def slow_at_first(item: int) -> int:
        if item == 0:
            assert all(rest_done.acquire(timeout=30) for _ in range(99))
        else:
            rest_done.release()
        return item

    assert ThreadPool(2).map(slow_at_first, range(100)) == list(range(100))


class Item:
    def __init__(self, index: int) -> None:
        self.index = index


@pytest.mark.parametrize("on_calling_thread", [True, False])
def test_exception_is_raised_after_every_thread_has_stopped(on_calling_thread: bool) -> None:
    caller, both_begun, rest_dropped = threading.get_ident(), threading.Barrier(2, timeout=30), threading.Event()
    begun, ended = [], []

    def items() -> Iterator[Item]:
        yield Item(0)
        yield Item(1)
        last = Item(2)
        weakref.finalize(last, rest_dropped.set)
        yield last

    def fail_on_one_thread(item: Item) -> None:
        begun.append(item.index)
        both_begun.wait()
        if (threading.get_ident() == caller) == on_calling_thread:
            raise KeyError(item.index)
        assert rest_dropped.wait(timeout=30)
        ended.append(item.index)

    with pytest.raises(KeyError):
        ThreadPool(2).map(fail_on_one_thread, items())
    assert sorted(begun) == [0, 1]
    assert len(ended) == 1


def test_calls_may_be_nested_and_made_from_several_threads() -> None:
    pool = ThreadPool(2)

    def total(n: int) -> int:
        return sum(pool.map(lambda x: x + n, range(10)))

    expected = [45 + 10 * n for n in range(20)]
    results: dict[int, list[int]] = {}
    callers = [threading.Thread(target=lambda i=i: results.update({i: pool.map(total, range(20))})) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
    assert results == dict.fromkeys(range(3), expected)


@pytest.mark.parametrize("num_threads", [0, -1])
def test_less_than_one_thread_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads}: must be 1 or more"):
        ThreadPool(num_threads)


def test_default_is_every_physical_core() -> None:
    assert ThreadPool().num_threads == physical_cores() >= 1


MEET = """
import threading
def meet(pool):
    barrier = threading.Barrier(2, timeout=30)
    return len(set(pool.map(lambda _: (barrier.wait(), threading.get_ident())[1], range(2))))
pool = ThreadPool(2)
"""


@LINUX
def test_forked_child_starts_its_own_threads() -> None:
    code = """
assert meet(pool) == 2
child = os.fork()
if child == 0:
    ok = meet(pool) == 2
    pool.shutdown()
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), meet(pool))
"""
    assert run_python(MEET + code) == "0 2"


@LINUX
def test_forked_child_can_shut_down_or_exit_without_using_the_pool() -> None:
    code = """
assert meet(pool) == 2
child = os.fork()
if child == 0:
    pool.shutdown()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(MEET + code) == "7"


def test_python_exits_with_threads_still_there() -> None:
    assert run_python(MEET + "print(meet(pool))") == "2"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("mask", "cores"),
    [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1)],
)
def test_hardware_threads_of_one_core_count_once(tmp_path: Path, mask: set[int], cores: int) -> None:
    for cpu in range(4):
        write(tmp_path / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    assert threads._cores_of(mask, tmp_path) == cores


def test_without_a_topology_every_processor_counts(tmp_path: Path) -> None:
    assert threads._cores_of({0, 1, 2}, tmp_path) == 3


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({}, math.inf),
        ({"a/b": "max 100000"}, math.inf),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a/b": "max 100000", "a": "200000 100000", "": "300000 100000"}, 2.0),
        ({"c": "100000 100000"}, math.inf),
    ],
)
def test_quota_is_the_least_of_the_groups_above(tmp_path: Path, limits: dict[str, str], quota: float) -> None:
    write(tmp_path / "membership", "1:name=systemd:/other\n0::/a/b\n")
    for group, limit in limits.items():
        write(tmp_path / "mount" / group / "cpu.max", limit + "\n")
    assert threads._quota(tmp_path / "membership", tmp_path / "mount") == quota


def test_no_quota_where_there_are_no_groups(tmp_path: Path) -> None:
    assert threads._quota(tmp_path / "missing", tmp_path) == math.inf


@LINUX
@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (2.0, 2), (math.inf, 8)])
def test_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    monkeypatch.setattr(threads, "_cores_of", lambda cpus: 8)
    monkeypatch.setattr(threads, "_quota", lambda: quota)
    assert physical_cores() == cores


@pytest.mark.parametrize("physical", [6, None])
def test_other_systems_ask_psutil_and_then_python(monkeypatch: pytest.MonkeyPatch, physical: int | None) -> None:
    psutil = types.SimpleNamespace(cpu_count=lambda logical: None if logical else physical)
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    assert threads._cores_of_machine() == (physical or os.cpu_count())


def test_psutil_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert threads._cores_of_machine() == os.cpu_count()


@LINUX
def test_affinity_mask_is_respected_and_omp_num_threads_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(physical_cores())"
    assert run_python(code) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", str(physical_cores() + 1))
    assert run_python("print(physical_cores())") == str(physical_cores())
