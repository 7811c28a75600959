"""The course of memory and operations of whatever runs inside it, from the tensors that operations return.

Under FakeTensorMode nothing is allocated and nothing computed, so a model of any size is followed in seconds. What
an operation allocates and frees within itself does not show; that is under 3 % of the peak.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_cpu_offload.estimate.fakes import WorstCase

WEIGHTS, GRADIENTS, ACTIVATIONS, LOGITS = "weights", "gradients", "activations", "logits"
TEMPORARY, IN_FLIGHT, STATE, BATCH = "temporary", "in flight", "optimizer state", "batch"
SCRATCH = "scratch"

_DEVICE = torch.ops.prim.device.default

_LOG_SOFTMAX = (torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default)


class Made(NamedTuple):
    """A block of memory came to be: its number, its bytes as the allocator rounds them, and what it is for."""

    block: int
    nbytes: int
    category: str
    place: tuple[str, Any, str]


class Freed(NamedTuple):
    """Nobody holds the block any more."""

    block: int


class Renamed(NamedTuple):
    """The block turns out to be for something else."""

    block: int
    category: str


class Left(NamedTuple):
    """The micro-batch before has left a gradient of so many bytes, where it stays for the window."""

    parameter: int
    nbytes: int


class Gradient(NamedTuple):
    """Backward has completed the gradient of a parameter; who replays the course says what becomes of its block."""

    parameter: int
    block: int


Change = Made | Freed | Renamed | Left | Gradient


class Tracker(WorstCase):
    """Follows every storage from the operation that returns it until it is freed.

    Args:
        round_to: Bytes to which an allocator rounds a block; 512 for CUDA's.

    Attributes:
        phase: Set by the caller: `"forward"` or `"backward"`.
        events: What happened, in order.
        forward_flops: Operations of forwards by parameter name; those that belong to none count for the one before.
        backward_flops: Operations of backwards in total.
        recomputed_flops: Of them, those of forwards that are computed again.
    """

    def __init__(self, round_to: int = 512) -> None:
        super().__init__()
        self.phase = "forward"
        self.events: list[Change] = []
        self.forward_flops: Counter[str] = Counter()
        self.backward_flops = 0
        self.recomputed_flops = 0
        self._round_to = round_to
        self._blocks: dict[int, _Block] = {}
        self._made = 0
        self._names: dict[int, str] = {}
        self._near = ""
        self._operation: Any = ""

    def name(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Follow weights, by their names."""
        for name, parameter in parameters:
            self._names[_key(parameter)] = name
            self.label(parameter, WEIGHTS)

    def label(self, tensor: Tensor, category: str) -> None:
        """Count a tensor's memory under `category` from now on."""
        block = self._blocks.get(_key(tensor))
        if block is None:
            self._follow(tensor, category)
        else:
            self.events.append(Renamed(block.number, category))

    def left(self, parameter: int, tensor: Tensor) -> None:
        """Note that there is a gradient of this size from the micro-batch before."""
        self.events.append(Left(parameter, self._rounded(tensor)))

    def gradient(self, parameter: int, tensor: Tensor) -> None:
        """Note that backward has completed a gradient."""
        if block := self._blocks.get(_key(tensor)):
            self.events.append(Gradient(parameter, block.number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and follow what it returns."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked more often than anything is computed
            return args[0].fake_device
        out = self.answer(func, args, kwargs or {})
        self._operation = func
        formula = _flop_formula(func._overloadpacket)
        if formula is not None:
            self._count_flops(formula, args, kwargs or {}, out)
        category = self._category()
        if func in _LOG_SOFTMAX:
            category = LOGITS
            self.label(args[0], LOGITS)
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor) and _key(leaf) not in self._blocks:
                self._follow(leaf, category)
        return out

    def _again(self) -> bool:
        # Backward computes without building a graph, but for activations that are computed again.
        return self.phase == "backward" and torch.is_grad_enabled()

    def _category(self) -> str:
        return ACTIVATIONS if self.phase == "forward" or self._again() else TEMPORARY

    def _rounded(self, tensor: Tensor) -> int:
        return -(-tensor.untyped_storage().nbytes() // self._round_to) * self._round_to

    def _follow(self, tensor: Tensor, category: str) -> None:
        nbytes = self._rounded(tensor)
        if not nbytes:
            return
        key = _key(tensor)
        self._blocks[key] = _Block(self._made, weakref.ref(tensor.untyped_storage(), lambda _: self._freed(key)))
        self.events.append(Made(self._made, nbytes, category, (self.phase, self._operation, self._near)))
        self._made += 1

    def _freed(self, key: int) -> None:
        self.events.append(Freed(self._blocks.pop(key).number))

    def _count_flops(self, formula: Any, args: Any, kwargs: Any, out: Any) -> None:
        flops = formula(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._near = self._names.get(_key(tensor), self._near)
        if self.phase == "forward":
            self.forward_flops[self._near] += flops
            return
        self.backward_flops += flops
        if self._again():
            self.recomputed_flops += flops


class _Block(NamedTuple):
    """A piece of memory that is in use."""

    number: int
    storage: Any


@cache
def _flop_formula(packet: Any) -> Any:
    """How to count an operation: what is done in place, or by the CPU's own kernel, counts like the usual one."""
    name = packet.__name__.replace("_for_cpu", "").removesuffix("_")
    return flop_registry.get(packet) or flop_registry.get(getattr(torch.ops.aten, name, packet))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
