"""Tensors of a checkpoint whose bytes are made when they are written, and not before.

`torch.save` collects storages first and asks each for its bytes, with `.cpu()`, when its turn has come. So a file can
hold more than there is memory for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override


class DeferredStorage(torch.UntypedStorage):
    """Bytes of an FP32 tensor that are read when they are saved."""

    read: Callable[[], Tensor]

    @staticmethod
    def of(nbytes: int, read: Callable[[], Tensor]) -> DeferredStorage:
        """A storage that `torch.save` takes for one of the CPU.

        Args:
            nbytes: Its size.
            read: Returns a tensor whose storage is just the bytes.
        """
        storage = DeferredStorage(nbytes, device="meta")
        storage.read = read
        return storage

    @override
    def cpu(self) -> torch.UntypedStorage:
        return self.read().untyped_storage()

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)


# Before torch's own taggers: the file is to say that it holds an ordinary tensor of the CPU.
torch.serialization.register_package(
    0, lambda storage: "cpu" if isinstance(storage, DeferredStorage) else None, lambda storage, location: None
)


def reduce_as(storage: torch.UntypedStorage, shape: Sequence[int], stride: Sequence[int]) -> Any:
    """What pickle is told of an FP32 tensor with such a storage."""
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    return torch._utils._rebuild_tensor_v2, (typed, 0, tuple(shape), tuple(stride), False, OrderedDict())


class DeferredTensor(Tensor):
    """An FP32 tensor that can be saved, but read only while its values are here.

    Args:
        shape: Its shape.
        stride: Its strides, without gaps.
        read: Returns the values, wherever they are: an ordinary tensor with a storage of its own.
        require: Raises where only saving may read it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _require: Callable[[], None]
    read: Callable[[], Tensor]

    @staticmethod
    def __new__(  # noqa: D102
        cls, shape: Sequence[int], stride: Sequence[int], read: Callable[[], Tensor], require: Callable[[], None]
    ) -> DeferredTensor:
        options: Any = {"strides": tuple(stride), "dtype": torch.float32, "device": torch.device("cpu")}
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), **options)
        self.read, self._require = read, require
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def values(value: Any) -> Any:
            return value.here() if isinstance(value, DeferredTensor) else value

        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*tree_map(values, args), **tree_map(values, kwargs or {}))

    def here(self) -> Tensor:
        """A copy of the values.

        Raises:
            RuntimeError: They are not here.
        """
        self._require()
        return self.read().clone()

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        if "_storage" not in vars(self):  # one for all names of the tensor in a checkpoint: it is written once
            self._storage = DeferredStorage.of(self.nbytes, self.read)
        return self._storage

    @override
    def data_ptr(self) -> int:
        self._require()
        raise RuntimeError("the tensor has no address of its own; clone it first.")

    @override
    def numpy(self, *, force: bool = False) -> Any:
        return self.here().numpy()

    @override
    def tolist(self) -> Any:
        return self.here().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.here()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as(self.untyped_storage(), self.shape, self.stride())


def materialized(value: Any) -> Any:
    """A checkpoint with ordinary tensors in place of the deferred ones."""
    copies: dict[int, Tensor] = {}

    def copy_of(tensor: DeferredTensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.read().clone()
        return copies[id(tensor)]

    def walk(item: Any) -> Any:
        if isinstance(item, DeferredTensor):
            return copy_of(item)
        if isinstance(item, dict):
            same = type(item)() if isinstance(item, OrderedDict) else {}
            same.update((key, walk(inner)) for key, inner in item.items())
            return same
        return type(item)(walk(inner) for inner in item) if type(item) in (list, tuple) else item

    return walk(value)
