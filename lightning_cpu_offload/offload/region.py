"""Parameters that are stepped together, laid end to end on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cpu_offload.offload.masters import Master, Standing
from lightning_cpu_offload.offload.memory import Arena, HostArena, HostMemory, end_to_end, own_storage
from lightning_cpu_offload.offload.partition import Partition
from lightning_cpu_offload.offload.plan import Chunk, Piece, cut, offsets
from lightning_cpu_offload.offload.share import Share
from lightning_cpu_offload.offload.spread import FLOATS, Layout

SMALL = 1 << 14
"""Elements below which gradients are copied together: more calls than bytes."""


@dataclass
class Source:
    """Gradients that lie end to end in a region, from element `start` to `stop`; several only if all are small."""

    start: int
    stop: int
    tensors: list[Tensor]

    def copy_to(self, target: Tensor) -> None:
        """Lay them end to end in `target`, a vector on their device."""
        if len(self.tensors) == 1:
            target.copy_(self.tensors[0].detach().view(-1))
        else:
            end_to_end(self.tensors, target)


class Region:
    """The trained parameters of one optimizer group that share a device dtype.

    Args:
        masters: The parameters, in forward order.
        dtype: Their dtype on the device.
        device: Where the module computes.
        memory: Where host memory comes from.
        slot_bytes: What one chunk may occupy on the device.
        resident: Keep the masters, and all that belongs to them, on the device, where they are stepped.
        partition: The ranks among which the chunks are dealt out; None: this one has them all.

    Attributes:
        resident: Whether they are there.
        standing: Of all masters in it.
        partition: As given.
        spread: Which rank owns which elements; None: this one all.
        master: FP32 values, one arena.
        weights: Compute copies, one device vector; each parameter's data is a view of it.
        gradients: FP32 gradients of the masters, once `allocate_gradients` was called.
        chunks: How the region is cut.
        chunk_numel: Elements of each chunk but the last.
    """

    def __init__(
        self,
        masters: Sequence[Master],
        dtype: torch.dtype,
        device: torch.device,
        memory: HostMemory,
        slot_bytes: int,
        resident: bool = False,
        partition: Partition | None = None,
    ) -> None:
        numels = [master.host.numel() for master in masters]
        self.masters = list(masters)
        self.offsets = offsets(numels)
        self.strides = [_dense_stride(master.host) for master in masters]
        self._is_small = [
            master.host.numel() < SMALL and stride == torch.empty(master.host.shape, device="meta").stride()
            for master, stride in zip(self.masters, self.strides, strict=True)
        ]
        self.numel = self.offsets[-1]
        self.chunk_numel = max(1, slot_bytes // dtype.itemsize)
        self.chunks = cut(numels, self.chunk_numel)
        self.resident = resident
        self.standing = Standing()
        self.partition = partition
        self.spread = None if partition is None else partition.deal(self.chunks)
        self._memory = memory
        self._device = device
        self.master = self.arena("masters")
        self.weights = torch.empty(self.numel, dtype=dtype, device=device)
        self.gradients: Arena | None = None
        for index in range(len(masters)):
            self._take_over(index)

    def allocate_gradients(self) -> None:
        """Make room for FP32 gradients: those that optimizers without a kernel read, or that sum up on the host."""
        if self.gradients is None:
            self.gradients = self.arena("gradients")

    def arena(self, name: str, numel: int | None = None, layout: Layout = FLOATS) -> Arena:
        """FP32 zeros, one for each parameter if not told otherwise, where the masters are; counted if on the host."""
        count = self.numel if numel is None else numel
        if self.resident:
            return self._memory.device_arena(count, self._device)
        arena = self._memory.arena(name, count, self.spread, layout)
        if self.partition is not None:
            self.partition.register(arena)
        return arena

    def view(self, arena: Arena, index: int) -> Tensor:
        """Parameter `index`'s part of an arena, in the parameter's shape."""
        return arena.tensor(self.offsets[index], self.masters[index].host.shape, self.strides[index])

    def staged(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """The part of a staging buffer that a chunk occupies, as a vector of the device dtype."""
        numel = chunk.stop - chunk.start
        return buffer[: numel * self.weights.element_size()].view(self.weights.dtype)

    def has_gradient(self, piece: Piece) -> bool:
        """Whether the parameter of `piece` is to be stepped."""
        return self.masters[piece.index].tensor.grad is not None

    def sources(self, chunk: Chunk) -> list[Source]:
        """The dense gradients of a chunk, laid out like their parameters; small neighbours together."""
        found: list[Source] = []
        dtype, open_until = self.weights.dtype, -1  # where a small gradient may join the last source
        for piece in chunk.pieces:
            gradient = self._laid_out(piece.index)
            if gradient is None:
                continue
            size = piece.stop - piece.start
            small = self._is_small[piece.index] and size == gradient.numel() and gradient.dtype is dtype
            if not small:
                flat = gradient.detach().as_strided((gradient.numel(),), (1,))
                found.append(Source(piece.start, piece.stop, [flat[piece.offset : piece.offset + size]]))
            elif piece.start == open_until:
                found[-1].tensors.append(gradient)
                found[-1].stop = piece.stop
            else:
                found.append(Source(piece.start, piece.stop, [gradient]))
            open_until = piece.stop if small else -1
        return found

    def owner(self, chunk: Chunk) -> int:
        """The rank that steps a chunk."""
        return 0 if self.spread is None else self.spread.parts[self.number(chunk)][2]

    def is_owned(self, chunk: Chunk) -> bool:
        """Whether this rank steps a chunk."""
        return self.spread is None or self.owner(chunk) == self.spread.rank

    def takes_slot(self, chunk: Chunk) -> bool:
        """Whether the host of this rank steps a chunk, so that it passes through a staging buffer."""
        return not self.resident and self.is_owned(chunk)

    def number(self, chunk: Chunk) -> int:
        """Which of its chunks a chunk is."""
        return chunk.start // self.chunk_numel

    def inherit_on_fork(self) -> None:
        """Make the host memory ordinary for children of this process, once training is over."""
        for arena in (self.master, self.gradients):
            if arena is not None:
                arena.inherit_on_fork()

    def _laid_out(self, index: int) -> Tensor | None:
        """The dense gradient of parameter `index` in the parameter's layout; autograd nearly always has made it so."""
        tensor, stride = self.masters[index].tensor, self.strides[index]
        gradient = tensor.grad
        if gradient is None or gradient.layout is not torch.strided:
            return None  # sparse: the optimizer takes it as it is, or refuses it
        if gradient.stride() == stride and gradient.dtype is self.weights.dtype:
            return gradient
        dtype = _gradient_dtype(tensor, gradient)
        if gradient.dtype != dtype or not _same_layout(gradient, stride):
            laid_out = torch.empty_strided(gradient.shape, stride, dtype=dtype, device=gradient.device)
            tensor.grad = None
            tensor.grad = gradient = laid_out.copy_(gradient)
        return gradient

    def _take_over(self, index: int) -> None:
        master = self.masters[index]
        host = self.view(self.master, index)
        host.copy_(master.host)
        master.host, master.resident, master.standing = host, self.resident, self.standing
        view = own_storage(self.weights, self.offsets[index], host.shape, self.strides[index])
        view.copy_(host)
        if self.partition is not None and isinstance(self.master, HostArena):
            place = self.offsets[index], self.offsets[index + 1]
            master.share = Share(self.master, self.partition, self.weights, place)
            master.share.release()
        gradient = master.tensor.grad
        master.tensor.grad = None
        master.bind(view)
        if gradient is not None:
            master.tensor.grad = gradient.to(view.device, _gradient_dtype(master.tensor, gradient))


def _same_layout(gradient: Tensor, stride: tuple[int, ...]) -> bool:
    return gradient.stride() == stride or all(
        size <= 1 or own == wanted for size, own, wanted in zip(gradient.shape, gradient.stride(), stride, strict=True)
    )


def _gradient_dtype(tensor: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype in which torch lets `tensor.grad` be: that of the tensor, or another that the user allowed."""
    allowed = getattr(tensor, "grad_dtype", tensor.dtype)  # torch 2.10
    return gradient.dtype if allowed is None else allowed


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of `tensor` if its elements fill memory without gaps (channels last, transposed), else row-major."""
    return torch.empty_like(tensor, device="meta").stride()
