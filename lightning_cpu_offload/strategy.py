"""The strategy: Lightning's hooks, each a few lines that delegate.

The module is attached in `setup` and detached in `teardown`; in between the offload lives on the module and on the
optimizer objects, and the loops of Lightning run as under any single-device strategy.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from lightning_cpu_offload.namespaces import in_each_namespace, join, namespace_of, pl, rank_zero
from lightning_cpu_offload.offload.attach import Attachment, Settings
from lightning_cpu_offload.offload.probe import require_host_step
from lightning_cpu_offload.precision import precision_for

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object


class StrategyHooks(Base):
    """Trains on one device with FP32 master weights and optimizer state in host memory.

    Args:
        gradients: Where gradients live until the step: `"device"`, on the module's parameters as in any run.
        pin_memory: Page-lock the staging buffers: True, False, or `"auto"`: where the machine allows it. Only
            staging is page-locked (32 MiB); the state never crosses the bus.
        cpu_threads: Threads of the host step. None: one for each physical core this process may use.
        device: Any torch device. None: the one of the Trainer.
        accelerator: As for any strategy.
        checkpoint_io: As for any strategy. None: written straight to disk, atomically.
        precision_plugin: A `CPUOffloadPrecision`, to compute in FP32 for instance. None: by the Trainer's `precision`.

    Raises:
        ValueError: An option that is not among the allowed values, a precision that is not computed here, or more
            than one device.
    """

    strategy_name = "cpu_offload"
    _variants: dict[str, type]
    _namespace: str

    def __init__(
        self,
        *,
        gradients: Literal["device"] = "device",
        pin_memory: bool | Literal["auto"] = "auto",
        cpu_threads: int | None = None,
        device: str | torch.device | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
    ) -> None:
        _require("gradients", gradients, ("device",))
        _require("pin_memory", pin_memory, (True, False, "auto"))
        if cpu_threads is not None and (not isinstance(cpu_threads, int) or cpu_threads < 1):
            raise ValueError(f"cpu_threads={cpu_threads!r}: a positive number, or None for all physical cores.")
        self._settings = Settings(pin_memory=pin_memory, cpu_threads=cpu_threads)
        self._device = None if device is None else torch.device(device)
        self._parallel_devices: list[torch.device] = []
        self._attachment: Attachment | None = None
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    @property
    def offload(self) -> Attachment | None:
        """What is held on the host while the module is attached, else None."""
        return self._attachment

    @property
    @override
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Any) -> None:
        # The first thing a Trainer gives its strategy: from here on the namespace is known.
        join(self, namespace_of(accelerator))
        self._accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> Any:
        return self._precision_plugin or precision_for(None, self._namespace)

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Any) -> None:
        # None while Lightning still looks for a plugin; it then makes one of the Trainer's `precision`.
        self._precision_plugin = None if plugin is None else precision_for(plugin, self._namespace)
        if self._precision_plugin is not None:
            join(self._precision_plugin, self._namespace)

    @property
    @override
    def checkpoint_io(self) -> Any:
        chosen: Any = self._checkpoint_io
        if chosen is None:
            self._checkpoint_io = StreamingCheckpointIO._variants[self._namespace]()
        elif hasattr(type(chosen), "checkpoint_io"):  # a wrapper (AsyncCheckpointIO): takes one if it has none
            chosen.checkpoint_io = StreamingCheckpointIO._variants[self._namespace]()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices the Trainer was given; one is what this strategy trains on."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise ValueError(
                f"devices={len(devices)}: strategy='cpu_offload' trains on one device. "
                "Pass devices=1, or devices=[index] to choose one."
            )
        self._parallel_devices = list(devices or [])

    @property
    def num_nodes(self) -> int:
        """Machines the Trainer was given: one."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(f"num_nodes={num_nodes}: strategy='cpu_offload' trains on one machine. Pass num_nodes=1.")

    @property
    @override
    def root_device(self) -> torch.device:
        if self._device is not None:
            return self._device
        return self._parallel_devices[0] if self._parallel_devices else torch.device("cpu")

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.choose(self.root_device)
        self._announce_device()
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.optimizers = []  # those of an earlier fit still hold their state
            # Before the module is converted: state that an optimizer makes at once is made in FP32, on the host.
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                require_host_step(optimizer)
        self._attach(self.optimizers if fitting else [])
        self.model = self._setup_model(self.model)
        self.setup_precision_plugin()

    @property
    @override
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super(StrategyHooks, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        stepped = self._attachment.optimizers if self._attachment is not None else []
        if stepped and any(optimizer not in [hooked.optimizer for hooked in stepped] for optimizer in optimizers):
            raise ValueError(
                "optimizers: replaced by new ones during fit, which would step BF16 weights without their masters. "
                "Change the settings of the optimizers there are, or call Trainer.fit again."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Lightning would move the state to the device after loading.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Modules built by Lightning are built like the user's own, in FP32 on the CPU: masters come from it.
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def teardown(self) -> None:
        attachment, self._attachment = self._attachment, None
        self.precision_plugin.detach()
        if attachment is not None:
            attachment.detach()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_attachment": None}

    def _attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        module = self.lightning_module
        assert module is not None
        rule = self.precision_plugin.dtype_of
        self._attachment = Attachment(module, optimizers, self.root_device, rule, self._settings)
        self.precision_plugin.attach(module, self._attachment.refresh)
        module.to(self.root_device)  # parameters and buffers are there; this is for what else a module moves (metrics)
        if optimizers:
            rank_zero(self._namespace, "rank_zero_info")(self._plan(self._attachment))

    def _announce_device(self) -> None:
        """Let `module.device` be where the module is about to compute, as it is in any `configure_optimizers`."""
        assert self.lightning_module is not None
        for part in self.lightning_module.modules():
            if hasattr(part, "_device"):
                vars(part)["_device"] = self.root_device

    def _plan(self, attachment: Attachment) -> str:
        pipeline = attachment.pipeline
        assert pipeline is not None
        kernel = "one-pass kernel" if kernels.available() else f"torch operations ({kernels.IMPORT_ERROR})"
        steps = ", ".join(
            f"{type(hooked.optimizer).__name__} by {kernel if hooked.is_fused else 'its own step'}"
            for hooked in attachment.optimizers
            if hooked.regions
        )
        return (
            f"cpu_offload: {attachment.num_parameters:,} parameters; {self.root_device} computes in "
            f"{self.precision_plugin.precision} with {_mib(attachment.weight_bytes)} of weights; the host holds "
            f"{_mib(attachment.memory.nbytes)}, of it a {'pinned' if pipeline.pinned else 'pageable'} ring of "
            f"{_mib(attachment.memory.bytes_by_name['ring'])}; {steps or 'no optimizer'}; "
            f"threads: {attachment.threads.num_threads}"
        )


if TYPE_CHECKING:
    CPUOffloadStrategy = StrategyHooks
else:
    CPUOffloadStrategy = in_each_namespace("CPUOffloadStrategy", StrategyHooks, "strategies.SingleDeviceStrategy")


def _require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}. Choose one of them.")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
