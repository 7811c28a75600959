"""An engine that runs copies and host work as late, or in as odd an order, as the waits allow.

Device memory is ordinary CPU memory, and there is one thread. What is queued runs only when something waits for it,
with a seed also at random moments, or at once. The destination of a queued write turns into NaN as soon as nothing
ordered before the write still needs the old values: whoever reads or writes there without having waited gets nonsense.
Sources that change, or are freed, before their copy runs are named; with an `Order`, so is every unordered access.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_cpu_offload.offload import gate
from lightning_cpu_offload.offload.gradients import HostGradient
from lightning_cpu_offload.offload.transfer import Engine, Lane, _end_to_end
from lightning_cpu_offload.offload.worker import Task
from tests.order import Agent, Clock, Order, Span, call_site, overlap, span_of

Schedule = int | Literal["lazy", "eager"]
"""When what is queued runs: as late as possible, at once, or at random moments of this seed."""

RANDOM_RUN = 0.15  # chance per call that some queued work runs early; with more, it runs so soon that races hide

_QUIET = (__file__, gate.__file__)

Method = TypeVar("Method", bound=Callable[..., Any])


def _unseen(method: Method) -> Method:
    """What the engine does to tensors is not for the modes of the training thread."""

    @wraps(method)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return unseen  # type: ignore[return-value]


@dataclass(eq=False)
class Work:
    """One entry of a lane: what must run before it, and what memory it touches.

    Attributes:
        function: What it does.
        after: What must run before.
        reads: What it reads; aliases that only the engine holds, if it is a copy.
        writes: What it writes.
        what: Its call site.
        checksums: Of each tensor that it reads, as it was when the copy was queued; None: not known by then.
    """

    function: Callable[[], object]
    after: list[Work]
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    what: str = ""
    checksums: Sequence[int | None] = ()
    done: bool = False

    def __post_init__(self) -> None:
        self.read_spans = [span_of(tensor) for tensor in self.reads]
        self.write_spans = [span_of(tensor) for tensor in self.writes]


@dataclass(eq=False)
class Event:
    """What was last on the lane at the last record; nothing before the first one.

    Attributes:
        work: The last entry of the lane.
        records: Who recorded, when by its own clock, and what came before.
    """

    work: Work | None = None
    records: list[tuple[Agent, int, Clock]] = field(default_factory=list)


class DeferredEngine(Engine):
    """Lanes that run when they must.

    Args:
        schedule: When queued work runs.
        prompt: Run what the compute lane is made to wait for at once: the code of a Trainer follows in line.
        order: Told of all accesses, if given; those of torch code in line only within `compute`.

    Attributes:
        findings: Sources that changed or were freed before their copy ran.
        num_early: How much of the host work ran before the training thread waited for it.
    """

    overlaps = True

    def __init__(self, schedule: Schedule = "lazy", *, prompt: bool = False, order: Order | None = None) -> None:
        self.device = torch.device("cpu")
        self.order = order
        self.findings: list[str] = []
        self.num_early = 0
        self._eager = schedule == "eager"
        self._random = random.Random(schedule) if isinstance(schedule, int) else None
        self._prompt = prompt
        self._tails: dict[Lane, Work | None] = {"compute": None, "d2h": None, "h2d": None}
        self._pending: list[Work] = []  # in the order of the calls
        self._poisons: list[tuple[Tensor, list[Work]]] = []
        self._tasks: list[tuple[Task, Clock]] = []
        self._ends: WeakKeyDictionary[Task, Clock] = WeakKeyDictionary()
        self._agent: Literal["thread", "host"] = "thread"
        self._busy = False

    @property
    def races(self) -> list[str]:
        """All that went wrong, whatever the numbers say."""
        return [*self.findings, *(self.order.conflicts if self.order is not None else ())]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._pending and not self._tasks

    @override
    def event(self) -> Event:
        return Event()

    @override
    @_unseen
    def record(self, event: Event, lane: Lane) -> None:
        event.work = self._tails[lane]
        if self.order is not None:
            time = self.order.tick(self._agent)
            self.order.join(lane, self.order.now(self._agent))
            event.records.append((self._agent, time, self.order.now(lane)))
        self._run_some()

    @override
    @_unseen
    def wait(self, lane: Lane, event: Event) -> None:
        # For what is recorded by now: a later record of the same event does not move the wait.
        if event.work is not None:
            self._queue(lane, Work(_nothing, [event.work]))
        if self.order is not None:
            self.order.join(lane, self._recorded(event))
        if lane == "compute" and self._prompt:
            self.run_compute()
        self._run_some()

    @override
    @_unseen
    def host_wait(self, event: Event) -> None:
        if event.work is not None:
            self._run(event.work)
        if self.order is not None:
            self.order.join(self._agent, self._recorded(event))
        self._run_some()

    @override
    @_unseen
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        self._transfer(lane, dst, [src])

    @override
    @_unseen
    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        self._transfer(lane, dst, sources)

    @override
    @_unseen
    def launch(
        self, lane: Lane, function: Callable[[], object], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Queue any work; what is both in `reads` and in `writes` is changed in place, and needs its old values."""
        self._launch(lane, Work(function, [], reads, writes, call_site(_QUIET)))

    @override
    @_unseen
    def submit(self, tasks: Sequence[Task]) -> None:
        queued = [task for task, _ in self._tasks]
        clock = self.order.now(self._agent) if self.order is not None else {}
        self._tasks += [(task, clock) for task in tasks if task not in queued and task not in self._ends]
        self._run_some()

    @override
    @_unseen
    def finish(self, task: Task) -> None:
        while task not in self._ends:
            assert self._tasks, "waits for a task that was never submitted"
            self._run_task()
        if self.order is not None:
            self.order.join(self._agent, self._ends[task])
        self._run_some()

    @override
    @_unseen
    def synchronize(self) -> None:
        for work in list(self._pending):
            self._run(work)
        if self.order is not None:
            for lane in self._tails:
                self.order.join(self._agent, self.order.now(lane))

    @override
    @_unseen
    def shutdown(self) -> None:
        while self._tasks:
            self._run_task()
        self.synchronize()

    @_unseen
    def saw_end_of(self, task: Task) -> None:
        """The training thread has seen what a task, if it has run, left behind: what it does next comes after that."""
        if self.order is not None and task in self._ends:
            self.order.join(self._agent, self._ends[task])

    def run_compute(self) -> None:
        """Run the compute lane to its end, and of the other lanes only what it was made to wait for."""
        if self._tails["compute"] is not None:
            self._run(self._tails["compute"])

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Tell the order of all torch operations in here, by whichever thread they are called."""
        with _Recorder(self):
            yield

    def observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch operation of one of the threads, and note what it touches."""
        if self._busy or self.order is None:
            return func(*args, **kwargs)
        self._run_some()
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # of a tensor made from Python numbers, its only trace
            self.order.allocated(span_of(result))
        elif not (_may_be_view(func) and _share_storage(result, args)):
            self._note_operation(func, args, kwargs, result)
        return result

    @_unseen
    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        assert self.order is not None
        reads, writes = _operands(func, args, kwargs)
        new = [span_of(tensor) for tensor in _tensors(result) if not any(tensor is write for write in writes)]
        for span in new:
            self.order.allocated(span)
        spans = [span_of(tensor) for tensor in writes] + new
        name = f"{call_site(_QUIET)} ({func})"
        waits = func is torch.ops.aten._local_scalar_dense.default
        self.order.operation(self._agent, [span_of(tensor) for tensor in reads], spans, name, waits)

    def _transfer(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        with self._aside():
            held = [source.detach() for source in sources]  # if nobody else holds the memory, it has been freed

        def copy() -> None:
            dst.copy_(held[0].view(-1) if len(held) == 1 else _end_to_end(held))

        if self.order is not None:
            host, device = ([dst], sources) if lane == "d2h" else (sources, [dst])
            self.order.transfer([span_of(tensor) for tensor in host], [span_of(tensor) for tensor in device])
        work = Work(copy, [], held, [dst], call_site(_QUIET))
        self._launch(lane, work, checked=True)

    def _launch(self, lane: Lane, work: Work, checked: bool = False) -> None:
        if self.order is not None:
            self.order.join(lane, self.order.now(self._agent))
            self.order.touch(lane, work.read_spans, work.write_spans, work.what)
        self._queue(lane, work)
        earlier = _unfinished(work) - {work}
        if checked:
            pairs = zip(work.reads, work.read_spans, strict=True)
            work.checksums = [None if _any_writes(earlier, span) else self._checksum(source) for source, span in pairs]
        for target, span in zip(work.writes, work.write_spans, strict=True):
            if not checked and any(overlap(span, read) for read in work.read_spans):
                continue
            self._poisons.append((target, [other for other in earlier if _touches(other, span)]))
        self._spoil()
        self._run_some()

    def _recorded(self, event: Event) -> Clock:
        """What is known to come before: by the last record that is ordered before this moment, not by a lucky one."""
        assert self.order is not None
        now = self.order.now(self._agent)
        ordered = [place for place, (agent, time, _) in enumerate(event.records) if time <= now.get(agent, 0)]
        if not ordered:
            return {}
        del event.records[: ordered[-1]]
        return event.records[0][2]

    def _queue(self, lane: Lane, work: Work) -> None:
        before = [*work.after, self._tails[lane]]
        work.after = [other for other in before if other is not None and not other.done]
        self._tails[lane] = work
        self._pending.append(work)

    def _run(self, last: Work) -> None:
        needed = _unfinished(last)
        with self._aside():
            for work in [work for work in self._pending if work in needed]:
                self._check_sources(work)
                work.function()
                work.done, work.reads, work.writes, work.function = True, (), (), _nothing
                work.after.clear()
                self._pending.remove(work)
                self._spoil()

    def _run_task(self) -> None:
        task, clock = self._tasks.pop(0)
        if self.order is not None:
            self.order.join("host", clock)
        self._agent = "host"
        try:
            with _thread_of_its_own():
                task.run()
        finally:
            self._agent = "thread"
        self._ends[task] = self.order.now("host") if self.order is not None else {}

    def _run_some(self) -> None:
        if self._busy:
            return
        while self._pending or (self._tasks and self._agent == "thread"):
            if not self._eager and (self._random is None or self._random.random() >= RANDOM_RUN):
                return
            self._run_one()

    def _run_one(self) -> None:
        choices: list[Work | None] = [*self._pending]
        if self._tasks and self._agent == "thread":
            choices.append(None)
        choice = choices[0] if self._random is None else self._random.choice(choices)
        if choice is None:
            self.num_early += 1
            self._run_task()
        else:
            self._run(choice)

    def _check_sources(self, work: Work) -> None:
        for source, checksum in zip(work.reads, work.checksums, strict=False):
            if checksum is not None and checksum != self._checksum(source):
                self.findings.append(f"the source of the copy at {work.what} changed before it ran")
            if self._is_freed(source):
                self.findings.append(f"the source of the copy at {work.what} was freed before it ran")

    def _is_freed(self, source: Tensor) -> bool:
        storage = source.untyped_storage()
        ours = sum(
            read.untyped_storage()._cdata == storage._cdata
            for work in self._pending
            if work.checksums
            for read in work.reads
        )
        return torch._C._storage_Use_Count(storage._cdata) <= ours + 1  # and `storage` itself

    def _checksum(self, tensor: Tensor) -> int:
        with self._aside():
            return hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def _spoil(self) -> None:
        ready = [target for target, earlier in self._poisons if all(work.done for work in earlier)]
        self._poisons = [item for item in self._poisons if not all(work.done for work in item[1])]
        if ready:
            with self._aside():
                for target in ready:
                    target.detach().view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating-point dtype

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The device is at work: nobody's modes apply, and nothing else runs."""
        if self._busy:
            yield
            return
        self._busy = True
        try:
            with _thread_of_its_own(), torch._C._DisableTorchDispatch():
                yield
        finally:
            self._busy = False


@contextmanager
def _thread_of_its_own() -> Iterator[None]:
    """None of the training thread's modes and contexts, as on another thread; and no autograd."""
    no_autocast = torch.autocast("cpu", enabled=False)
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), no_autocast:
        yield


class _Recorder(TorchDispatchMode):
    """Shows an engine every torch operation."""

    def __init__(self, engine: DeferredEngine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if HostGradient in types:
            return NotImplemented  # it does what it does by operations that come here
        return self._engine.observe(func, args, kwargs or {})


@cache
def _aliases(func: Any) -> tuple[list[bool], dict[str, bool], bool]:
    """Which arguments are written to, by place and by name; and whether the result may be a view."""
    schema = func._schema
    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return list(written.values()), written, view


def _may_be_view(func: Any) -> bool:
    return _aliases(func)[2]


def _share_storage(result: Any, args: Any) -> bool:
    """Whether a result is a view in fact: `to` and `reshape` may have copied."""
    operands = list(_tensors(args))
    return all(any(torch._C._is_alias_of(tensor, operand) for operand in operands) for tensor in _tensors(result))


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What a torch operation reads and what it writes."""
    by_place, by_name, _ = _aliases(func)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for value, is_written in [*zip(args, by_place, strict=False), *((v, by_name[k]) for k, v in kwargs.items())]:
        if isinstance(value, (Tensor, list, tuple)):
            (writes if is_written else reads).extend(_tensors(value))
    return reads, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _nothing() -> None:
    pass


def _unfinished(last: Work) -> set[Work]:
    """`last` and all that must run before it, as far as it has not run; it was queued before it, too."""
    found: set[Work] = set()
    stack = [last]
    while stack:
        work = stack.pop()
        if not work.done and work not in found:
            found.add(work)
            stack.extend(work.after)
    return found


def _touches(work: Work, other: Span) -> bool:
    return any(overlap(span, other) for span in (*work.read_spans, *work.write_spans))


def _any_writes(works: Iterable[Work], span: Span) -> bool:
    return any(overlap(written, span) for work in works for written in work.write_spans)
