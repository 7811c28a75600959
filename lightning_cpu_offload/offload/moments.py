"""Adam's moments of a region: two FP32 arenas, or fewer bytes that still look like FP32 tensors.

Whatever holds them, `optimizer.state[parameter]` is in torch's form. Reduced moments are shown there as tensors of the
class `ReducedTensor`: decoded when read, encoded when written, and decoded one by one when saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.float8 import BLOCK
from lightning_cpu_offload.offload.deferred import DeferredStorage, DeferredTensor, reduce_as
from lightning_cpu_offload.offload.mapped import give_back, take
from lightning_cpu_offload.offload.memory import Arena, HostArena
from lightning_cpu_offload.offload.partition import ELSEWHERE
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.spread import Layout

STATE_DTYPES = ("float32", "bfloat16", "float8")

NAMES = ("exp_avg", "exp_avg_sq")

BORDER_BYTES = {"float32": 8, "bfloat16": 8, "float8": 128 * 4}
"""What chunks are cut at multiples of: any dtype's elements, and in 8 bits the blocks that share an exponent."""

_BYTES = {"float32": 8.0, "bfloat16": 4.0, "float8": 2 + 2 * 2 / 128}
_SLICE_NUMEL = 1 << 22


def moment_bytes(state_dtype: str) -> float:
    """Bytes that both moments of a parameter take."""
    return _BYTES[state_dtype]


def make_moments(state_dtype: str, region: Region) -> FloatMoments | ReducedMoments:
    """Moments of a region's parameters, zero at first.

    Args:
        state_dtype: What they are held in, one of `STATE_DTYPES`.
        region: Whose. What is resident on the device is held in FP32 in any case.
    """
    return FloatMoments(region) if state_dtype == "float32" or region.resident else ReducedMoments(state_dtype, region)


class FloatMoments:
    """Two FP32 arenas in the layout of the masters.

    Args:
        region: Whose moments.

    Attributes:
        region: As given.
        arenas: What holds them.
    """

    def __init__(self, region: Region) -> None:
        self.exp_avg, self.exp_avg_sq = region.arena("moments"), region.arena("moments")
        self.arenas: Sequence[Arena] = (self.exp_avg, self.exp_avg_sq)
        self.region = region

    def show(self, index: int) -> tuple[Tensor, Tensor]:
        """Both moments of parameter `index`, in its shape, for the optimizer's state."""
        return self.region.view(self.exp_avg, index), self.region.view(self.exp_avg_sq, index)

    def put(self, index: int, view: Tensor, value: Tensor | None) -> None:
        """Give a moment that `show` returned the values of another tensor, or zeros."""
        if value is None:
            view.zero_()
        else:
            take(view, value.decode() if isinstance(value, ReducedTensor) else value)
        _release(self, index)


class ReducedMoments:
    """Moments in BF16 or 8 bits.

    Args:
        state_dtype: Which, a key of `kernels.MOMENTS`.
        region: Whose moments.

    Attributes:
        region: As given.
        arenas: What holds them.
        kernel: What steps them.
    """

    def __init__(self, state_dtype: str, region: Region) -> None:
        self.arenas: list[HostArena] = []
        self.region = region
        self._state_dtype = state_dtype
        self.kernel = kernels.MOMENTS[state_dtype](region.numel, self._allocate)

    def show(self, index: int) -> tuple[Tensor, Tensor]:
        """Both moments of parameter `index`, in its shape, for the optimizer's state."""
        start, stride = self.region.offsets[index], self.region.strides[index]
        shape = self.region.masters[index].host.shape
        exp_avg, exp_avg_sq = (ReducedTensor(self.kernel, name, start, shape, stride) for name in NAMES)
        return exp_avg, exp_avg_sq

    def put(self, index: int, view: Tensor, value: Tensor | None) -> None:
        """Give a moment that `show` returned the values of another tensor, or zeros."""
        assert isinstance(view, ReducedTensor)
        view.encode(value)
        _release(self, index)

    def _allocate(self, size: int, dtype: Any) -> np.ndarray:
        itemsize = np.dtype(dtype).itemsize
        shared = size != self.region.numel or (self._state_dtype == "float8" and itemsize > 1)
        layout = Layout(itemsize, block=BLOCK, planes=2) if shared else Layout(itemsize)
        arena = self.region.arena("moments", -(-size * itemsize // 4), layout)
        assert isinstance(arena, HostArena)
        self.arenas.append(arena)
        return arena.array.view(dtype)[:size]


Moments = FloatMoments | ReducedMoments


def saved(moments: Moments, index: int, name: str, deferring: bool) -> dict[str, Tensor]:
    """Both moments of a parameter of which other ranks hold parts, for a state dict.

    Args:
        moments: Of its region.
        index: The parameter in it.
        name: Its name.
        deferring: Whether they are to be read when they are saved, and not before; else they are copies.

    Raises:
        RuntimeError: They are not here, and reading is not deferred.
    """
    region, partition = moments.region, moments.region.partition
    assert partition is not None
    start, stop = region.offsets[index : index + 2]

    def require() -> None:
        if not all(arena.whole for arena in _spread(moments.arenas)):
            raise RuntimeError(f"optimizer state of {name}: {ELSEWHERE}")

    def deferred(view: Tensor, arenas: list[HostArena]) -> Tensor:
        def read() -> Tensor:
            partition.fetch(arenas, start, stop)
            return view.decode() if isinstance(view, ReducedTensor) else view

        return DeferredTensor(view.shape, view.stride(), read, require)

    if not deferring:
        require()
    found = {}
    for number, (key, view) in enumerate(zip(NAMES, moments.show(index), strict=True)):
        # What the two share, exponents of 8-bit moments, comes behind the arenas of either.
        shown = deferred(view, _spread([moments.arenas[number], *moments.arenas[2:]]))
        found[key] = shown if deferring else shown.clone()
    return found


def _spread(arenas: Sequence[Arena]) -> list[HostArena]:
    return [arena for arena in arenas if isinstance(arena, HostArena)]


def _release(moments: Moments, index: int) -> None:
    region = moments.region
    for arena in _spread(moments.arenas):
        arena.release(region.offsets[index], region.offsets[index + 1])


class ReducedTensor(Tensor):
    """An FP32 tensor that is held in fewer bytes.

    Every operation works on a decoded copy; one that writes to the tensor as a whole, or to an index of it, is encoded
    again, rounded. Views are copies. `torch.save` decodes one tensor at a time and writes an ordinary one.

    Args:
        kernel: What holds it, among other numbers.
        name: `"exp_avg"` or `"exp_avg_sq"`.
        start: Place of its first number.
        shape: Its shape.
        stride: Its strides, without gaps.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _kernel: kernels.Moments
    _name: str
    _start: int

    @staticmethod
    def __new__(  # noqa: D102
        cls, kernel: kernels.Moments, name: str, start: int, shape: Sequence[int], stride: Sequence[int]
    ) -> ReducedTensor:
        options: Any = {"strides": tuple(stride), "dtype": torch.float32, "device": torch.device("cpu")}
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), **options)
        self._kernel, self._name, self._start = kernel, name, start
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            tensor = args[0]
            return cls(tensor._kernel, tensor._name, tensor._start, tensor.shape, tensor.stride())
        opened: dict[ReducedTensor, Tensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, ReducedTensor):
                return value
            if value not in opened:
                opened[value] = value.decode()
            return opened[value]

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if func._schema.is_mutable:
            for tensor, plain in opened.items():
                tensor.encode(plain)
        return tree_map(lambda value: next((t for t, plain in opened.items() if plain is value), value), result)

    def decode(self) -> Tensor:
        """An ordinary FP32 tensor with the values it has, exactly."""
        flat = np.empty(self.numel(), np.float32)
        for start in range(0, flat.size, _SLICE_NUMEL):
            part = flat[start : start + _SLICE_NUMEL]
            part[:] = self._kernel.get(self._name, self._start + start, part.size)
        return torch.from_numpy(flat).as_strided(self.shape, self.stride())

    def encode(self, value: Tensor | None) -> None:
        """Take over the values of an ordinary tensor of the same shape, rounded; None: zeros."""
        laid_out = value.decode() if isinstance(value, ReducedTensor) else value
        if laid_out is not None and not self._is_laid_out(laid_out):
            laid_out = torch.empty_strided(self.shape, self.stride(), dtype=torch.float32, device="cpu").copy_(laid_out)
        for start in range(0, self.numel(), _SLICE_NUMEL):
            size = min(_SLICE_NUMEL, self.numel() - start)
            if laid_out is None:
                part = torch.zeros(size, dtype=torch.float32, device="cpu")
            else:
                part = laid_out.detach().as_strided((size,), (1,), laid_out.storage_offset() + start)
            self._kernel.set(self._name, self._start + start, part.numpy())
            give_back(part)

    def _is_laid_out(self, value: Tensor) -> bool:
        like = value.dtype == torch.float32 and value.device.type == "cpu" and value.shape == self.shape
        return like and value.stride() == self.stride()

    @override
    def data_ptr(self) -> int:
        raise RuntimeError("the moment is held in fewer bytes than FP32 takes, so it has no address; clone it first.")

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        return DeferredStorage.of(self.nbytes, self.decode)

    @override
    def numpy(self, *, force: bool = False) -> Any:
        return self.decode().numpy()

    @override
    def tolist(self) -> Any:
        return self.decode().tolist()

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = self.decode()
        plain[key] = value
        self.encode(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decode()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as(self.untyped_storage(), self.shape, self.stride())
