"""The strategy of several devices: torch's DistributedDataParallel, with masters and moments spread over the ranks.

Each rank holds all BF16 weights and 1/N of the FP32 masters and of Adam's moments, in its own host memory. Gradients
are reduced by torch's DDP; each rank steps its part on its host, and the new weights are broadcast.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
import itertools
import os
import platform
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from lightning_cpu_offload.hooks import SharedHooks, check_options
from lightning_cpu_offload.kernels.threads import physical_cores
from lightning_cpu_offload.namespaces import in_each_namespace, pl
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.deferred import materialized
from lightning_cpu_offload.offload.partition import Partition
from lightning_cpu_offload.offload.settings import Settings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as Base
else:
    Base = object

_DEFAULT_TIMEOUT = timedelta(minutes=30)

_ONE_DEVICE = {
    "gradients": "they are reduced on the device, where they stay until the step; accumulate more and smaller batches",
    "device_fraction": "spare memory of the devices is best spent on larger batches",
    "device_memory": "spare memory of the devices is best spent on larger batches",
    "device": "the Trainer's accelerator and devices say which; pass devices=[...]",
    "model_averaging_period": "weights that are averaged have no masters; use ddp_comm_hook without it",
}
"""Options that this strategy does not have, and what is to be done instead."""

INTERRUPTED = (
    "training was ended by an exception, on this rank or another, so the masters that other ranks hold cannot be asked "
    "for: nothing is saved, the last checkpoint stays. Resume from it."
)


class DDPHooks(SharedHooks, Base):
    """Trains on several devices, with FP32 masters and Adam's moments in the host memory of the rank that steps them.

    Each rank holds all weights in the device dtype, and `12 / N` bytes per parameter on its host. Optimizers other than
    Adam and AdamW keep all of their masters and state on every rank, where they make the same step.

    Args:
        update: `"exact"`: the next batch sees the step. `"delayed"`: the host steps under the next accumulation window,
            whose batches see weights that are one step old; for Adam and AdamW.
        exact_steps: With `update="delayed"`, so many steps are exact before the first delayed one.
        nonfinite: When a gradient is NaN or infinite: `"skip"` the step on all ranks with a warning (an error after 8
            in a row), or `"raise"`. Weights and optimizer state stay as they are.
        pin_memory: Page-lock the staging buffers: True, False, or `"auto"`: where the machine allows it.
        state_dtype: What the moments of Adam and AdamW are held in: `"float32"` (8 bytes per parameter), `"bfloat16"`
            (4) or `"float8"` (2 and 1/32).
        cpu_threads: Threads of each rank's host step. None: the physical cores this process may use, divided by the
            ranks that may use the same ones; `OMP_NUM_THREADS`, which torchrun sets to 1, is not looked at.
        check_memory: Refuse to begin what cannot fit into memory, with the numbers and what would help.
        accelerator: As for any strategy.
        parallel_devices: As for `DDPStrategy`.
        cluster_environment: As for `DDPStrategy`.
        checkpoint_io: As for any strategy. None: written straight to disk by rank 0, piece by piece, atomically.
        precision_plugin: A `CPUOffloadPrecision`, to compute in FP32 for instance. None: by the Trainer's `precision`.
        ddp_comm_state: As for `DDPStrategy`.
        ddp_comm_hook: As for `DDPStrategy`.
        ddp_comm_wrapper: As for `DDPStrategy`.
        process_group_backend: As for `DDPStrategy`.
        timeout: As for `DDPStrategy`.
        start_method: As for `DDPStrategy`.
        **kwargs: For torch's `DistributedDataParallel`, such as `find_unused_parameters` or `static_graph`;
            `gradient_as_bucket_view` is True if not given.

    Raises:
        ValueError: An option that is not among the allowed values, or one of the strategy of a single device.
        MemoryError: When training begins, if it cannot fit.
    """

    strategy_name = "cpu_offload_ddp"
    _variants: dict[str, type]
    _namespace: str

    def __init__(
        self,
        *,
        update: Literal["exact", "delayed"] = "exact",
        exact_steps: int = 40,
        nonfinite: Literal["skip", "raise"] = "skip",
        pin_memory: bool | Literal["auto"] = "auto",
        state_dtype: Literal["float32", "bfloat16", "float8"] = "float32",
        cpu_threads: int | None = None,
        check_memory: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        for name in _ONE_DEVICE.keys() & kwargs.keys():
            if (name, kwargs.pop(name)) not in (("gradients", "device"), ("device_fraction", 0.0)):
                raise ValueError(f"{name}: strategy='cpu_offload_ddp' does not take it: {_ONE_DEVICE[name]}.")
        if type(ddp_comm_state).__name__ == "PostLocalSGDState":
            raise ValueError(
                "ddp_comm_state=PostLocalSGDState: it reduces gradients among a few ranks only, but each part of the "
                "masters is stepped by one rank for all of them. Pass another ddp_comm_hook, or none."
            )
        check_options(update, exact_steps, nonfinite, pin_memory, state_dtype, cpu_threads)
        if str(update) == "early":
            raise ValueError(
                "update='early': a step would begin before gradients are reduced, which torch's DDP does at the end of "
                "backward. Use update='exact' or 'delayed'."
            )
        settings = Settings(
            update=update,
            exact_steps=exact_steps,
            nonfinite=nonfinite,
            pin_memory=pin_memory,
            cpu_threads=cpu_threads,
            check_memory=check_memory,
            state_dtype=state_dtype,
        )
        self._begin(settings, precision_plugin)
        self._group: Any = None
        # Weights are the same everywhere before torch's DDP sees them: their masters are.
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **{"gradient_as_bucket_view": True, "init_sync": False, **kwargs},
        )

    @contextmanager
    def gathered(self) -> Generator[None, None, None]:
        """Meanwhile every rank has all FP32 masters and all optimizer state: 12 bytes per parameter on each.

        Call it on every rank. Within it, `state_dict()` of module and optimizers return copies, and
        `optimizer.state[parameter]` holds whole tensors, which afterwards are parts again.

        Raises:
            RuntimeError: Training was ended by an exception.
        """
        self._require_everybody()
        if self._attachment is not None:
            self._attachment.land()
        if self._partition is None:
            yield
            return
        with self._partition.gathered():
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._deferring():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with self._deferring():
            return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        partition = self._partition
        if partition is None or partition.size == 1:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._require_everybody()
        if self._attachment is not None:
            self._attachment.land()
        streams = type(self.checkpoint_io) in StreamingCheckpointIO._variants.values()
        save = super().save_checkpoint

        def write() -> None:
            save(checkpoint if streams else materialized(checkpoint), filepath, storage_options)

        partition.write_on_first(write)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._alone = True
        if self.world_size > 1:
            warnings.warn(
                f"rank {self.global_rank} of {self.world_size} ends by {type(exception).__name__}: {exception}\n"
                f"The other ranks end when they wait for it in vain, after timeout={self._timeout} at the latest, and "
                "no rank saves what it has. Resume from the last checkpoint.",
                stacklevel=2,
            )
        super().on_exception(exception)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": None}

    @override
    def _meet(self, fitting: bool) -> None:
        module = self.model
        assert module is not None
        self._alone = False
        if self._group is None:
            self._group = dist.new_group(timeout=self._timeout, backend=self._process_group_backend)
        if fitting or self._partition is None:  # else optimizers of the last fit are still saved by the one they had
            self._partition = Partition(self.root_device, self._group)
        if fitting and self._layer_sync is not None:
            self.model = module = self._layer_sync.apply(module)
        self._partition.copy_first(itertools.chain(module.parameters(), module.buffers()))

    @override
    def _wrap(self, fitting: bool) -> None:
        if fitting:
            self.configure_ddp()

    @override
    def _require_program(self, trainer: "pl.Trainer") -> None:
        if self._ddp_kwargs.get("static_graph") and trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}: with static_graph=True torch's DDP must "
                "reduce gradients in the first backward, which accumulation leaves to a later one. Pass "
                "static_graph=False, or accumulate_grad_batches=1."
            )

    @override
    def _attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        assert self._partition is not None
        sharing = self._partition.count_like(_cores())
        threads = self._settings.cpu_threads or max(1, physical_cores() // sharing)
        local_ranks = max(1, self.num_processes)
        given, self._settings = self._settings, replace(self._settings, cpu_threads=threads, local_ranks=local_ranks)
        try:
            super()._attach(optimizers)
        finally:
            self._settings = given

    @override
    def _plan(self, attachment: Attachment) -> str:
        assert self._partition is not None
        spread = sum(region.numel for region in attachment.regions if region.spread is not None)
        everywhere = sum(region.numel for region in attachment.regions if region.spread is None)
        plan = f"{super()._plan(attachment)}; {spread:,} parameters are spread over {self._partition.size} ranks"
        return f"{plan}, {everywhere:,} are stepped on each of them" if everywhere else plan

    @contextmanager
    def _deferring(self) -> Generator[None, None, None]:
        """Meanwhile what other ranks hold is shown by tensors that are read when they are saved."""
        self._require_everybody()
        partition = self._partition
        if partition is None:
            yield
            return
        partition.deferring = True
        try:
            yield
        finally:
            partition.deferring = False

    def _require_everybody(self) -> None:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if self._alone or (trainer is not None and trainer.state.status == "interrupted"):
            raise RuntimeError(INTERRUPTED)


def _cores() -> str:
    """Names the machine and the cores of it that this process may use, which other ranks may share or not."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "all"
    return f"{platform.node()} {allowed}"


if TYPE_CHECKING:
    CPUOffloadDDPStrategy = DDPHooks
else:
    CPUOffloadDDPStrategy = in_each_namespace("CPUOffloadDDPStrategy", DDPHooks, "strategies.DDPStrategy")
