"""Parameters that are stepped together, laid end to end on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.memory import HostArena, HostMemory
from lightning_cpu_offload.offload.plan import Chunk, Piece, cut, offsets


class Region:
    """The trained parameters of one optimizer group that share a device dtype.

    Args:
        masters: The parameters, in forward order.
        dtype: Their dtype on the device.
        device: Where the module computes.
        memory: Where host memory comes from.
        slot_bytes: What one chunk may occupy on the device.

    Attributes:
        master: FP32 values, one arena.
        weights: Compute copies, one device vector; each parameter's data is a view of it.
        exp_avg: First moments in the layout of `master`, once `allocate_moments` was called.
        exp_avg_sq: Second moments, likewise.
        gradients: FP32 gradients of the masters, once `allocate_gradients` was called.
        chunks: How the region is cut.
    """

    def __init__(
        self,
        masters: Sequence[Master],
        dtype: torch.dtype,
        device: torch.device,
        memory: HostMemory,
        slot_bytes: int,
    ) -> None:
        numels = [master.host.numel() for master in masters]
        self.masters = list(masters)
        self.offsets = offsets(numels)
        self.strides = [_dense_stride(master.host) for master in masters]
        self.numel = self.offsets[-1]
        self.chunks = cut(numels, max(1, slot_bytes // dtype.itemsize))
        self._memory = memory
        self.master = memory.arena("masters", self.numel)
        self.weights = torch.empty(self.numel, dtype=dtype, device=device)
        self.exp_avg: HostArena | None = None
        self.exp_avg_sq: HostArena | None = None
        self.gradients: HostArena | None = None
        for index in range(len(masters)):
            self._take_over(index)

    def allocate_moments(self) -> None:
        """Make room for AdamW's state."""
        if self.exp_avg is None:
            self.exp_avg = self._memory.arena("moments", self.numel)
            self.exp_avg_sq = self._memory.arena("moments", self.numel)

    def allocate_gradients(self) -> None:
        """Make room for FP32 gradients, which optimizers without a kernel of ours read all at once."""
        if self.gradients is None:
            self.gradients = self._memory.arena("gradients", self.numel)

    def view(self, arena: HostArena, index: int) -> Tensor:
        """Parameter `index`'s part of an arena, in the parameter's shape."""
        return arena.tensor(self.offsets[index], self.masters[index].host.shape, self.strides[index])

    def staged(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """The part of a staging buffer that a chunk occupies, as a vector of the device dtype."""
        numel = chunk.stop - chunk.start
        return buffer[: numel * self.weights.element_size()].view(self.weights.dtype)

    def gradient(self, piece: Piece) -> Tensor | None:
        """The part of a parameter's dense gradient that belongs to `piece`, as a vector, or None if there is none."""
        gradient = self.masters[piece.index].tensor.grad
        if gradient is None or gradient.layout != torch.strided:
            return None
        flat = gradient.detach().as_strided((gradient.numel(),), (1,))
        return flat[piece.offset : piece.offset + piece.stop - piece.start]

    def has_gradient(self, piece: Piece) -> bool:
        """Whether the parameter of `piece` is to be stepped."""
        return self.masters[piece.index].tensor.grad is not None

    def lay_out_gradients(self) -> None:
        """Give gradients the layout of their parameters; autograd nearly always has done so."""
        for master, stride in zip(self.masters, self.strides, strict=True):
            gradient = master.tensor.grad
            if gradient is not None and not _same_layout(gradient, stride):
                laid_out = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
                master.tensor.grad = laid_out.copy_(gradient)

    def inherit_on_fork(self) -> None:
        """Make the host memory ordinary for children of this process, once training is over."""
        for arena in (self.master, self.exp_avg, self.exp_avg_sq, self.gradients):
            if arena is not None:
                arena.inherit_on_fork()

    def _take_over(self, index: int) -> None:
        master = self.masters[index]
        host = self.view(self.master, index)
        host.copy_(master.host)
        master.host = host
        view = _own_storage(self.weights, self.offsets[index], host.shape, self.strides[index])
        view.copy_(host)
        gradient = master.tensor.grad
        master.tensor.grad = None
        master.bind(view)
        if gradient is not None:
            master.tensor.grad = gradient.to(view.device, view.dtype)


def _own_storage(flat: Tensor, start: int, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A part of a vector whose storage is that part alone, so that pickling it does not write the whole vector."""
    begin, end = (element * flat.element_size() for element in (start, start + shape.numel()))
    part = flat.untyped_storage()[begin:end]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(part, 0, shape, stride)


def _same_layout(gradient: Tensor, stride: tuple[int, ...]) -> bool:
    if gradient.layout != torch.strided:
        return True  # sparse: the optimizer takes it as it is, or refuses it
    return all(
        size <= 1 or own == wanted for size, own, wanted in zip(gradient.shape, gradient.stride(), stride, strict=True)
    )


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of `tensor` if its elements fill memory without gaps (channels last, transposed), else row-major."""
    return torch.empty_like(tensor, device="meta").stride()
