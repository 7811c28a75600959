"""Adam's moments of a region: two FP32 arenas, or fewer bytes that still look like FP32 tensors.

Whatever holds them, `optimizer.state[parameter]` is in torch's form. Reduced moments are shown there as tensors of the
class `ReducedTensor`: decoded when read, encoded when written, and decoded one by one when saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.offload.mapped import give_back, take
from lightning_cpu_offload.offload.memory import Arena, HostArena
from lightning_cpu_offload.offload.region import Region

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
        arenas: What holds them.
    """

    def __init__(self, region: Region) -> None:
        self.exp_avg, self.exp_avg_sq = region.arena("moments"), region.arena("moments")
        self.arenas: Sequence[Arena] = (self.exp_avg, self.exp_avg_sq)
        self._region = region

    def show(self, index: int) -> tuple[Tensor, Tensor]:
        """Both moments of parameter `index`, in its shape, for the optimizer's state."""
        return self._region.view(self.exp_avg, index), self._region.view(self.exp_avg_sq, index)

    def put(self, view: Tensor, value: Tensor | None) -> None:
        """Give a moment that `show` returned the values of another tensor, or zeros."""
        if value is None:
            view.zero_()
        else:
            take(view, value.decode() if isinstance(value, ReducedTensor) else value)


class ReducedMoments:
    """Moments in BF16 or 8 bits.

    Args:
        state_dtype: Which, a key of `kernels.MOMENTS`.
        region: Whose moments.

    Attributes:
        arenas: What holds them.
        kernel: What steps them.
    """

    def __init__(self, state_dtype: str, region: Region) -> None:
        self.arenas: list[HostArena] = []
        self._region = region
        self.kernel = kernels.MOMENTS[state_dtype](region.numel, self._allocate)

    def show(self, index: int) -> tuple[Tensor, Tensor]:
        """Both moments of parameter `index`, in its shape, for the optimizer's state."""
        start, stride = self._region.offsets[index], self._region.strides[index]
        shape = self._region.masters[index].host.shape
        exp_avg, exp_avg_sq = (ReducedTensor(self.kernel, name, start, shape, stride) for name in NAMES)
        return exp_avg, exp_avg_sq

    def put(self, view: Tensor, value: Tensor | None) -> None:
        """Give a moment that `show` returned the values of another tensor, or zeros."""
        assert isinstance(view, ReducedTensor)
        view.encode(value)

    def _allocate(self, size: int, dtype: Any) -> np.ndarray:
        nbytes = size * np.dtype(dtype).itemsize
        arena = self._region.arena("moments", -(-nbytes // 4))
        assert isinstance(arena, HostArena)
        self.arenas.append(arena)
        return arena.array.view(dtype)[:size]


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
        storage = _Encoded(self.nbytes, device="meta")
        storage.tensor = self
        return storage

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
        storage = torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=torch.float32, _internal=True)
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(self.shape), self.stride(), False, OrderedDict())


class _Encoded(torch.UntypedStorage):
    """What `torch.save` writes for a `ReducedTensor`: it asks for the bytes when their turn has come, not before."""

    tensor: ReducedTensor

    @override
    def cpu(self) -> torch.UntypedStorage:
        return self.tensor.decode().untyped_storage()

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)


# Before torch's own taggers: the file is to say that it holds an ordinary tensor of the CPU.
torch.serialization.register_package(
    0, lambda storage: "cpu" if isinstance(storage, _Encoded) else None, lambda storage, location: None
)
