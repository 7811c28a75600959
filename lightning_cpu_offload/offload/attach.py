"""Attaches a module and its optimizers to the host, and detaches them again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cpu_offload import kernels
from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.adam import is_fused, state_bytes
from lightning_cpu_offload.offload.budget import Bytes, available, free_device, needs, require_fits
from lightning_cpu_offload.offload.flight import StepReport
from lightning_cpu_offload.offload.gate import Gate
from lightning_cpu_offload.offload.gradients import GradientStream, HostGradient
from lightning_cpu_offload.offload.hooked import HookedOptimizer
from lightning_cpu_offload.offload.host import Host
from lightning_cpu_offload.offload.masters import Master, StateDictHooks
from lightning_cpu_offload.offload.memory import HostArena, HostMemory
from lightning_cpu_offload.offload.moments import BORDER_BYTES
from lightning_cpu_offload.offload.nonfinite import Nonfinite
from lightning_cpu_offload.offload.partition import Partition
from lightning_cpu_offload.offload.pipeline import EARLY_DEPTH, RING_DEPTH, SLOT_BYTES, Pipeline
from lightning_cpu_offload.offload.region import Region
from lightning_cpu_offload.offload.resident import choose, require_adam, resident_bytes
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.shown import hit_without_trace, shown
from lightning_cpu_offload.offload.tensors import names_of, require_initialised, tensors_of
from lightning_cpu_offload.offload.transfer import Engine, make_engine
from lightning_cpu_offload.offload.watch import Watch

SMALL_SLOT_BYTES = 64 << 10

DtypeRule = Callable[[nn.Module, Tensor, bool], torch.dtype]
"""The dtype a parameter or buffer of a module is held in on the device.

The third argument says whether others may write to it while it is held, in steps too small for BF16: while training,
all that no optimizer of the module steps (the weights of a momentum teacher, or of another library).
"""


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
        partition: The ranks that train the same module with it, by torch's DDP; each holds a part of the masters.
            None: this process alone.

    Raises:
        ValueError: A parameter is not initialised yet.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        rule: DtypeRule,
        settings: Settings,
        partition: Partition | None = None,
    ) -> None:
        require_initialised(module)
        self.threads = ThreadPool(settings.cpu_threads)
        self.memory = HostMemory(self.threads)
        self._device = device
        self._partition = partition
        self._rule = rule
        self._owners = {tensor: owner for owner, tensor in tensors_of(module)}
        self._names = dict(names_of(module))
        self._order = {tensor: index for index, tensor in enumerate(self._owners)}
        self._masters: dict[Tensor, Master] = {}
        self._region_of: dict[Tensor, Region] = {}
        self._resident: set[Tensor] = set()
        ranks = 1 if partition is None else partition.size
        self._slot_bytes = slot_bytes(module, BORDER_BYTES[settings.state_dtype], ranks)
        self.optimizers: list[HookedOptimizer] = []
        self.host: Host | None = None
        self.warm_up_seconds = 0.0
        self._hooks = StateDictHooks(module, self._masters, self.land)
        try:
            if optimizers:
                self._hook_all(optimizers, settings)
            self._convert_rest()
        except BaseException:
            self.detach(alone=True)
            raise

    def land(self) -> None:
        """Wait until no step is under way: masters and weights agree, and may be read and written."""
        if self.host is not None:
            self.host.land()

    def refresh(self, cast: bool, trains: bool) -> None:
        """Before a step of the module: let it compute with what was written since the last one.

        Args:
            cast: Whether it cannot compute with FP32 data that was put in place of a compute copy.
            trains: Whether it is a training step, which may begin while the optimizer's step is still under way.
        """
        if not trains:
            self.land()
        for master in self._masters.values():
            if master.host_written():
                self.land()
                master.adopt()
            elif cast:
                master.cast_replacement()

    @contextmanager
    def masters_shown(self, for_writing: bool) -> Generator[None, None, None]:
        """Meanwhile the module's tensors are their masters: FP32, on the host, to be read, or written to as well."""
        self.land()
        hit = frozenset[Master]()
        if self.host is not None and not for_writing:
            hit = hit_without_trace(self.regions, self.host.watch)
        masters = self._masters.values()
        with self._gathered(self._arenas()), shown(masters, for_writing, hit, reduced=self._partition is not None):
            yield

    def _gathered(self, arenas: Iterable[HostArena]) -> AbstractContextManager[None]:
        return nullcontext() if self._partition is None else self._partition.gathered(arenas)

    def _arenas(self) -> list[HostArena]:
        return [region.master for region in self.regions if isinstance(region.master, HostArena)]

    def before_backward(self) -> None:
        """What the forward pass did not wait for must be there now, and gradients must have left."""
        if self.host is not None:
            self.host.before_backward()
        for optimizer in self.optimizers:
            optimizer.begin_early()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter as it is now: FP32, on the CPU, in the parameter's shape; a copy."""
        if parameter.grad is None or self.host is None:
            return None
        if isinstance(parameter.grad, HostGradient):
            # Hazard: a step under way would read a sum that is clipped, or widened, in its place meanwhile.
            self.land()
            return parameter.grad.home.total().clone()
        return parameter.grad.detach().to("cpu", torch.float32, copy=True)

    def gradient_norm(self, optimizer: Any) -> Tensor | None:
        """L2 norm of an optimizer's gradients as they are now, a scalar; None if there are none."""
        hooked = self.find(optimizer)
        return hooked.gradient_norm() if hooked is not None else None

    def find(self, optimizer: Any) -> HookedOptimizer | None:
        """What was hung on an optimizer, which may be given in Lightning's wrapper."""
        wrapped = getattr(optimizer, "optimizer", optimizer)
        return next((hooked for hooked in self.optimizers if hooked.optimizer in (optimizer, wrapped)), None)

    @property
    def regions(self) -> list[Region]:
        """Everything that is stepped on the host."""
        return list(dict.fromkeys(self._region_of.values()))

    @property
    def pipeline(self) -> Pipeline | None:
        """The way of the steps; None without optimizers."""
        return self.host.pipeline if self.host is not None else None

    @property
    def num_parameters(self) -> int:
        """Parameters stepped on the host."""
        return sum(region.numel for region in self.regions)

    @property
    def weight_bytes(self) -> int:
        """Bytes of their compute copies on the device."""
        return sum(region.weights.nbytes for region in self.regions)

    @property
    def skipped_steps(self) -> int:
        """Steps that were not made, because a gradient was not finite."""
        return self.host.nonfinite.skipped if self.host is not None else 0

    @property
    def is_torn(self) -> bool:
        """Whether a step has begun that will not end: some masters are stepped, others are not."""
        return self.pipeline is not None and self.pipeline.torn

    @property
    def report(self) -> StepReport:
        """What the last optimizer step moved and cost."""
        return self.pipeline.report if self.pipeline is not None else StepReport()

    def detach(self, alone: bool = False) -> None:
        """Give the module its trained values back, on the CPU and in the dtype it came with; optimizers keep state.

        Never raises over the exception that ended training: if the device no longer answers, the masters count.

        Args:
            alone: Do without other ranks, which may be gone: what they hold is taken from the weights on the device.
        """
        self._land_at_the_end()
        self._complete(alone)
        if self.host is not None and self.host.stream is not None:
            self.host.stream.detach()
        self._hooks.remove()
        for optimizer in self.optimizers:
            with _warns("state of an optimizer"):
                optimizer.detach()
        for master in self._masters.values():
            with _warns(f"{master.name}: its last value"):
                master.take_over()
            with _warns(f"{master.name}: its value on the device"):
                master.restore()
        for region in self.regions:
            region.inherit_on_fork()
        for optimizer in self.optimizers:
            optimizer.inherit_on_fork()
        if self.host is not None:
            self.host.pipeline.engine.shutdown()
        self.threads.shutdown()

    def _land_at_the_end(self) -> None:
        try:
            self.land()
        except Exception as error:  # the step failed, or was refused: its masters are those before it
            warnings.warn(f"the last optimizer step did not end: {error}", stacklevel=3)

    def _complete(self, alone: bool) -> None:
        """Bring here what other ranks hold of the masters, for good."""
        spread = [arena for arena in self._arenas() if not arena.whole]
        if spread and self._partition is not None and not alone:
            for arena in spread:
                self._partition.complete(arena)
        elif spread:
            warnings.warn(
                "training ended by an exception, so what other ranks hold of the FP32 masters was not asked for: the "
                "module has that part as it was on the device, rounded. Continue from the last checkpoint.",
                stacklevel=3,
            )
            for master in self._masters.values():
                if master.share is not None:
                    master.share.make_up()
            for arena in spread:
                arena.whole = True

    def _hook_all(self, optimizers: Sequence[torch.optim.Optimizer], settings: Settings) -> None:
        self._resident = self._choose_resident(optimizers, settings)
        if settings.check_memory:
            self._require_memory(optimizers, settings)
        engine = make_engine(self._device)
        if settings.cpu_threads is None:
            self.threads.leaves_one = engine.training_goes_on
        watch = Watch(self.threads, engine)
        # The staging buffers come first: page-locked memory is the scarcest.
        pipeline = Pipeline(
            engine,
            self.memory,
            self._slot_bytes,
            settings.pin_memory,
            depth=EARLY_DEPTH if settings.update == "early" else RING_DEPTH,
            hold=settings.update == "delayed",
            pushed=watch.pushed,
        )
        self.host = Host(
            self.memory,
            self.threads,
            pipeline,
            Gate(pipeline),
            watch,
            Nonfinite(settings.nonfinite),
            self._make_stream(engine, settings),
            settings.exact_steps,
            early=settings.update == "early",
            state_dtype=settings.state_dtype,
            partition=self._partition,
        )
        if kernels.available():
            self.warm_up_seconds = kernels.warm_up(
                host_gradients=self.host.stream is not None, state_dtype=settings.state_dtype
            )
        for optimizer in optimizers:
            build = partial(self._build_regions, self._partition_of(optimizer))
            self.optimizers.append(HookedOptimizer(optimizer, self.host, build, self._order, self._masters))
        if self._partition is not None:
            self._partition.sealed = True

    def _partition_of(self, optimizer: torch.optim.Optimizer) -> Partition | None:
        """The ranks that share an optimizer's masters and state; None: its own step needs all of them here."""
        partition = self._partition
        return partition if partition is not None and partition.size > 1 and is_fused(optimizer) else None

    def _require_memory(self, optimizers: Sequence[torch.optim.Optimizer], settings: Settings) -> None:
        needed, free = self._needs(optimizers, settings), available(self._device)
        partition = self._partition
        fits = False
        try:
            if partition is not None:  # the ranks of one machine take their memory at the same time
                needed = replace(needed, host=needed.host * settings.local_ranks)
            require_fits(needed, free, pin_required=settings.pin_memory is True)
            fits = True
        finally:
            # Also before the others take theirs: what they have taken by then would count twice.
            everywhere = partition is None or partition.all_agree(fits)
        if not everywhere:
            raise MemoryError("another rank lacks memory; its own error says how much, and what would help.")

    def _choose_resident(self, optimizers: Sequence[torch.optim.Optimizer], settings: Settings) -> set[Tensor]:
        if not settings.device_fraction and settings.device_memory is None:
            return set()
        require_adam(optimizers)
        held = resident_bytes(optimizers)
        trained = {p: held[p] for p in self._owners if p in held and p.requires_grad}
        by_fraction = settings.device_fraction * sum(trained.values())
        return choose(trained, by_fraction if settings.device_memory is None else settings.device_memory)

    def _make_stream(self, engine: Engine, settings: Settings) -> GradientStream | None:
        if settings.gradients == "device" or (settings.gradients == "auto" and self._has_room_for_gradients()):
            return None
        return GradientStream(engine, self.memory, self._slot_bytes, settings.pin_memory, self.threads)

    def _needs(self, optimizers: Sequence[torch.optim.Optimizer], settings: Settings) -> Bytes:
        """Memory that the plan takes above what is taken already."""
        held = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        trained = {p: optimizer for p, optimizer in held.items() if p.requires_grad and p in self._owners}
        ranks = 1 if self._partition is None else self._partition.size
        shares = {p: ranks if is_fused(held[p]) else 1 for p in trained}
        on_host = settings.gradients == "host"
        depth = EARLY_DEPTH if settings.update == "early" else 2 * RING_DEPTH if on_host else RING_DEPTH
        slots = depth * self._slot_bytes
        planes = self._weight_bytes(trained) if settings.update == "delayed" else 0
        on_device = resident_bytes(optimizers)
        return needs(
            weight_bytes=self._weight_bytes(trained),
            numel=math.ceil(sum(p.numel() / shares[p] for p in trained if p not in self._resident)),
            state_bytes=math.ceil(
                sum(
                    state_bytes(held[p], settings.state_dtype) * p.numel() / shares[p]
                    for p in trained
                    if p not in self._resident
                )
            ),
            resident_bytes=sum(on_device[p] for p in self._resident),
            gradients_on_host=on_host,
            staging_bytes=max(slots, planes),
            pin=bool(settings.pin_memory),
            rest_bytes=sum(tensor.nbytes for tensor in self._owners if tensor not in trained),
            held_bytes=sum(p.nbytes for p in trained if p.device.type == "cpu"),
            on_cpu=self._device.type == "cpu",
        )

    def _weight_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(self._rule(self._owners[tensor], tensor, False).itemsize * tensor.numel() for tensor in tensors)

    def _has_room_for_gradients(self) -> bool:
        return 3 * self._weight_bytes(t for t in self._owners if t.requires_grad) <= free_device(self._device)

    def _build_regions(self, partition: Partition | None, parameters: Sequence[tuple[int, Tensor]]) -> list[Region]:
        """Regions for parameters given with their group; those that are not ours to step get none.

        A parameter that another optimizer steps too is in that one's region.
        """
        together: dict[tuple[int, torch.dtype, bool], list[Master]] = {}
        regions = [self._region_of[parameter] for _, parameter in parameters if parameter in self._region_of]
        for group, parameter in sorted(parameters, key=lambda item: self._place(item[1])):
            if parameter in self._region_of or parameter not in self._owners:
                continue
            if self._partition is not None and self._partition.sealed and parameter.requires_grad:
                raise RuntimeError(
                    f"{self._names[parameter]}: unfrozen, or added to an optimizer, after training began; torch's DDP "
                    "reduces gradients of what was trained at the beginning only. Let it require gradients from the "
                    "start, with find_unused_parameters=True."
                )
            dtype = self._rule(self._owners[parameter], parameter, False)
            if dtype in (torch.float32, torch.bfloat16):
                key = group, dtype, parameter in self._resident
                together.setdefault(key, []).append(self._master(parameter))
        for (_, dtype, resident), masters in together.items():
            region = Region(masters, dtype, self._device, self.memory, self._slot_bytes, resident, partition)
            self._region_of.update({master.tensor: region for master in masters})
            if self.host is not None and self.host.stream is not None:
                self.host.stream.attach(region)
            regions.append(region)
        return list(dict.fromkeys(regions))

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
        training = self.host is not None
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


@contextmanager
def _warns(what: str) -> Iterator[None]:
    """At the end: a device that no longer answers must not hide why training ended."""
    try:
        yield
    except RuntimeError as error:
        warnings.warn(f"{what} could not be read back ({error}).", stacklevel=4)


def slot_bytes(module: nn.Module, unit: int, ranks: int = 1) -> int:
    """Size of a staging buffer, a multiple of `unit` bytes: less than usual for what is small of a model here."""
    total = sum(parameter.nbytes for parameter in module.parameters())
    wanted = max(total // (16 * ranks), min(total, SMALL_SLOT_BYTES))  # a small model is pipelined too
    return min(SLOT_BYTES, max(unit, -(-wanted // unit) * unit))


def _warn_unowned(names: list[str]) -> None:
    warnings.warn(
        f"{len(names)} parameters, the first of them {names[0]!r}, require gradients but are in no optimizer: they are "
        "not trained here. Freeze them with requires_grad_(False), or add them to an optimizer.",
        stacklevel=2,
    )
