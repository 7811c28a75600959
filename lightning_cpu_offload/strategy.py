"""The strategy of one device.

What it shares with others is in `hooks`; here are its options, and what is refused.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_cpu_offload.hooks import SharedHooks, check_options, require_among
from lightning_cpu_offload.namespaces import in_each_namespace, pl
from lightning_cpu_offload.offload.adam import is_fused
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.sizes import parse_bytes
from lightning_cpu_offload.precision import is_overridden

_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
"""Hooks of modules and callbacks that run between backward and the step, or decide on it."""

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object


class StrategyHooks(SharedHooks, Base):
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
        require_among("gradients", gradients, ("device", "host", "auto"))
        check_options(update, exact_steps, nonfinite, pin_memory, state_dtype, cpu_threads)
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
        settings = Settings(
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
        self._begin(settings, precision_plugin)
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io)

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
    def _require_program(self, trainer: "pl.Trainer") -> None:
        if self._settings.update == "early":
            _require_early(trainer, self.lightning_module, self.optimizers, self._namespace)


if TYPE_CHECKING:
    CPUOffloadStrategy = StrategyHooks
else:
    CPUOffloadStrategy = in_each_namespace("CPUOffloadStrategy", StrategyHooks, "strategies.SingleDeviceStrategy")


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
