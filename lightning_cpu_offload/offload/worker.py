"""The thread on which the host works: tasks one after the other, while the training thread goes on or waits.

A step runs here and not on the training thread, so that an interrupt (Ctrl-C, a signal handler that saves a
checkpoint) never finds it half done: the interrupted thread waits for the rest of the step before it looks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch


class Task:
    """Runs `function` once, however often it is queued; what it raises is its own business."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Run, if it has not run yet."""
        function, self._function = self._function, None
        if function is not None:
            try:
                function()
            finally:
                self._running.release()

    def wait(self) -> None:
        """Block until it has run."""
        with self._running:
            pass


class Worker:
    """A thread that runs tasks in the order in which they were submitted; it starts with the first."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Sequence[Task] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue tasks: all of them or, if an interrupt comes first, none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cpu_offload_host", daemon=True)
            self._thread.start()
        self._queue.put(tasks)

    def shutdown(self) -> None:
        """End the thread, after the work it has; a later task starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _work(self) -> None:
        with torch.no_grad():  # a thread begins with autograd on, whatever the training thread has
            for tasks in iter(self._queue.get, None):
                for task in tasks:
                    task.run()
