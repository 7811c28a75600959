"""What a training window has to compute and to move: pure arithmetic over sizes, cut by the offload's own plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_cpu_offload.offload.moments import moment_bytes
from lightning_cpu_offload.offload.plan import cut

MASTER_BYTES = 8
"""FP32 master of one parameter, read and written."""


def state_bytes(state_dtype: str = "float32") -> float:
    """Bytes that a step reads and writes of one parameter's master, exp_avg and exp_avg_sq."""
    return MASTER_BYTES + 2 * moment_bytes(state_dtype)


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    Attributes:
        flops: Floating-point operations per second that products reach on the device.
        d2h: Bytes per second from device to host.
        h2d: Bytes per second from host to device.
        host: Bytes per second the host step reads and writes in total.
        device: Bytes per second of device memory, read and written.
    """

    flops: float
    d2h: float
    h2d: float
    host: float
    device: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}: must be more than 0. Give it per second, in FLOP or bytes.")


@dataclass(frozen=True)
class Unit:
    """One parameter.

    Attributes:
        numel: Its elements.
        flops: Operations of one micro-batch's forward that belong to it.
        itemsize: Bytes of an element on the device.
        group: Parameters of different groups share no chunk.
    """

    numel: int
    flops: float
    itemsize: int = 2
    group: int = 0


@dataclass(frozen=True)
class Window:
    """The work between two optimizer steps.

    Attributes:
        units: The trained parameters in forward order.
        accumulate: Micro-batches.
        backward: Operations of a backward for each one of a forward; 3 where activations are computed again.
        clip: Whether the gradients' norm is clipped.
        state_dtype: What the moments on the host are held in.
    """

    units: tuple[Unit, ...]
    accumulate: int = 1
    backward: float = 2.0
    clip: bool = False
    state_dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Parameters in total."""
        return sum(unit.numel for unit in self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, and of their gradients, on the device."""
        return sum(unit.numel * unit.itemsize for unit in self.units)

    @property
    def flops(self) -> float:
        """Operations of one micro-batch's forward."""
        return sum(unit.flops for unit in self.units)


@dataclass(frozen=True, eq=False)
class Load:
    """One chunk of the plan: what one staging buffer carries. Two are equal only if they are one.

    Attributes:
        units: Indices of the parameters it holds parts of, in forward order.
        numel: Elements.
        itemsize: Bytes of each on the device.
        state_bytes: Bytes of each one's state that a step reads and writes.
    """

    units: tuple[int, ...]
    numel: int
    itemsize: int
    state_bytes: float = 24

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients, and of its weights."""
        return self.numel * self.itemsize

    @property
    def step_bytes(self) -> float:
        """Bytes the host reads and writes to step it: the state, gradient in, weight out."""
        return self.numel * self.state_bytes + 2 * self.nbytes


def loads(units: Iterable[tuple[int, Unit]], slot_bytes: int, state_dtype: str = "float32") -> list[Load]:
    """Cut parameters, given with their place in forward order, as the offload does: chunks in forward order."""
    regions: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, unit in sorted(units, key=lambda item: (item[1].numel % 8 != 0, item[0])):
        regions.setdefault((unit.group, unit.itemsize), []).append((index, unit.numel))
    result = []
    for (_, itemsize), members in regions.items():
        for chunk in cut([numel for _, numel in members], max(1, slot_bytes // itemsize)):
            held = tuple(sorted(members[piece.index][0] for piece in chunk.pieces))
            result.append(Load(held, chunk.stop - chunk.start, itemsize, state_bytes(state_dtype)))
    return sorted(result, key=lambda load: load.units[0])
