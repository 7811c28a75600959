"""The strategy: Lightning's hooks, each a few lines that delegate.

The module is attached in `setup` and detached in `teardown`; in between the offload lives on the module and on the
optimizer objects, and the loops of Lightning run as under any single-device strategy.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.archive import require_checkpoint
from lightning_cpu_offload.averages import Averages
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from lightning_cpu_offload.compare import require_module_fits, require_optimizers_fit
from lightning_cpu_offload.namespaces import in_each_namespace, join, namespace_of, pl, rank_zero
from lightning_cpu_offload.offload.adam import is_fused
from lightning_cpu_offload.offload.attach import Attachment, Settings
from lightning_cpu_offload.offload.mapped import give_back
from lightning_cpu_offload.offload.moments import STATE_DTYPES
from lightning_cpu_offload.offload.pipeline import BETWEEN_STEPS
from lightning_cpu_offload.offload.probe import require_host_step, require_reducible
from lightning_cpu_offload.offload.sizes import parse_bytes
from lightning_cpu_offload.precision import is_overridden, precision_for

_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
"""Hooks of modules and callbacks that run between backward and the step, or decide on it."""

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object


class StrategyHooks(Base):
    """Trains on one device with FP32 master weights and optimizer state in host memory.

    Args:
        gradients: Where gradients live until the step. `"device"`: on the module's parameters, as in any run. `"host"`:
            each leaves when autograd has it and is summed up in FP32 on the host, which spares 2 bytes per parameter on
            the device, takes 4 on the host, and costs a transfer of all gradients for each batch. `"auto"`: by the
            device memory that is free when training begins.
        update: `"exact"`: the next batch sees the step. `"early"`: the same numbers, but the step begins under the last
            backward of a window, as gradients become complete; for one Adam or AdamW without clipping, with
            `nonfinite="raise"` and no hooks that look at gradients; a run that ends inside such a backward cannot be
            saved then, the last checkpoint stays. `"delayed"`: the host steps under the next accumulation window,
            whose batches see weights that are one step old; for Adam and AdamW.
        exact_steps: With `update="delayed"`, so many steps are exact before the first delayed one.
        nonfinite: When a gradient is NaN or infinite: `"skip"` the step with a warning (an error after 8 in a row),
            or `"raise"`. Weights and optimizer state stay as they are.
        pin_memory: Page-lock the staging buffers: True, False, or `"auto"`: where the machine allows it. Only
            staging is page-locked (32 MiB); the state never crosses the bus.
        state_dtype: What the moments of Adam and AdamW are held in: `"float32"` (8 bytes per parameter), `"bfloat16"`
            (4) or `"float8"` (2 and 1/32), rounded so that the mean is right. Masters stay FP32, and `optimizer.state`
            and checkpoints show FP32.
        cpu_threads: Threads of the host step. None: one for each physical core this process may use.
        device_fraction: Part of the masters and of the optimizer state, from 0 to 1, that is kept and stepped on the
            device while the host steps the rest: spare device memory buys speed. The results are those of an exact
            step, and checkpoints are the same. For Adam and AdamW, with `gradients="device"` and `update="exact"`.
        device_memory: The same as an amount of device memory for masters and state, in bytes or as in `"8GiB"`; instead
            of `device_fraction`. What does not fit stays on the host.
        check_memory: Refuse to begin what cannot fit into memory, with the numbers and what would help.
        device: Any torch device. None: the one of the Trainer.
        accelerator: As for any strategy.
        checkpoint_io: As for any strategy. None: written straight to disk, atomically.
        precision_plugin: A `CPUOffloadPrecision`, to compute in FP32 for instance. None: by the Trainer's `precision`.

    Raises:
        ValueError: An option that is not among the allowed values, a precision that is not computed here, or more
            than one device.
        MemoryError: When training begins, if it cannot fit.
    """

    strategy_name = "cpu_offload"
    _variants: dict[str, type]
    _namespace: str

    def __init__(
        self,
        *,
        gradients: Literal["device", "host", "auto"] = "device",
        update: Literal["exact", "early", "delayed"] = "exact",
        exact_steps: int = 40,
        nonfinite: Literal["skip", "raise"] = "skip",
        pin_memory: bool | Literal["auto"] = "auto",
        state_dtype: Literal["float32", "bfloat16", "float8"] = "float32",
        cpu_threads: int | None = None,
        device_fraction: float = 0.0,
        device_memory: int | str | None = None,
        check_memory: bool = True,
        device: str | torch.device | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
    ) -> None:
        _require("gradients", gradients, ("device", "host", "auto"))
        _require("update", update, ("exact", "early", "delayed"))
        _require("nonfinite", nonfinite, ("skip", "raise"))
        _require("state_dtype", state_dtype, STATE_DTYPES)
        _require("pin_memory", pin_memory, (True, False, "auto"))
        if not isinstance(exact_steps, int) or exact_steps < 0:
            raise ValueError(f"exact_steps={exact_steps!r}: a number of steps, 0 or more. Pass 40 if in doubt.")
        if cpu_threads is not None and (not isinstance(cpu_threads, int) or cpu_threads < 1):
            raise ValueError(f"cpu_threads={cpu_threads!r}: a positive number, or None for all physical cores.")
        if update != "exact" and gradients != "device":
            raise ValueError(
                f"gradients={gradients!r}: update={update!r} needs gradients='device', as the host reads them while "
                "those of another step, or of the same one, are made. Choose one of the two."
            )
        if update == "early" and nonfinite != "raise":
            raise ValueError(
                f"nonfinite={nonfinite!r}: update='early' needs nonfinite='raise', as a step that has begun cannot be "
                "skipped. Choose one of the two."
            )
        _require_share(device_fraction, device_memory, gradients, update)
        self._settings = Settings(
            gradients=gradients,
            update=update,
            exact_steps=exact_steps,
            nonfinite=nonfinite,
            pin_memory=pin_memory,
            cpu_threads=cpu_threads,
            check_memory=check_memory,
            device_fraction=float(device_fraction),
            device_memory=None if device_memory is None else parse_bytes(device_memory),
            state_dtype=state_dtype,
        )
        self._device = None if device is None else torch.device(device)
        self._parallel_devices: list[torch.device] = []
        self._attachment: Attachment | None = None
        self._averages: Averages | None = None
        self._torn = False
        self._checkpoint_path = "checkpoint"
        # Kept from Lightning, which would not look at the Trainer's `precision` if it saw a plugin here.
        self._given_precision = None if precision_plugin is None else precision_for(precision_plugin, self._namespace)
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io)

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
        return self._precision_plugin or self._given_precision or precision_for(None, self._namespace)

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Any) -> None:
        # None while Lightning still looks for a plugin; it then makes one of the Trainer's `precision`.
        given = self._given_precision
        self._precision_plugin = None if plugin is None else precision_for(plugin, self._namespace, given)
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
                require_reducible(optimizer, self._settings.state_dtype)
            if self._settings.update == "early":
                _require_early(trainer, self.lightning_module, self.optimizers, self._namespace)
            self._torn = False
        self._attach(self.optimizers if fitting else [])
        if fitting:
            assert self._attachment is not None
            self._averages = Averages(getattr(trainer, "callbacks", ()), self._attachment)
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
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoint_path = str(checkpoint_path)
        require_checkpoint(checkpoint, self._checkpoint_path)
        return checkpoint

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._torn:
            raise RuntimeError(BETWEEN_STEPS)
        super().save_checkpoint(*args, **kwargs)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        require_module_fits(checkpoint["state_dict"], self.lightning_module, self._checkpoint_path, strict)
        super().load_model_state_dict(checkpoint, strict=strict)
        give_back(checkpoint["state_dict"])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        require_optimizers_fit(checkpoint["optimizer_states"], self.optimizers, self._checkpoint_path)
        # Lightning would move the state to the device after loading.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        hooked = None if self._attachment is None else self._attachment.find(optimizer)
        before = hooked.num_calls if hooked is not None else 0
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if hooked is not None and hooked.num_calls == before:
            raise RuntimeError(
                f"optimizer={type(hooked.optimizer).__name__}: the step put on the object does not run torch's hooks, "
                "by which the host steps. Call the step of its class in it."
            )
        return result

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._attachment is not None:
            self._attachment.before_backward()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Modules built by Lightning are built like the user's own, in FP32 on the CPU: masters come from it.
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def teardown(self) -> None:
        averages, self._averages = self._averages, None
        if averages is not None:
            averages.detach()
        attachment, self._attachment = self._attachment, None
        self.precision_plugin.detach()
        if attachment is not None:
            attachment.detach()
            self._torn = attachment.is_torn
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_attachment": None, "_averages": None}

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The gradient of a parameter as it is now, wherever it lives: FP32, on the CPU, in the parameter's shape.

        A copy; None if there is no gradient, or no training.
        """
        return None if self._attachment is None else self._attachment.gradient(parameter)

    def _attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        module = self.lightning_module
        assert module is not None
        rule = self.precision_plugin.dtype_of
        self._attachment = Attachment(module, optimizers, self.root_device, rule, self._settings)
        self.precision_plugin.attach(module, self._attachment)
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
        if self._settings.state_dtype != "float32":
            kernel += f" with {self._settings.state_dtype} moments"
        steps = ", ".join(
            f"{type(hooked.optimizer).__name__} by {kernel if hooked.is_fused else 'its own step'}"
            for hooked in attachment.optimizers
            if hooked.regions
        )
        resident = sum(region.numel for region in attachment.regions if region.resident)
        kept = f", and {_mib(attachment.memory.device_bytes)} for stepping {resident:,} of them" if resident else ""
        return (
            f"cpu_offload: {attachment.num_parameters:,} parameters; {self.root_device} computes in "
            f"{self.precision_plugin.precision} with {_mib(attachment.weight_bytes)} of weights{kept}; the host holds "
            f"{_mib(attachment.memory.nbytes)}, of it a {'pinned' if pipeline.pinned else 'pageable'} ring of "
            f"{_mib(attachment.memory.bytes_by_name['ring'])}; {steps or 'no optimizer'}; "
            f"threads: {attachment.threads.num_threads}; kernels ready in {attachment.warm_up_seconds:.1f} s"
        )


if TYPE_CHECKING:
    CPUOffloadStrategy = StrategyHooks
else:
    CPUOffloadStrategy = in_each_namespace("CPUOffloadStrategy", StrategyHooks, "strategies.SingleDeviceStrategy")


def _require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}. Choose one of them.")


def _require_share(device_fraction: float, device_memory: int | str | None, gradients: str, update: str) -> None:
    if isinstance(device_fraction, str) or not 0 <= device_fraction <= 1:
        raise ValueError(f"device_fraction={device_fraction!r}: from 0 to 1. Pass 0.3 for about a third.")
    if device_memory is not None:
        try:
            parse_bytes(device_memory)
        except ValueError as error:
            raise ValueError(f"device_memory={device_memory!r}: a number of bytes, or as in '8GiB'. {error}") from None
    if device_fraction and device_memory is not None:
        raise ValueError(
            f"device_memory={device_memory!r}: device_fraction={device_fraction!r} says the same in another way. "
            "Pass one of the two."
        )
    if not device_fraction and device_memory is None:
        return
    name = "device_fraction" if device_fraction else "device_memory"
    if update == "delayed":
        raise ValueError(
            f"update={update!r}: {name} needs update='exact' or 'early'. A delayed step costs no time that a step "
            "on the device could save. Choose one of the two."
        )
    if gradients != "device":
        raise ValueError(
            f"gradients={gradients!r}: {name} needs gradients='device', on which spare device memory is best spent "
            "first. Choose one of the two."
        )


def _require_early(trainer: Any, module: Any, optimizers: list[Any], namespace: str) -> None:
    """Whether nothing looks at gradients between backward and the step."""
    remedy = "Use update='exact'."
    if not module.automatic_optimization:
        raise ValueError(f"update='early': it cannot be known which backward of manual optimization is last. {remedy}")
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val!r}: update='early' steps before all gradients are there, so "
            f"it cannot clip them. {remedy}"
        )
    if len(optimizers) != 1 or not is_fused(optimizers[0]):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ValueError(f"optimizers={names}: update='early' is for one torch.optim.AdamW or Adam. {remedy}")
    for owner in (module, *trainer.callbacks):
        for hook in _AFTER_BACKWARD:
            if hasattr(owner, hook) and is_overridden(owner, hook, (namespace, f"{__package__}.")):  # ours only read
                raise ValueError(
                    f"{type(owner).__name__}.{hook}: update='early' has stepped with gradients before this hook may "
                    f"see or change them. {remedy}"
                )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
