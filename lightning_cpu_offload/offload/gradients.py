"""Gradients that live on the host: each leaves the device as soon as autograd has it, and is summed up in FP32.

Where the gradient was, a `HostGradient` stands: autograd adds to it as to any gradient, `zero_grad` of any kind clears
it, and whoever reads it gets the sum back from the host. It holds no memory on the device.

    backward     |..g3|..g2|..g1|            compute
                      |g3|  |g2|  |g1|       d2h, through a small ring: backward waits when it is full
                         |+g3|  |+g2|  |+g1| host
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.clip import Clip
from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.memory import HostMemory, allocate_ring
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.sums import Sums
from lightning_cpu_offload.offload.transfer import Engine
from lightning_cpu_offload.offload.worker import Task

RING_DEPTH = 4


View = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A view operation, and its arguments but the first."""


class HostGradient(Tensor):
    """Stands for a gradient whose elements are on the host, or for a view of one.

    Attributes:
        home: Where they are.
        views: By which this view is made of the whole.
    """

    home: _Home
    views: tuple[View, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(home: _Home, views: tuple[View, ...] = ()) -> HostGradient:
        """One that stands for the gradient of `home`, in the shape and place of its parameter."""
        parameter = home.region.masters[home.index].tensor
        shape = _view(torch.empty_strided(parameter.shape, parameter.stride(), device="meta"), views)
        gradient = Tensor._make_wrapper_subclass(
            HostGradient, shape.shape, strides=shape.stride(), dtype=home.dtype, device=parameter.device
        )
        gradient.home, gradient.views = home, views
        return gradient

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Add and clear on the host; anything else is done on the device, with the elements brought back."""
        first, others, kwargs = args[0], args[1:], kwargs or {}
        if isinstance(first, HostGradient):
            if func is torch.ops.aten.add_.Tensor and not first.views and _is_gradient(first, others, kwargs):
                first.home.add(others[0])
                return first
            if func is torch.ops.aten.zero_.default and not first.views:
                first.home.clear()
                return first
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return cls.of(first.home, first.views)
            if _is_view(func):
                return cls.of(first.home, (*first.views, (func, others, kwargs)))
        if func._schema.is_mutable:
            return _in_place(func, args, kwargs)
        return func(*tree_map_only(HostGradient, HostGradient.read, args), **_read_all(kwargs))

    def read(self) -> Tensor:
        """The sum, rounded to the parameter's dtype, on its device."""
        return _view(self.home.read_back(self.dtype, self.device), self.views)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HostGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that writes: on the whole gradients on the device, which then replace those on the host."""
    written = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, HostGradient)]
    whole = {id(gradient): gradient.home.read_back(gradient.dtype, gradient.device) for gradient in written}

    def on_device(gradient: HostGradient) -> Tensor:
        return _view(whole[id(gradient)], gradient.views) if id(gradient) in whole else gradient.read()

    result = func(*tree_map_only(HostGradient, on_device, args), **_read_all(kwargs))
    for gradient in written:
        gradient.home.replace(whole[id(gradient)])
    return args[0] if isinstance(result, Tensor) and isinstance(args[0], HostGradient) else result


def _read_all(kwargs: Any) -> Any:
    return tree_map_only(HostGradient, HostGradient.read, kwargs)


def _view(whole: Tensor, views: Sequence[View]) -> Tensor:
    for func, args, kwargs in views:
        whole = func(whole, *args, **kwargs)
    return whole


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return (
        len(returns) == 1
        and str(returns[0].type) == "Tensor"
        and returns[0].alias_info is not None
        and (not func._schema.is_mutable)
    )


def _is_gradient(first: HostGradient, others: Any, kwargs: Any) -> bool:
    """Whether a whole gradient is added, as autograd does it."""
    other = others[0]
    return not kwargs and isinstance(other, Tensor) and type(other) is not HostGradient and other.shape == first.shape


@dataclass(eq=False)
class _Home:
    """The sum of one parameter's gradients.

    Attributes:
        stream: By which gradients come.
        region: Whose parameter it is.
        index: Which of its parameters.
        sums: The region's.
        dtype: Of the gradient as autograd makes it.
        squares: The sum of squares of each piece as it is now, by its first element.
        clip: What was done to the gradient in a step, and has to be done to the sum before anybody sees it.
        fresh: What comes next begins a new sum.
        alone: The last sum that began is of one gradient, and only a step has read it: the next one may be, too.
    """

    stream: GradientStream
    region: Region
    index: int
    sums: Sums
    dtype: torch.dtype
    squares: dict[int, float] = field(default_factory=dict)
    clip: Clip | None = None
    fresh: bool = True
    alone: bool = False

    def sum(self) -> Tensor:
        """Where the elements are, FP32, in the parameter's shape."""
        assert self.region.gradients is not None
        self.alone = False
        self.sums.total(self.region.offsets[self.index], self.region.offsets[self.index + 1])
        return self.region.view(self.region.gradients, self.index)

    def settle_clip(self) -> None:
        """Clip the sum as its step did."""
        clip, self.clip = self.clip, None
        if clip is not None:
            clip.apply(self.sum())

    def add(self, gradient: Tensor) -> None:
        self.stream.send(self, gradient)

    def clear(self) -> None:
        self.fresh = True

    def replace(self, value: Tensor) -> None:
        self.fresh = True
        self.stream.send(self, value)

    def total(self) -> Tensor:
        """The sum itself, FP32; what is cleared is zero."""
        self.stream.finish()
        self.settle_clip()
        return self.sum().zero_() if self.fresh else self.sum()

    def read_back(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.stream.warn_reader(self.region.masters[self.index].name)
        return self.total().to(device, dtype, copy=True)


@dataclass(eq=False)
class _Slot:
    """One staging buffer, the arrival of what is in it, and the task that empties it."""

    buffer: Tensor
    fetched: Any
    task: Task | None = None


@dataclass(eq=False)
class _Parcel:
    """A part of a gradient on its way: elements `start` to `stop` of the region.

    Attributes:
        store: It begins a sum; else it is added to one.
        keep: It is likely to stay alone there.
    """

    home: _Home
    start: int
    stop: int
    values: Tensor | None
    store: bool
    keep: bool


class GradientStream:
    """Takes gradients of regions to the host while backward goes on.

    Args:
        engine: Lanes of the device.
        memory: Where the ring is counted.
        slot_bytes: Size of one staging buffer; as much waits on the device before it is sent.
        pin: Page-lock the ring: True, False or `"auto"`.
        threads: The pool for host work.

    Attributes:
        sums: Of each region.
        peak_bytes: The most bytes of gradients that were on the device at a time, because they had not left.
    """

    def __init__(
        self, engine: Engine, memory: HostMemory, slot_bytes: int, pin: bool | str, threads: ThreadPool
    ) -> None:
        self.sums: dict[Region, Sums] = {}
        self.peak_bytes = 0
        self._sent_bytes = self._left_bytes = 0  # each written by one thread only
        self._engine = engine
        self._threads = threads
        self._slot_bytes = slot_bytes
        buffers, _ = allocate_ring(memory, RING_DEPTH, slot_bytes, pin if engine.device.type != "cpu" else False)
        self._ring = [_Slot(buffer, engine.event()) for buffer in buffers]
        self._next = 0
        self._ready = engine.event()
        self._packed: list[_Parcel] = []
        self._packed_bytes = 0
        self._last: Task | None = None
        self._error: BaseException | None = None
        self._homes: dict[Tensor, _Home] = {}
        self._handles: list[Any] = []
        self._warned = False

    @property
    def cap_bytes(self) -> int:
        """Bytes of gradients that may wait on the device, besides the one that backward has just made."""
        return (RING_DEPTH + 1) * self._slot_bytes

    def attach(self, region: Region) -> None:
        """From now on the gradients of a region's parameters leave."""
        region.allocate_gradients()
        assert region.gradients is not None
        sums = self.sums[region] = Sums(region.gradients, self._threads)
        for index, master in enumerate(region.masters):
            self._homes[master.tensor] = _Home(self, region, index, sums, region.weights.dtype)
            if master.tensor.grad is not None:
                self.absorb(master.tensor)
            self._handles.append(master.on_gradient(self.absorb))

    def detach(self) -> None:
        """Gradients stay where they are made again; those on the host are dropped."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._homes:
            if isinstance(parameter.grad, HostGradient):
                parameter.grad = None

    def absorb(self, parameter: Tensor) -> None:
        """Send a gradient that was put or accumulated into `parameter.grad`, unless it is on the host already."""
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, HostGradient) or gradient.layout != torch.strided:
            return
        home = self._homes[parameter]
        home.fresh, home.dtype = True, gradient.dtype
        parameter.grad = None
        parameter.grad = HostGradient.of(home)
        self.send(home, gradient)

    @torch.no_grad()
    def send(self, home: _Home, gradient: Tensor) -> None:
        """Queue a gradient for the host: it is added to the sum of `home`, or begins a new one."""
        region, begin = home.region, home.region.offsets[home.index]
        flat = _flat(gradient.detach(), region.strides[home.index])
        store, home.fresh = home.fresh, False
        keep, home.alone = home.alone, store
        self._count(flat.nbytes)
        step = self._slot_bytes // flat.element_size()
        for offset in range(0, flat.numel(), step):
            values = flat[offset : offset + step]
            if self._packed_bytes + values.nbytes > self._slot_bytes or self._packs_other(values.dtype):
                self._flush()
            self._packed.append(_Parcel(home, begin + offset, begin + offset + values.numel(), values, store, keep))
            self._packed_bytes += values.nbytes

    def finish(self) -> None:
        """Wait until every gradient that was sent is in its sum.

        Raises:
            Exception: What failed on the host.
        """
        self._flush()
        if self._last is not None:
            self._engine.finish(self._last)
        if self._error is not None:
            raise self._error

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Send what is still here; host work that is queued from now on finds these parameters' sums complete."""
        for parameter in parameters:
            self.absorb(parameter)
            home = self._homes[parameter]
            if isinstance(parameter.grad, HostGradient) and home.fresh:
                home.total()  # cleared in place: zero, and not what was there before
                home.squares.clear()
                home.fresh = False
        self._flush()

    def measure_now(self, masters: Sequence[Master]) -> tuple[list[str], float]:
        """As `measure`, on the training thread: waits for these gradients first."""
        self.complete(master.tensor for master in masters)
        self.finish()
        return self.measure(masters)

    def measure(self, masters: Iterable[Master]) -> tuple[list[str], float]:
        """Names of those whose gradient is not finite, and the L2 norm of all together.

        To be called on the host thread, or after `finish`; costs nothing, as the squares came out of the summing.
        """
        squares = {master.name: math.fsum(self._homes[master.tensor].squares.values()) for master in masters}
        bad = [name for name, square in squares.items() if not math.isfinite(square)]
        return bad, math.sqrt(math.fsum(squares.values()))

    def clip(self, parameters: Iterable[Tensor], clip: Clip, *, later: bool = False) -> None:
        """Clip gradients; `later`: only before somebody looks at them or adds to them, as the step does it itself.

        Without `later` they are in the regions' arenas then, FP32.
        """
        for home in (self._homes[parameter] for parameter in parameters):
            home.clip = clip if clip.changes else None
            home.alone = home.alone and clip.max_value is None  # which the step clips in FP32
            if not later:
                home.settle_clip()
                home.sum()

    def warn_reader(self, name: str) -> None:
        """Say once that reading gradients costs transfers."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the gradient of {name!r} was read on the device, but gradients='host' keeps it on the host: each "
                "read copies it back. `trainer.strategy.gradient(parameter)` gives the FP32 gradient on the host; "
                "gradients='device' keeps gradients on the device.",
                stacklevel=2,
            )

    def _packs_other(self, dtype: torch.dtype) -> bool:
        values = self._packed[-1].values if self._packed else None
        return values is not None and values.dtype != dtype

    def _count(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._sent_bytes - self._left_bytes)

    def _flush(self) -> None:
        """Send what is packed, in one copy, as soon as a slot is free."""
        if not self._packed:
            return
        slot = self._ring[self._next % RING_DEPTH]
        self._next += 1
        if slot.task is not None:
            # Hazard: the gradients would overwrite staged ones that are not in their sums yet. This is where backward
            # waits when it is faster than the host.
            self._engine.finish(slot.task)
        parcels, self._packed, self._packed_bytes = self._packed, [], 0
        values = [parcel.values for parcel in parcels if parcel.values is not None]
        staged = slot.buffer[: sum(value.nbytes for value in values)].view(values[0].dtype)
        # Hazard: a gradient would leave before backward, still queued on the device, has written it.
        self._engine.record(self._ready, "compute")
        self._engine.wait("d2h", self._ready)
        self._engine.mark("d2h", "gradients")
        if len(values) == 1:
            self._engine.copy("d2h", staged, values[0])
        else:
            self._engine.gather("d2h", staged, values)
        self._engine.mark("d2h", None)
        self._engine.record(slot.fetched, "d2h")
        self._last = slot.task = Task(partial(self._guard, slot, parcels, staged))
        self._engine.submit([slot.task])

    def _guard(self, slot: _Slot, parcels: list[_Parcel], staged: Tensor) -> None:
        try:
            self._accumulate(slot, parcels, staged)
        except BaseException as error:
            self._error = error

    def _accumulate(self, slot: _Slot, parcels: list[_Parcel], staged: Tensor) -> None:
        # Hazard: the host would read the staged gradients before they have arrived.
        self._engine.host_wait(slot.fetched)
        self._engine.mark("host", "add")
        position = 0
        for parcel in parcels:
            size, parcel.values = parcel.stop - parcel.start, None  # has left: its memory is free
            part = staged[position : position + size]
            self._left_bytes += part.nbytes
            parcel.home.squares[parcel.start] = _sum_up(parcel, part)
            position += size
        self._engine.mark("host", None)


def _sum_up(parcel: _Parcel, gradient: Tensor) -> float:
    """Put what has arrived where it belongs; returns the sum of squares there."""
    home = parcel.home
    if parcel.store:
        home.clip = None
        return home.sums.begin(parcel.start, parcel.stop, gradient, parcel.keep)
    home.settle_clip()
    return home.sums.add(parcel.start, parcel.stop, gradient)


def _flat(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements in the order in which the parameter has them."""
    if gradient.stride() != stride:
        gradient = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    return gradient.as_strided((gradient.numel(),), (1,))
