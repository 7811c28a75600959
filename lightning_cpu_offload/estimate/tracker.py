"""Peak memory and operations of whatever runs inside it, from the tensors that operations return.

Under FakeTensorMode nothing is allocated and nothing computed, so a model of any size is followed in seconds. What
an operation allocates and frees within itself does not show; that is under 3 % of the peak.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

WEIGHTS, GRADIENTS, ACTIVATIONS, LOGITS = "weights", "gradients", "activations", "logits"
TEMPORARY, IN_FLIGHT, STATE, BATCH = "temporary", "in flight", "optimizer state", "batch"

_LOG_SOFTMAX = (torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default)


class MemoryTracker(TorchDispatchMode):
    """Follows every storage from the operation that returns it until it is freed.

    Args:
        round_to: Bytes to which an allocator rounds a block; 512 for CUDA's.

    Attributes:
        phase: Set by the caller: `"forward"`, `"backward"` or `"step"`.
        current: Bytes by category now.
        peak: The most bytes at once.
        peak_by_category: What they were.
        peak_operation: When: the phase, the operation, and the parameter in whose neighbourhood it stood.
        trace: Every block's number and size, negative when freed.
        forward_flops: Operations of forwards by parameter name; those that belong to none count for the one before.
        backward_flops: Operations of backwards in total.
    """

    def __init__(self, round_to: int = 512) -> None:
        super().__init__()
        self.phase = "forward"
        self.current: Counter[str] = Counter()
        self.peak = 0
        self.peak_by_category: dict[str, int] = {}
        self.peak_operation = ""
        self.trace: list[tuple[int, int]] = []
        self.forward_flops: Counter[str] = Counter()
        self.backward_flops = 0
        self._round_to = round_to
        self._blocks: dict[int, _Block] = {}
        self._names: dict[int, str] = {}
        self._near = ""
        self._operation = ""

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
        elif block.category != category:
            self.current[block.category] -= block.nbytes
            block.category = category
            self._count(category, block.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and follow what it returns."""
        out = func(*args, **(kwargs or {}))
        self._operation = str(func)
        formula = _flop_formula(func._overloadpacket)
        if formula is not None:
            self._count_flops(formula, args, kwargs or {}, out)
        category = self._category()
        if func in _LOG_SOFTMAX:
            category = LOGITS
            self.label(args[0], LOGITS)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _key(leaf) not in self._blocks:
                self._follow(leaf, category)
        return out

    def _category(self) -> str:
        # Backward computes without building a graph, but for activations that are computed again.
        again = self.phase == "backward" and torch.is_grad_enabled()
        return ACTIVATIONS if self.phase == "forward" or again else TEMPORARY

    def _follow(self, tensor: Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        nbytes = -(-storage.nbytes() // self._round_to) * self._round_to
        if not nbytes:
            return
        key = _key(tensor)
        number = len(self.trace)
        self._blocks[key] = _Block(category, nbytes, number, weakref.ref(storage, lambda _: self._freed(key)))
        self.trace.append((number, nbytes))
        self._count(category, nbytes)

    def _count(self, category: str, nbytes: int) -> None:
        self.current[category] += nbytes
        total = sum(self.current.values())
        if total > self.peak:
            self.peak = total
            self.peak_by_category = {name: nbytes for name, nbytes in self.current.items() if nbytes}
            near = f" near {self._near}" if self._near else ""
            self.peak_operation = f"{self.phase}: {self._operation}{near}"

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.current[block.category] -= block.nbytes
        self.trace.append((block.number, -block.nbytes))

    def _count_flops(self, formula: Any, args: Any, kwargs: Any, out: Any) -> None:
        flops = formula(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._near = self._names.get(_key(tensor), self._near)
        if self.phase == "forward":
            self.forward_flops[self._near] += flops
        else:
            self.backward_flops += flops


class _Block:
    """A piece of memory that is in use."""

    __slots__ = ("category", "nbytes", "number", "storage")

    def __init__(self, category: str, nbytes: int, number: int, storage: Any) -> None:
        self.category, self.nbytes, self.number, self.storage = category, nbytes, number, storage


@cache
def _flop_formula(packet: Any) -> Any:
    if packet not in flop_registry and packet.__name__.endswith("_"):  # an operation in place
        packet = getattr(torch.ops.aten, packet.__name__[:-1], packet)
    return flop_registry.get(packet)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
