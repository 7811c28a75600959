"""Lightning's hooks that every strategy of this package shares, each a few lines that delegate.

The module is attached in `setup` and detached in `teardown`; in between the offload lives on the module and on the
optimizer objects, and the loops of Lightning run as under any strategy.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.archive import require_checkpoint
from lightning_cpu_offload.averages import Averages
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from lightning_cpu_offload.compare import require_module_fits, require_optimizers_fit
from lightning_cpu_offload.namespaces import join, namespace_of, pl, rank_zero
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.mapped import give_back
from lightning_cpu_offload.offload.moments import STATE_DTYPES
from lightning_cpu_offload.offload.partition import Partition
from lightning_cpu_offload.offload.pipeline import BETWEEN_STEPS
from lightning_cpu_offload.offload.probe import require_host_step, require_reducible
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.precision import precision_for

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as Base
else:
    Base = object


class SharedHooks(Base):
    """What strategies do alike, whatever strategy of Lightning they derive from.

    A constructor calls `_begin` before that of Lightning's strategy.
    """

    strategy_name: str
    _namespace: str

    def _begin(self, settings: Settings, precision_plugin: Any) -> None:
        self._settings = settings
        self._attachment: Attachment | None = None
        self._averages: Averages | None = None
        self._partition: Partition | None = None
        self._torn = False
        self._alone = False
        self._checkpoint_path = "checkpoint"
        # Kept from Lightning, which would not look at the Trainer's `precision` if it saw a plugin here.
        self._given_precision = None if precision_plugin is None else precision_for(precision_plugin, self._namespace)

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

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.choose(self.root_device)
        self._announce_device()
        fitting = trainer.state.fn == "fit"
        self._meet(fitting)
        if fitting:
            self.optimizers = []  # those of an earlier fit still hold their state
            # Before the module is converted: state that an optimizer makes at once is made in FP32, on the host.
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                require_host_step(optimizer)
                require_reducible(optimizer, self._settings.state_dtype)
            self._require_program(trainer)
            self._torn = False
        self._attach(self.optimizers if fitting else [])
        if fitting:
            assert self._attachment is not None
            self._averages = Averages(getattr(trainer, "callbacks", ()), self._attachment)
        self._wrap(fitting)
        self.setup_precision_plugin()

    def _meet(self, fitting: bool) -> None:
        """Before anything is made of the module: agree with other ranks."""

    def _require_program(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be trained with the options chosen; the optimizers are there."""

    def _wrap(self, fitting: bool) -> None:
        """Make of the attached module what Lightning calls."""
        assert self.model is not None
        self.model = self._setup_model(self.model)

    @property
    @override
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super(SharedHooks, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
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
        super().pre_backward(closure_loss)

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
            attachment.detach(alone=self._alone)
            self._torn = attachment.is_torn
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_attachment": None, "_averages": None, "_partition": None}

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The gradient of a parameter as it is now, wherever it lives: FP32, on the CPU, in the parameter's shape.

        A copy; None if there is no gradient, or no training.
        """
        return None if self._attachment is None else self._attachment.gradient(parameter)

    def _attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        module = self.lightning_module
        assert module is not None
        rule = self.precision_plugin.dtype_of
        self._attachment = Attachment(module, optimizers, self.root_device, rule, self._settings, self._partition)
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
            f"{self.strategy_name}: {attachment.num_parameters:,} parameters; {self.root_device} computes in "
            f"{self.precision_plugin.precision} with {_mib(attachment.weight_bytes)} of weights{kept}; the host holds "
            f"{_mib(attachment.memory.nbytes)}, of it a {'pinned' if pipeline.pinned else 'pageable'} ring of "
            f"{_mib(attachment.memory.bytes_by_name['ring'])}; {steps or 'no optimizer'}; "
            f"threads: {attachment.threads.num_threads}; kernels ready in {attachment.warm_up_seconds:.1f} s"
        )


def check_options(
    update: str, exact_steps: Any, nonfinite: str, pin_memory: Any, state_dtype: str, cpu_threads: Any
) -> None:
    """Raise ValueError for an option that is not among the allowed values."""
    require_among("update", update, ("exact", "early", "delayed"))
    require_among("nonfinite", nonfinite, ("skip", "raise"))
    require_among("state_dtype", state_dtype, STATE_DTYPES)
    require_among("pin_memory", pin_memory, (True, False, "auto"))
    if not isinstance(exact_steps, int) or exact_steps < 0:
        raise ValueError(f"exact_steps={exact_steps!r}: a number of steps, 0 or more. Pass 40 if in doubt.")
    if cpu_threads is not None and (not isinstance(cpu_threads, int) or cpu_threads < 1):
        raise ValueError(f"cpu_threads={cpu_threads!r}: a positive number, or None for all physical cores.")


def require_among(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}. Choose one of them.")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
