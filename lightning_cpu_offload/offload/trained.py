"""The parameters that one optimizer steps on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor

from lightning_cpu_offload.offload.masters import Master
from lightning_cpu_offload.offload.plan import Chunk
from lightning_cpu_offload.offload.region import Region

RegionBuilder = Callable[[Sequence[tuple[int, Tensor]]], list[Region]]
"""Makes regions that hold the given parameters, each with the index of its group; or finds them, if they exist."""


class Trained:
    """Grows as parameters are added to the optimizer or unfrozen.

    Args:
        optimizer: Over them.
        build: Where regions come from.
        order: Position of each parameter in the module, which is taken for forward order.
        converted: Masters of the whole module; may grow.

    Attributes:
        regions: What holds them; where optimizers share parameters, also parameters of another optimizer.
        masters: By parameter.
        chunks: All of them, in forward order.
        group_of: The group of each parameter of the optimizer, as of the last look.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        build: RegionBuilder,
        order: dict[Tensor, int],
        converted: Mapping[Tensor, Master],
    ) -> None:
        self.optimizer = optimizer
        self.regions: list[Region] = []
        self.masters: dict[Tensor, Master] = {}
        self.chunks: list[tuple[Region, Chunk]] = []
        self.group_of: dict[Tensor, int] = {}
        self._build = build
        self._order = order
        self._converted = converted
        self._seen: list[list[Tensor]] = []
        self._outside: list[Tensor] = []
        self._groups: dict[Region, list[int | None]] = {}

    def parameters(self) -> list[Tensor]:
        """What the optimizer holds now."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def is_resident(self, parameter: Tensor) -> bool:
        """Whether a parameter's master and state are on the device."""
        master = self.masters.get(parameter)
        return master is not None and master.resident

    def admit(self, with_state: Iterable[Tensor] = ()) -> list[Region]:
        """Take in parameters that are to be stepped by now, and return the regions that came with them.

        A frozen parameter in an optimizer costs nothing on the host, unless it has state.
        """
        self.look()
        stateful = set(with_state)
        new = [
            (self.group_of[parameter], parameter)
            for parameter in self._outside
            if parameter.requires_grad or parameter.grad is not None or parameter in stateful
        ]
        added = [region for region in self._build(new) if region not in self.regions] if new else []
        self.regions.extend(added)
        self.masters.update({master.tensor: master for region in added for master in region.masters})
        if added:
            self.chunks = _in_forward_order(self.regions, self._order)
            self._sort()
        return added

    def outside(self) -> list[list[Tensor]]:
        """Of each group, what has no master: the module's FP64 parameters, and those that came during training."""
        rest: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for parameter in self._outside:
            rest[self.group_of[parameter]].append(parameter)
        return rest

    def frozen(self) -> list[Master]:
        """Masters of what the optimizer holds but does not step, where the compute copy is of another dtype."""
        rest = [parameter for parameter in self.parameters() if parameter not in self.masters]
        return [self._converted[parameter] for parameter in rest if parameter in self._converted]

    def due(self) -> list[Master]:
        """Masters of the optimizer's own parameters that have a gradient."""
        self.look()
        return [
            master
            for region, groups in self._groups.items()
            for master, group in zip(region.masters, groups, strict=True)
            if group is not None and master.tensor.grad is not None
        ]

    def groups(self, due: Sequence[Master]) -> dict[Region, list[int | None]]:
        """The group of each master of each region, None for what is not due."""
        if len(due) == len(self.masters):
            return self._groups
        stepped = {master.tensor for master in due}
        return {
            region: [
                group if master.tensor in stepped else None
                for master, group in zip(region.masters, groups, strict=True)
            ]
            for region, groups in self._groups.items()
        }

    def due_chunks(self, due: Sequence[Master]) -> list[tuple[Region, Chunk]]:
        """The chunks in which they are."""
        if len(due) == len(self.masters):
            return list(self.chunks)
        stepped = {master.tensor for master in due}
        return [
            (region, chunk)
            for region, chunk in self.chunks
            if any(region.masters[piece.index].tensor in stepped for piece in chunk.pieces)
        ]

    def lead(self) -> None:
        """The masters are about to be stepped: until they are settled, their compute copies are old."""
        for region in self.regions:
            region.standing.ahead = True

    def settle(self) -> None:
        """Masters and compute copies agree."""
        for region in self.regions:
            region.standing.ahead = False

    def note(self, stepped: Sequence[Master]) -> None:
        """As after any step in place: backward through an older graph must fail, not mix two steps."""
        torch.autograd.graph.increment_version([master.tensor for master in stepped])
        for master in stepped:
            master.note_step()
        for region in self.regions:
            for master in region.masters if region.resident else ():
                master.note()

    def look(self) -> None:
        """Sort anew if the optimizer's lists are not those of the last look: users change them."""
        lists = [group["params"] for group in self.optimizer.param_groups]
        if len(lists) == len(self._seen) and all(map(_same, lists, self._seen)):
            return
        self._seen = [list(parameters) for parameters in lists]
        self.group_of = {parameter: index for index, parameters in enumerate(lists) for parameter in parameters}
        self._sort()

    def _sort(self) -> None:
        self._outside = [parameter for parameter in self.group_of if parameter not in self.masters]
        self._groups = {
            region: [self.group_of.get(master.tensor) for master in region.masters] for region in self.regions
        }


def _same(parameters: Sequence[Tensor], seen: Sequence[Tensor]) -> bool:
    return len(parameters) == len(seen) and all(map(is_, parameters, seen))


def _in_forward_order(regions: list[Region], order: dict[Tensor, int]) -> list[tuple[Region, Chunk]]:
    def position(item: tuple[Region, Chunk]) -> tuple[int, int]:
        region, chunk = item
        first = chunk.pieces[0]
        return order[region.masters[first.index].tensor], first.offset

    return sorted(((region, chunk) for region in regions for chunk in region.chunks), key=position)
