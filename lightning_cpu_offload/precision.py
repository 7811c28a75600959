"""What is computed in which dtype, over FP32 masters.

`"bf16-mixed"` (the default) holds matrices (parameters with two or more dimensions) in BF16 and runs steps under
autocast; vectors, buffers and inputs stay as they are. `"bf16-true"` holds everything in BF16, which large language
models bear and which saves FP32 activations. `"32-true"` computes in FP32 throughout.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from lightning_cpu_offload.namespaces import in_each_namespace, rank_zero
from lightning_cpu_offload.offload.clip import Clip

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as Base

    from lightning_cpu_offload.offload.attach import Attachment
else:
    Base = object

Compute = Literal["bf16-mixed", "bf16-true", "32-true"]
COMPUTE = get_args(Compute)

PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.MultiheadAttention)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Bilinear)
LARGE = 1 << 16
PLAIN = ("Precision", "NoneType")  # what Lightning makes of a precision that was left unset, or is "32-true"


class PrecisionHooks(Base):
    """Computes in BF16 (or FP32) on the device while FP32 masters stay on the host.

    Args:
        precision: `"bf16-mixed"`, `"bf16-true"` or `"32-true"`. None: `"bf16-mixed"`, or `"32-true"` on a CPU whose
            BF16 products are slow.

    Raises:
        ValueError: `precision` is none of these.
    """

    _variants: dict[str, type]
    _namespace: str

    def __init__(self, precision: Compute | None = None) -> None:
        if precision is not None and precision not in COMPUTE:
            raise ValueError(
                f"precision={precision!r}: CPUOffloadPrecision computes in one of {', '.join(map(repr, COMPUTE))}. "
                "Choose one of them, or leave it unset."
            )
        self._asked = precision
        self.precision = precision or "bf16-mixed"
        self._device_type = "cpu"
        self._handles: list[Any] = []
        self._dtypes: list[tuple[nn.Module, torch.dtype]] = []
        self._attachment: Attachment | None = None
        self._outside: OutsideSteps | None = None
        self._clips_last = False

    @property
    def _desired_input_dtype(self) -> torch.dtype:
        # What Lightning asks a HalfPrecision for: by it, ThroughputMonitor chooses the peak it divides by.
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    def choose(self, device: torch.device) -> None:
        """Decide on the compute dtype, now that the device is known."""
        self._device_type = device.type
        if self._asked is None:
            self.precision = "bf16-mixed"
            if device.type == "cpu" and not cpu_has_fast_bf16():
                self.precision = "32-true"
                rank_zero(self._namespace, "rank_zero_info")(
                    "cpu_offload: BF16 products are slow on this CPU, so the module computes in FP32. "
                    'Pass precision="bf16-mixed" or "bf16-true" to compute in BF16 all the same.'
                )

    def dtype_of(self, owner: nn.Module, tensor: Tensor, others_write: bool) -> torch.dtype:
        """The dtype in which a parameter or buffer of `owner` is held on the device.

        Under `"bf16-mixed"` a matrix that others than the optimizers may write to stays as it is, as under Lightning's
        own: the small steps of a momentum teacher would vanish in BF16.
        """
        if self.precision == "bf16-true":
            is_rounded = tensor.is_floating_point() and not _would_be_ruined(owner, tensor)
            return torch.bfloat16 if is_rounded else tensor.dtype
        if tensor.dtype != torch.float32:
            return tensor.dtype
        is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2 and _goes_into_products(owner, tensor)
        to_bf16 = self.precision == "bf16-mixed" and is_matrix and not others_write
        return torch.bfloat16 if to_bf16 else tensor.dtype

    def attach(self, module: nn.Module, attachment: "Attachment") -> None:
        """Let the module, and parts of it, be called outside steps too: from hooks and callbacks.

        Args:
            module: Already converted.
            attachment: What holds its masters; told when a step begins.
        """
        self._attachment = attachment
        # Whether Lightning's clipping is the last thing that happens to gradients before the step.
        self._clips_last = getattr(module, "automatic_optimization", False) and not is_overridden(
            module, "configure_gradient_clipping", self._namespace
        )
        if self.precision == "bf16-mixed":
            self._outside = OutsideSteps(self._device_type)
            for part in _holders_of_bf16(module):
                self._handles.append(part.register_forward_pre_hook(self._outside.enter))
                self._handles.append(part.register_forward_hook(self._outside.leave, always_call=True))
                if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                    self._handles.append(part.register_forward_hook(_as_autocast_leaves_it))
        elif self.precision == "bf16-true":
            self._handles.append(module.register_forward_pre_hook(_convert_arguments, with_kwargs=True))
            for part in module.modules():
                if "_dtype" in vars(part):  # what `module.dtype` answers
                    self._dtypes.append((part, vars(part)["_dtype"]))
                    vars(part)["_dtype"] = torch.bfloat16

    def detach(self) -> None:
        """Undo `attach`."""
        while self._dtypes:
            part, dtype = self._dtypes.pop()
            vars(part)["_dtype"] = dtype
        while self._handles:
            self._handles.pop().remove()
        if self._outside is not None:
            self._outside.unwind()
        self._attachment = self._outside = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Leaves the module alone: the strategy converts it, and keeps the FP32 values."""
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        """Under `"bf16-true"`, floating-point tensors in BF16; else the input itself, never rebuilt."""
        return _to_bf16(data) if self.precision == "bf16-true" else data

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        """Surrounds each step: autocast for `"bf16-mixed"`, BF16 as default dtype for `"bf16-true"`."""
        with self._step_context(trains=False):
            yield

    @contextmanager
    @override
    def train_step_context(self) -> Generator[None, None, None]:
        """The same for a training step, which may begin while the optimizer's step is still under way."""
        with self._step_context(trains=True):
            yield

    @override
    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """As torch clips, but gradients whose norm is not finite are left alone: their step will not be made."""
        hooked = None if self._attachment is None else self._attachment.find(optimizer)
        if hooked is not None and hooked.streams:
            hooked.clip = Clip(max_norm=clip_val)
            return
        parameters = list(self.main_params(optimizer))
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, torch.where(norm.isfinite(), norm, 0.0))
        if hooked is not None and self._clips_last:
            hooked.norm = norm

    @override
    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """As torch clips; gradients on the host in the step itself."""
        hooked = None if self._attachment is None else self._attachment.find(optimizer)
        if hooked is not None and hooked.streams:
            hooked.clip = Clip(max_value=clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)

    @contextmanager
    def _step_context(self, trains: bool) -> Generator[None, None, None]:
        if self._attachment is not None:
            self._attachment.refresh(cast=self.precision == "bf16-true", trains=trains)
        if self.precision == "bf16-true":
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                yield
            finally:
                torch.set_default_dtype(default)
            return
        with _autocast(self._device_type) if self.precision == "bf16-mixed" else nullcontext():
            yield

    @override
    def module_init_context(self) -> AbstractContextManager:
        """Modules are built in FP32: masters come from the FP32 initialisation."""
        return nullcontext()

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        """Tensors are made in the user's default dtype."""
        return nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": [], "_dtypes": [], "_attachment": None, "_outside": None}


class OutsideSteps:
    """Forward hooks by which BF16 matrices always compute under autocast; copies of a module keep copies of them."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._entered: list[AbstractContextManager] = []

    def enter(self, *_unused: Any) -> None:
        """The forward pre-hook."""
        inside = torch.is_autocast_enabled(self._device_type)
        context = nullcontext() if inside else _autocast(self._device_type)
        context.__enter__()
        self._entered.append(context)

    def leave(self, *_unused: Any) -> None:
        """The forward hook, called also when forward raised."""
        if self._entered:  # empty if another hook raised before ours entered
            self._entered.pop().__exit__(None, None, None)

    def unwind(self) -> None:
        """Leave what an interrupt left entered: torch calls no hook after a KeyboardInterrupt."""
        while self._entered:
            self.leave()

    def __getstate__(self) -> dict[str, Any]:
        return {"_device_type": self._device_type, "_entered": []}


if TYPE_CHECKING:
    CPUOffloadPrecision = PrecisionHooks
else:
    CPUOffloadPrecision = in_each_namespace("CPUOffloadPrecision", PrecisionHooks, "plugins.HalfPrecision")


def precision_for(plugin: Any, namespace: str, given: PrecisionHooks | None = None) -> Any:
    """The plugin that stands in for the one Lightning made of the Trainer's `precision`; None: the default.

    Args:
        plugin: Lightning's, or one of ours.
        namespace: The one in which the result is to work.
        given: What the strategy was constructed with. Lightning makes a plugin for the Trainer's `precision` all
            the same, and a plain one if it was left unset.

    Raises:
        ValueError: A precision that is not computed here, or two that differ.
    """
    if given is not None and type(plugin).__name__ in PLAIN:
        return given
    chosen = plugin if isinstance(plugin, PrecisionHooks) else _stand_in(plugin, namespace)
    if given is not None and chosen._asked != given._asked:
        raise ValueError(
            f"precision={chosen._asked!r}: the strategy was constructed with CPUOffloadPrecision({given._asked!r}). "
            "Say it in one place: leave out the Trainer's precision, or the strategy's precision_plugin."
        )
    return given or chosen


def _stand_in(plugin: Any, namespace: str) -> Any:
    kind = type(plugin).__name__
    asked = {"MixedPrecision": "bf16-mixed", "HalfPrecision": "bf16-true"}.get(kind)
    if kind not in PLAIN and plugin.precision != asked:
        raise ValueError(
            f"precision={plugin.precision!r}: cpu_offload computes in 'bf16-mixed' (default) or 'bf16-true', "
            "with FP32 master weights either way. Choose one of them; for FP32 on the device pass "
            'strategy=CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision("32-true")).'
        )
    return CPUOffloadPrecision._variants[namespace](asked)


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU has vector instructions for BF16 products; without them they are a hundred times slower."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def _autocast(device_type: str) -> AbstractContextManager:
    # As Lightning has it: with cached casts, gradients of a vector that is used twice would be summed in BF16.
    return torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False)


def is_overridden(owner: Any, hook: str, packages: str | tuple[str, ...]) -> bool:
    """Whether a module's or callback's hook is another one than those in some packages, such as Lightning's own."""
    defined_in = getattr(getattr(type(owner), hook, None), "__module__", "")
    return hook in vars(owner) or not defined_in.startswith(packages)


def _convert_arguments(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _to_bf16(args), _to_bf16(kwargs)


def _would_be_ruined(owner: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor stays FP32 even under `"bf16-true"`.

    Running statistics, with the weights of their norms, whose kernels want them in the same dtype; the ranges that
    fake quantization averages; and the rotary frequencies of `transformers`, which computes angles in FP32: rounded
    ones are radians off at far positions.
    """
    if isinstance(owner, nn.modules.batchnorm._NormBase) or _comes_from("torch.ao.quantization.", owner):
        return True
    names = [name for name, buffer in owner._buffers.items() if buffer is tensor]
    return _comes_from("transformers.", owner) and any("inv_freq" in name for name in names)


def _comes_from(package: str, owner: nn.Module) -> bool:
    return any(cls.__module__.startswith(package) for cls in type(owner).__mro__)


def _goes_into_products(owner: nn.Module, matrix: Tensor) -> bool:
    """Whether autocast knows what is computed with a matrix.

    It does for the layers below. Others may use theirs in operations that refuse two dtypes (an element-wise norm, a
    token written into a batch), so there only what is large is taken for a factor of products.
    """
    if isinstance(owner, torch.jit.ScriptModule) or parametrize.is_parametrized(owner) or hasattr(owner, "weight_orig"):
        return False
    return isinstance(owner, PRODUCTS) or (matrix.numel() >= LARGE and not isinstance(owner, NORMS))


def _holders_of_bf16(module: nn.Module) -> Generator[nn.Module, None, None]:
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue  # takes no hooks
        if any(parameter.dtype == torch.bfloat16 for parameter in part.parameters()):
            yield part


def _as_autocast_leaves_it(_embedding: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    """Looking up is no product: autocast returns the FP32 of the table, and what is added to it is FP32 too."""
    return output.float()


def _to_bf16(data: Any) -> Any:
    return apply_to_collection(data, dtype=Tensor, function=_tensor_to_bf16)


def _tensor_to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
