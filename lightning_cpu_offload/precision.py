"""What is computed in which dtype, over FP32 masters.

`"bf16-mixed"` (the default) holds matrices (parameters with two or more dimensions) in BF16 and runs steps under
autocast; vectors, buffers and inputs stay as they are. `"bf16-true"` holds everything in BF16, which large language
models bear and which saves FP32 activations. `"32-true"` computes in FP32 throughout.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from lightning_cpu_offload.namespaces import in_each_namespace, rank_zero

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as Base
else:
    Base = object

Compute = Literal["bf16-mixed", "bf16-true", "32-true"]
COMPUTE = get_args(Compute)

PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.MultiheadAttention)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Bilinear)
LARGE = 1 << 16

# How deep below the LightningModule a part may be called on its own, from a hook or a callback outside any step, and
# still compute under autocast.
_CALLABLE_DEPTH = 2


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
        self._before_step: Callable[[bool], None] | None = None
        self._outside: OutsideSteps | None = None

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
        if tensor.dtype != torch.float32 or isinstance(owner, torch.jit.ScriptModule):
            return tensor.dtype
        if self.precision == "bf16-true":
            # Running statistics would be ruined by BF16, and batch norm wants its weights in their dtype.
            return tensor.dtype if isinstance(owner, nn.modules.batchnorm._NormBase) else torch.bfloat16
        is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2 and _goes_into_products(owner, tensor)
        to_bf16 = self.precision == "bf16-mixed" and is_matrix and not others_write
        return torch.bfloat16 if to_bf16 else tensor.dtype

    def attach(self, module: nn.Module, before_step: Callable[[bool], None]) -> None:
        """Let the module, and parts of it, be called outside steps too: from hooks and callbacks.

        Args:
            module: Already converted.
            before_step: Called when a step begins, with whether it can compute in BF16 only.
        """
        self._before_step = before_step
        if self.precision == "bf16-mixed":
            self._outside = OutsideSteps(self._device_type)
            for part in _callable_parts(module, _CALLABLE_DEPTH):
                self._handles.append(part.register_forward_pre_hook(self._outside.enter))
                self._handles.append(part.register_forward_hook(self._outside.leave, always_call=True))
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
        self._before_step = self._outside = None

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
        if self._before_step is not None:
            self._before_step(self.precision == "bf16-true")
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
        return {**vars(self), "_handles": [], "_dtypes": [], "_before_step": None, "_outside": None}


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
    CPUOffloadPrecision = in_each_namespace("CPUOffloadPrecision", PrecisionHooks, "plugins.Precision")


def precision_for(plugin: Any, namespace: str) -> Any:
    """The plugin that stands in for the one Lightning made of the Trainer's `precision`; None: the default.

    Raises:
        ValueError: A precision that is not computed here.
    """
    if isinstance(plugin, PrecisionHooks):
        return plugin
    kind = type(plugin).__name__
    asked = {"MixedPrecision": "bf16-mixed", "HalfPrecision": "bf16-true"}.get(kind)
    if kind not in ("Precision", "NoneType") and plugin.precision != asked:
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


def _convert_arguments(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _to_bf16(args), _to_bf16(kwargs)


def _goes_into_products(owner: nn.Module, matrix: Tensor) -> bool:
    """Whether autocast knows what is computed with a matrix.

    It does for the layers below. Others may use theirs in operations that refuse two dtypes (an element-wise norm, a
    token written into a batch), so there only what is large is taken for a factor of products.
    """
    if parametrize.is_parametrized(owner) or hasattr(owner, "weight_orig"):
        return False
    return isinstance(owner, PRODUCTS) or (matrix.numel() >= LARGE and not isinstance(owner, NORMS))


def _callable_parts(module: nn.Module, depth: int) -> Generator[nn.Module, None, None]:
    if isinstance(module, torch.jit.ScriptModule):
        return
    if any(parameter.dtype == torch.bfloat16 for parameter in module.parameters()):
        yield module
    if depth:
        for child in module.children():
            yield from _callable_parts(child, depth - 1)


def _to_bf16(data: Any) -> Any:
    return apply_to_collection(data, dtype=Tensor, function=_tensor_to_bf16)


def _tensor_to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
