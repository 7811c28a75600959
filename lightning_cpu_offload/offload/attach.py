"""Attaches a module and its optimizers to the host, and detaches them again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.hooked import HookedOptimizer
from lightning_cpu_offload.offload.masters import Master, StateDictHooks
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.pipeline import SLOT_BYTES, Pipeline, StepReport
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.transfer import make_engine
from lightning_cpu_offload.offload.watch import Watch

SMALL_SLOT_BYTES = 64 << 10

DtypeRule = Callable[[nn.Module, Tensor, bool], torch.dtype]
"""The dtype a parameter or buffer of a module is held in on the device.

The third argument says whether others may write to it while it is held, in steps too small for BF16: while training,
all that no optimizer of the module steps (the weights of a momentum teacher, or of another library).
"""


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        pin_memory: Page-lock the staging ring: True, False, or `"auto"` (where the machine allows it).
        cpu_threads: Threads of the host step; None: one for each physical core this process may use.
    """

    pin_memory: bool | str = "auto"
    cpu_threads: int | None = None


class Attachment:
    """A module whose optimizer lives on the host.

    While attached, trained parameters compute in the dtype of the rule on `device`, their FP32 masters and their
    optimizer state are on the host, and each optimizer's `step` runs there. Without optimizers (validation, test,
    prediction) only the compute copies are made, and nothing is allocated on the host.

    Args:
        module: Built, with its final values, in the dtype to be trained in.
        optimizers: Over parameters of the module.
        device: Where the module computes.
        rule: The dtype of each tensor there.
        settings: The user's choices.

    Raises:
        ValueError: A parameter is in two optimizers, or is not initialised yet.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        rule: DtypeRule,
        settings: Settings,
    ) -> None:
        _require_initialised(module)
        _require_one_owner(module, optimizers)
        self.memory = HostMemory()
        self.threads = ThreadPool(settings.cpu_threads)
        self._device = device
        self._rule = rule
        self._owners = {tensor: owner for owner, tensor in _tensors(module)}
        self._names = dict(_names(module))
        self._order = {tensor: index for index, tensor in enumerate(self._owners)}
        self._masters: dict[Tensor, Master] = {}
        self._regions: list[Region] = []
        self._slot_bytes = _slot_bytes(module)
        self.optimizers: list[HookedOptimizer] = []
        self._hooks = StateDictHooks(module, self._masters)
        self.pipeline: Pipeline | None = None
        try:
            if optimizers:
                self._hook_all(optimizers, settings)
            self._convert_rest()
        except BaseException:
            self.detach()
            raise

    def refresh(self, cast: bool) -> None:
        """Before a step of the module: let it compute with what was written since the last one.

        Args:
            cast: Whether it cannot compute with FP32 data that was put in place of a compute copy.
        """
        for master in self._masters.values():
            if master.host_written():
                master.adopt()
            elif cast:
                master.cast_replacement()

    @property
    def num_parameters(self) -> int:
        """Parameters stepped on the host."""
        return sum(region.numel for region in self._regions)

    @property
    def weight_bytes(self) -> int:
        """Bytes of their compute copies on the device."""
        return sum(region.weights.nbytes for region in self._regions)

    @property
    def report(self) -> StepReport:
        """What the last optimizer step moved and cost."""
        return self.pipeline.report if self.pipeline is not None else StepReport()

    def detach(self) -> None:
        """Give the module its trained values back, on the CPU and in the dtype it came with; optimizers keep state.

        Never raises over the exception that ended training: if the device no longer answers, the masters count.
        """
        self._hooks.remove()
        for optimizer in self.optimizers:
            optimizer.detach()
        for master in self._masters.values():
            try:
                master.take_over()
            except RuntimeError as error:
                warnings.warn(f"{master.name}: its last value could not be read back ({error}).", stacklevel=2)
            master.restore()
        for region in self._regions:
            region.inherit_on_fork()
        self.threads.shutdown()

    def _hook_all(self, optimizers: Sequence[torch.optim.Optimizer], settings: Settings) -> None:
        # The ring comes first: page-locked memory is the scarcest.
        engine = make_engine(self._device)
        self.pipeline = Pipeline(engine, self.memory, self._slot_bytes, settings.pin_memory)
        if kernels.available():
            kernels.warm_up()
        for optimizer in optimizers:
            hooked = HookedOptimizer(
                optimizer, self._build_regions, self._order, self.pipeline, Watch(self.threads), self.threads
            )
            self.optimizers.append(hooked)

    def _build_regions(self, parameters: Sequence[tuple[int, Tensor]]) -> list[Region]:
        """Regions for parameters given with their group; those that are not ours to step get none."""
        together: dict[tuple[int, torch.dtype], list[Master]] = {}
        for group, parameter in sorted(parameters, key=lambda item: self._place(item[1])):
            if parameter in self._owners and parameter.dtype in (torch.float32, torch.bfloat16):
                dtype = self._rule(self._owners[parameter], parameter, False)
                together.setdefault((group, dtype), []).append(self._master(parameter))
        regions = [
            Region(masters, dtype, self._device, self.memory, self._slot_bytes)
            for (_, dtype), masters in together.items()
        ]
        self._regions.extend(regions)
        return regions

    def _place(self, parameter: Tensor) -> tuple[bool, int]:
        """Forward order, but odd sizes last: behind them, weights would lose the alignment that fast products want."""
        return parameter.numel() % 8 != 0, self._order.get(parameter, -1)

    def _master(self, tensor: Tensor) -> Master:
        if tensor in self._masters:
            self._masters[tensor].adopt()  # frozen until now: what was written to it counts
        else:
            self._masters[tensor] = Master(self._names[tensor], tensor)
        return self._masters[tensor]

    @torch.no_grad()
    def _convert_rest(self) -> None:
        """What no optimizer steps: to the device, and into the compute dtype with the original kept on the host."""
        training = self.pipeline is not None
        owned = {parameter for hooked in self.optimizers for parameter in hooked.parameters()}
        unowned = []
        for tensor, owner in self._owners.items():
            if tensor in self._masters:
                continue
            if training and tensor.requires_grad and tensor not in owned:
                unowned.append(self._names[tensor])
            dtype = self._rule(owner, tensor, training)
            if dtype == tensor.dtype:
                tensor.data = tensor.data.to(self._device)
            else:
                master = self._master(tensor)
                master.bind(tensor.data.to(self._device, dtype))
        if unowned:
            _warn_unowned(unowned)


def _tensors(module: nn.Module) -> Iterable[tuple[nn.Module, Tensor]]:
    """Every parameter and buffer once, with the module that owns it first."""
    seen = set()
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                yield owner, tensor


def _names(module: nn.Module) -> Iterable[tuple[Tensor, str]]:
    for name, parameter in module.named_parameters():
        yield parameter, name
    for name, buffer in module.named_buffers():
        yield buffer, name


def _require_initialised(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet, so it can have no master. "
                "Run the module once on a dummy batch, in configure_model for instance."
            )


def _require_one_owner(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    names = dict(_names(module))
    owner: dict[Tensor, int] = {}
    for index, optimizer in enumerate(optimizers):
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if owner.setdefault(parameter, index) != index:
                raise ValueError(
                    f"parameter {names.get(parameter, '?')!r} is in optimizers {owner[parameter]} and {index}: each "
                    "parameter may have one optimizer under cpu_offload. Put it in one of them only."
                )


def _slot_bytes(module: nn.Module) -> int:
    """Size of a staging buffer, a multiple of any element's size: less than usual for a model that is small."""
    total = sum(parameter.nbytes for parameter in module.parameters())
    wanted = max(total // 16, min(total, SMALL_SLOT_BYTES))  # a small model is pipelined too
    return min(SLOT_BYTES, max(8, -(-wanted // 8) * 8))


def _warn_unowned(names: list[str]) -> None:
    warnings.warn(
        f"{len(names)} parameters, the first of them {names[0]!r}, require gradients but are in no optimizer: they are "
        "not trained here. Freeze them with requires_grad_(False), or add them to an optimizer.",
        stacklevel=2,
    )
