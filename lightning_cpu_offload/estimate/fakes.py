"""A module whose tensors take no memory: what its training step needs to run without a Trainer and without data.

Everything is put back afterwards. What depends on values (`.item()`, masks) is answered with one, or with the most
it could be.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten

_NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
}

DtypeRule = Callable[[nn.Module, Tensor, bool], torch.dtype]
"""The dtype a parameter or buffer of a module has on the device; the third argument: whether others may write it."""


@contextlib.contextmanager
def fake_tensors(module: nn.Module, rule: DtypeRule, trained: set[int] | None) -> Generator[None, None, None]:
    """Give a module fake parameters and buffers; inside a FakeTensorMode. Tied ones stay tied.

    Args:
        module: Built, on any device, "meta" included.
        rule: Which dtype each tensor gets.
        trained: Identities of the parameters an optimizer steps; None: all that require a gradient.
    """
    made: dict[int, Tensor] = {}
    places = list(_places(module))
    try:
        for owner, tensors, name, real in places:
            if id(real) not in made:
                others_write = id(real) not in trained if trained is not None else not real.requires_grad
                made[id(real)] = _fake(real, rule(owner, real, others_write))
            tensors[name] = made[id(real)]
        _renew_flat_weights(module)
        yield
    finally:
        for _, tensors, name, real in places:
            tensors[name] = real
        _renew_flat_weights(module)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, Tensor]]:
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield owner, tensors, name, tensor


def _fake(real: Tensor, dtype: torch.dtype) -> Tensor:
    stride = real.stride() if real.is_contiguous() else torch.empty_like(real, device="meta").stride()
    fake = torch.empty_strided(real.shape, stride, dtype=dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=real.requires_grad) if isinstance(real, nn.Parameter) else fake


def _renew_flat_weights(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.RNNBase):  # keeps a second list of its parameters
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]


def fake_batch(mode: FakeTensorMode, batch: Any) -> Any:
    """A batch of the same structure, shapes and dtypes without data."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        return mode.from_tensor(leaf.detach().cpu())

    return tree_map(convert, batch)


class WorstCase(TorchDispatchMode):
    """Answers what depends on values.

    Attributes:
        guesses: Names of the operations that were answered so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guesses: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One for a number, all elements for a choice of elements; everything else is run."""
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns."""
        answer = _answer(func, args)
        if answer is NotImplemented:
            return func(*args, **kwargs)
        self.guesses.add(str(func))
        return answer


def _answer(func: Any, args: Any) -> Any:
    if func is aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else False if args[0].dtype == torch.bool else 1
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
    if func is aten.masked_select.default:
        return args[0].new_empty((args[0].numel(),))
    if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
        mask = args[1][0]
        return args[0].new_empty((mask.numel(), *args[0].shape[mask.dim() :]))
    return NotImplemented


@contextlib.contextmanager
def without_trainer(module: nn.Module, optimizers: int) -> Generator[MagicMock, None, None]:
    """Let a LightningModule log, ask its Trainer and use its optimizers, to no effect; yields the Trainer."""
    trainer = MagicMock(name="trainer")  # answers whatever a module may ask
    trainer.global_step = trainer.current_epoch = trainer.global_rank = trainer.local_rank = 0
    trainer.world_size, trainer.accumulate_grad_batches, trainer.optimizers = 1, 1, []
    trainer.estimated_stepping_batches, trainer.max_epochs, trainer.max_steps = 1000, 1, 1000
    trainer.sanity_checking = trainer.validating = False
    trainer.strategy.backward = lambda loss, *_args, **_kwargs: loss.backward()
    stand_ins = [MagicMock(name="optimizer") for _ in range(optimizers)]
    changed: dict[str, Any] = {
        "_trainer": trainer,
        "log": _nothing,
        "log_dict": _nothing,
        "print": _nothing,
        "optimizers": lambda **_kwargs: stand_ins[0] if len(stand_ins) == 1 else stand_ins,
        "lr_schedulers": _nothing,
    }
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            if "_device" in vars(part):
                stack.enter_context(patch.dict(vars(part), {"_device": torch.device("cpu")}))
            if part is module:
                stack.enter_context(patch.dict(vars(part), changed))
            elif "_trainer" in vars(part):
                stack.enter_context(patch.dict(vars(part), {"_trainer": trainer, "log": _nothing}))
            elif _is_metric(part):
                methods = dict.fromkeys(("forward", "update", "compute"), _zero)
                stack.enter_context(patch.dict(vars(part), methods))
        yield trainer


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _zero(*_args: Any, **_kwargs: Any) -> Tensor:
    return torch.zeros(())


def _is_metric(part: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.Metric)


@contextlib.contextmanager
def without_values() -> Generator[None, None, None]:
    """Let `.numpy()` and `.tolist()` of a fake tensor return zeros."""

    def numpy(tensor: Tensor, **_kwargs: Any) -> np.ndarray:
        return np.zeros(tuple(tensor.shape), dtype=_NUMPY.get(tensor.dtype, np.float32))

    def tolist(tensor: Tensor) -> Any:
        return numpy(tensor).tolist()

    with patch.object(Tensor, "numpy", numpy), patch.object(Tensor, "tolist", tolist):
        yield


@contextlib.contextmanager
def checkpointed(module: nn.Module) -> Generator[int, None, None]:
    """Let every block keep its inputs only and compute the rest again in backward; yields the number of blocks."""
    blocks = repeated_blocks(module)
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(patch.dict(vars(block), {"forward": _recomputing(block.forward)}))
        yield len(blocks)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost parts that stand in a list with others of their class and have parameters: layers of a network."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for part in module.modules():
        if id(part) in inside or not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(part)
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if alike and all(_is_block(child) for child in children):
            blocks += children
            inside.update(id(inner) for block in children for inner in block.modules())
    return blocks


def _is_block(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None and next(part.children(), None) is not None
