"""Which rank owns which chunk, and all that ranks say to each other about it: every collective of the offload.

Chunk after chunk goes to rank after rank, through all regions, so that each owns as much as the others and all of them
work on the front of the model first. The owner of a chunk steps it, and its new weights are broadcast. Masters and
moments stay with their owner; other ranks are sent them where somebody reads: for a moment all of them on every rank
(`gathered`), or piece by piece on rank 0 while it writes a checkpoint (`write_on_first`).

Calls are collective: every rank makes the same ones in the same order. A step's come from the host thread, all others
from the training thread after it has landed, and all of them are on a process group that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cpu_offload.offload.memory import HostArena
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.spread import Spread

_DONE, _FAILED, _SEND = range(3)

ELSEWHERE = (
    "parts of it are in the memory of other ranks. Use trainer.save_checkpoint on every rank; or, on every rank, "
    "`with trainer.strategy.gathered():`, within which masters and optimizer state can be read."
)


class Partition:
    """The ranks among which masters and moments are spread.

    Args:
        device: Where this rank computes.
        group: A process group over all ranks that is used for nothing else.

    Attributes:
        rank: Of this process.
        size: How many there are.
        deferring: Whether what others hold is shown by tensors that are read when they are saved.
        sealed: Whether the gradients that are reduced have been settled.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.deferring = False
        self.sealed = False
        self._device = device
        self._group = group
        self._dealt = 0
        self._arenas: list[HostArena] = []
        self._fetched: list[tuple[HostArena, int, int]] = []

    def deal(self, chunks: Sequence[Chunk]) -> Spread:
        """Give each of a region's chunks an owner."""
        first, self._dealt = self._dealt, self._dealt + len(chunks)
        parts = tuple((chunk.start, chunk.stop, (first + index) % self.size) for index, chunk in enumerate(chunks))
        return Spread(parts, self.rank)

    def register(self, arena: HostArena) -> None:
        """Let others ask for parts of an arena; every rank registers the same ones in the same order."""
        self._arenas.append(arena)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Queue the sending of a tensor on the device from `owner` to all others, on the current stream."""
        dist.broadcast(tensor, owner, group=self._group)

    def all_agree(self, here: bool) -> bool:
        """Whether something holds on every rank."""
        answer = torch.tensor(int(here), device=self._device)
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())

    def count_like(self, word: str) -> int:
        """How many ranks call this with the same word; this one among them."""
        words: list[Any] = [None] * self.size
        dist.all_gather_object(words, word, group=self._group)
        return words.count(word)

    def join(self, flags: Tensor) -> None:
        """Raise flags on the device, uint8, that are raised on any rank."""
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors on the host the values they have on rank 0."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self._broadcast_host(value.view(-1).view(torch.uint8), 0)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)

    @contextmanager
    def gathered(self, arenas: Iterable[HostArena] | None = None) -> Generator[None, None, None]:
        """Meanwhile these arenas are whole on every rank; None: all there are."""
        spread = [arena for arena in (self._arenas if arenas is None else arenas) if not arena.whole]
        try:
            for arena in spread:
                self.complete(arena)
            yield
        finally:
            for arena in spread:
                arena.dismiss()

    def complete(self, arena: HostArena) -> None:
        """Make an arena whole on every rank."""
        assert arena.spread is not None
        for start, stop, owner in arena.spread.parts:
            for part in arena.parts(start, stop):
                self._broadcast_host(part, owner)
        arena.whole = True

    def write_on_first(self, write: Callable[[], None]) -> None:
        """Run `write` on rank 0 only; what it fetches, the others send until it is done.

        Raises:
            RuntimeError: On the other ranks, where `write` failed on rank 0.
        """
        if self.rank != 0:
            self._serve()
            return
        try:
            write()
        except BaseException:
            self._say(_FAILED)
            raise
        else:
            self._say(_DONE)
        finally:
            self._release_fetched()

    def fetch(self, arenas: Iterable[HostArena], start: int, stop: int) -> None:
        """On rank 0, within `write_on_first`: complete elements `start` to `stop` of arenas, until the next call."""
        self._release_fetched()
        for arena in arenas:
            if not arena.whole:
                self._fetched.append((arena, start, stop))
                self._say(_SEND, self._arenas.index(arena), start, stop)
                self._send_to_first(arena, start, stop)

    def _release_fetched(self) -> None:
        while self._fetched:
            arena, start, stop = self._fetched.pop()
            arena.release(start, stop)

    def _serve(self) -> None:
        while True:
            what, number, start, stop = self._say()
            if what == _SEND:
                self._send_to_first(self._arenas[number], start, stop)
            elif what == _FAILED:
                raise RuntimeError("rank 0 could not write what all ranks were to save; its own error says why.")
            else:
                return

    def _say(self, *words: int) -> list[int]:
        """Four numbers from rank 0 to all."""
        message = torch.tensor([*words, *[0] * (4 - len(words))], dtype=torch.int64, device=self._device)
        dist.broadcast(message, 0, group=self._group)
        numbers: list[int] = message.tolist()
        return numbers

    def _send_to_first(self, arena: HostArena, start: int, stop: int) -> None:
        assert arena.spread is not None
        for low, high, owner in arena.spread.among(start, stop):
            for part in arena.parts(low, high) if owner != 0 else ():
                if self.rank == owner:
                    dist.send(part.to(self._device), 0, group=self._group)
                elif self.rank == 0:
                    staged = torch.empty_like(part, device=self._device)
                    dist.recv(staged, owner, group=self._group)
                    part.copy_(staged)

    def _broadcast_host(self, values: Tensor, owner: int) -> None:
        """As most groups of accelerators carry tensors of the device only, values pass through it."""
        staged = values.to(self._device)
        dist.broadcast(staged, owner, group=self._group)
        if staged is not values:
            values.copy_(staged)
