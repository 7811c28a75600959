"""Threads that work while Python waits: a small pool and the number of cores worth using.

The compiled kernels release Python's lock, so plain threads share one array without copies, and a launcher's
`OMP_NUM_THREADS=1` does not slow them down.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

__all__ = ["ThreadPool", "physical_cores"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class ThreadPool:
    """Runs a function over items on `num_threads` threads, the calling one among them.

    Threads start with the first call that needs them and stay. A forked child starts its own.

    Args:
        num_threads: At least 1; None means `physical_cores()`.

    Attributes:
        num_threads: How many.
        leaves_one: Asked at each call: whether a thread outside needs a core meanwhile, so that one works less.

    Raises:
        ValueError: If `num_threads` is less than 1.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads!r}: must be 1 or more. Pass None to use every physical core.")
        self.num_threads = physical_cores() if num_threads is None else num_threads
        self.leaves_one: Callable[[], bool] = bool  # False
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def map(self, fn: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return `[fn(item) for item in items]`, computed by as many threads as there are items for.

        Each thread takes the next item when it is done with one, so a slow core takes fewer. The calling
        thread works too and does not wait for threads that have not begun, so calls may be nested. After an
        exception no further item is begun, and it is raised here once every thread has stopped.
        """
        pending = deque(enumerate(items))
        num_items = len(pending)
        results: dict[int, Result] = {}

        def work() -> None:
            while pending:
                try:
                    index, item = pending.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    results[index] = fn(item)
                except BaseException:
                    pending.clear()
                    raise

        num_threads = max(1, self.num_threads - self.leaves_one())
        helpers = [self._threads().submit(work) for _ in range(min(num_threads, num_items) - 1)]
        try:
            work()
        finally:
            # Also on an exception: the caller may free or reuse what the other threads still work on.
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()
        return [results[index] for index in range(num_items)]

    def shutdown(self) -> None:
        """End the threads, after the work they have. A later call starts new ones."""
        if self._executor is not None and self._pid == os.getpid():
            self._executor.shutdown()
        self._executor = None

    def _threads(self) -> ThreadPoolExecutor:
        executor = self._executor
        if executor is None or self._pid != os.getpid():  # a forked child has the object but not its threads
            executor = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="cpu_offload")
            self._executor, self._pid = executor, os.getpid()
        return executor


def physical_cores() -> int:
    """Return how many physical cores this process may use: at least 1.

    Two hardware threads of one core share its path to memory, which is what the host step is bound by, so they
    count once. The affinity mask and the quota of a container (cgroup version 2) are respected;
    `OMP_NUM_THREADS` is not looked at.
    """
    if sys.platform == "linux":
        cores = _cores_of(os.sched_getaffinity(0))
    else:
        cores = _cores_of_machine()
    return max(1, int(min(cores, _quota())))


def _cores_of(cpus: Iterable[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    cpus = set(cpus)
    try:
        return len({(sysfs / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus})
    except OSError:  # some sandboxes do not show the topology
        return len(cpus)


def _cores_of_machine() -> int:
    try:
        import psutil
    except ImportError:
        return os.cpu_count() or 1
    return int(psutil.cpu_count(logical=False) or os.cpu_count() or 1)


def _quota(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the processors that the process's cgroup and those above it grant; infinity without a limit."""
    try:
        entries = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for group in (entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")):
        for folder in (mount / group, *(mount / group).parents):
            try:
                granted, period = (folder / "cpu.max").read_text().split()
            except OSError:
                continue
            if granted != "max":
                quota = min(quota, int(granted) / int(period))
    return quota
