"""One program run twice, under stock Lightning and under the strategy, and everything that can be seen of it compared.

    outcome = assert_twins(lambda: MyModule(), max_epochs=2)     # bit for bit, in FP32 on the device too

runs the same seeded program under `strategy="auto"` and under `CPUOffloadStrategy`, and compares what is left of both:
weights, dtypes, optimizers with class, settings and state, checkpoint, step counts, metrics, and the order in which
hooks were called. In FP32 every difference is a bug and not rounding, but for Adam and AdamW, whose one-pass step
rounds in its own order: there pass `rtol=ADAM_RTOL`. What is not to run says so: `assert_refused`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.models import quiet_trainer
from tests.net import batches

ADAM_RTOL = 1e-6
"""Of the largest element of a tensor: each step rounds in about ten places, by 6e-8 at most, and most of it cancels."""

RUN_RTOL = 1e-4
"""The same over a run whose gradients depend on the weights: a difference in the last bit grows from step to step."""

Drive = Callable[[pl.Trainer, pl.LightningModule], Any]


@dataclass
class Outcome:
    """What a run leaves behind, copied.

    Attributes:
        weights: `module.state_dict()` after teardown.
        tensors: What every parameter and buffer is: dtype, shape, device, whether it requires gradients.
        optimizers: For each the class, and state and groups with parameters named as in the module.
        checkpoint: What `save_checkpoint` would write now.
        progress: `global_step`, epoch and state of the Trainer.
        metrics: `callback_metrics`.
        calls: Every hook of module, callbacks and strategy in the order it was called.
        notes: What the module kept in its lists `losses` and `notes`, and what the drive returned.
    """

    weights: dict[str, Tensor]
    tensors: dict[str, tuple[Any, ...]]
    optimizers: list[dict[str, Any]]
    checkpoint: dict[str, Any]
    progress: dict[str, Any]
    metrics: dict[str, Any]
    calls: list[str]
    notes: list[Any]
    before: dict[str, Tensor] = field(repr=False)

    @property
    def moved(self) -> set[str]:
        """Names of the weights that are not what they were before the run."""
        return {
            name
            for name, value in self.weights.items()
            if name not in self.before or not torch.equal(value, self.before[name])
        }


class Calls(Profiler):
    """Writes down the hooks that Lightning calls: it reports each call to its profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def start(self, action_name: str) -> None:
        """Take the class of a strategy out of its calls, and leave everything else as it is."""
        self.names.append(re.sub(r"^\[Strategy\]\w+\.", "[Strategy].", action_name))

    def stop(self, action_name: str) -> None:
        """Nothing to measure."""


def fit(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """The drive unless another is given: fit on the three batches of `tests.net`."""
    trainer.fit(module, batches(), batches())


def run(
    make: Callable[[], pl.LightningModule],
    strategy: Any = "auto",
    *,
    drive: Drive = fit,
    callbacks: Callable[[], Iterable[pl.Callback]] = tuple,
    trainer: Callable[..., pl.Trainer] = quiet_trainer,
    **options: Any,
) -> Outcome:
    """Run a seeded program and look at everything it leaves.

    Args:
        make: Builds the module; called after seeding.
        strategy: For the Trainer.
        drive: What is done with the Trainer and the module; what it returns is noted.
        callbacks: Makes the callbacks: each run needs its own.
        trainer: Makes a Trainer (the one of another namespace, say).
        options: For the Trainer; one epoch without validation unless they say otherwise.
    """
    pl.seed_everything(0, verbose=False)
    module, calls = make(), Calls()
    before = copy.deepcopy(module.state_dict())
    made = trainer(
        strategy=strategy,
        callbacks=list(callbacks()),
        profiler=calls,
        **{"max_epochs": 1, "limit_val_batches": 0, **options},
    )
    result = drive(made, module)
    notes = [*getattr(module, "losses", ()), *getattr(module, "notes", ()), result]
    return Outcome(
        weights=copy.deepcopy(module.state_dict()),
        tensors=_tensors(module),
        optimizers=[_optimizer(optimizer, module) for optimizer in made.optimizers],
        checkpoint=copy.deepcopy(made._checkpoint_connector.dump_checkpoint()),
        progress={"step": made.global_step, "epoch": made.current_epoch, "status": str(made.state.status)},
        metrics=copy.deepcopy(dict(made.callback_metrics)),
        calls=list(calls.names),
        notes=copy.deepcopy(notes),
        before=before,
    )


OPTIONS: dict[str, Any] = {}
"""Of the strategy, unless a test says otherwise."""

LEAST_RTOL: list[float] = [0.0]
"""The last one is the smallest tolerance of `assert_twins`, where a mode has arithmetic of its own."""


def ours(precision: Any = "32-true", **options: Any) -> CPUOffloadStrategy:
    """The strategy; in FP32, nothing but the place of the arithmetic differs from stock."""
    return CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision(precision), **{**OPTIONS, **options})


def twins(
    make: Callable[[], pl.LightningModule], offload: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Outcome, Outcome]:
    """The outcomes under stock Lightning and under the strategy.

    Args:
        make: Builds the module.
        offload: Options of the strategy, `precision` among them.
        options: As for `run`.
    """
    stock = run(make, "auto", **options)
    return stock, run(make, ours(**(offload or {})), **options)


def assert_same(stock: Outcome, ours: Outcome, rtol: float = 0.0, ignore: Sequence[str] = ()) -> None:
    """Nothing of the two outcomes differs.

    Args:
        stock: The truth.
        ours: What is compared with it.
        rtol: Largest error of a float, as a part of the largest element of its tensor. 0: bit for bit.
        ignore: Attributes of `Outcome` that are meant to differ.

    Raises:
        AssertionError: Says what differs first, where, and by how much.
    """
    for name in ("tensors", "calls", "progress", "weights", "notes", "metrics", "optimizers", "checkpoint"):
        if name not in ignore:
            compare(name, getattr(ours, name), getattr(stock, name), rtol)


def assert_twins(
    make: Callable[[], pl.LightningModule],
    rtol: float = 0.0,
    *,
    offload: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
    trains: bool = True,
    **options: Any,
) -> Outcome:
    """Run the program twice, find the same, and return the outcome under the strategy.

    Args:
        make: Builds the module.
        rtol: As for `assert_same`.
        offload: Options of the strategy.
        ignore: As for `assert_same`.
        trains: Whether some weight must move: else two runs that do nothing would be found the same.
        options: As for `run`.

    Raises:
        AssertionError: They differ, or nothing was trained.
    """
    stock, own = twins(make, offload, **options)
    assert_same(stock, own, max(rtol, LEAST_RTOL[-1]), ignore)
    assert not trains or stock.moved, "nothing was trained, so nothing was compared"
    return own


def assert_refused(
    make: Callable[[], pl.LightningModule], match: str, *, offload: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Stock Lightning runs the program; the strategy refuses it before any weight moves, saying what to do.

    Args:
        make: Builds the module.
        match: Pattern of the message.
        offload: Options of the strategy.
        options: As for `run`.

    Raises:
        AssertionError: It is not refused, or too late, or stock does not run it either.
    """
    assert run(make, "auto", **options).moved, "nothing was trained under stock Lightning"
    made: list[tuple[pl.LightningModule, dict[str, Tensor]]] = []

    def keep() -> pl.LightningModule:
        module = make()
        made.append((module, copy.deepcopy(module.state_dict())))
        return module

    with pytest.raises(ValueError, match=match):
        run(keep, ours(**(offload or {})), **options)
    ((module, before),) = made
    compare("weights", module.state_dict(), before)


def compare(path: str, ours: Any, stock: Any, rtol: float = 0.0) -> None:
    """Compare nested containers of tensors and plain values, every element of them.

    Raises:
        AssertionError: Names the place.
    """
    if isinstance(stock, Tensor):
        assert isinstance(ours, Tensor), f"{path}: {ours!r} is no tensor"
        _compare_tensors(path, ours, stock, rtol)
        return
    assert type(ours) is type(stock), f"{path}: {type(ours).__name__}, stock has {type(stock).__name__}"
    if isinstance(stock, Mapping):
        missing, added = set(stock) - set(ours), set(ours) - set(stock)
        assert not missing | added, f"{path}: missing {missing}, added {added}"
        for key, value in stock.items():
            compare(f"{path}/{key}", ours[key], value, rtol)
    elif isinstance(stock, (list, tuple)):
        for index, (own, value) in enumerate(zip(ours, stock, strict=False)):
            compare(f"{path}/{index}", own, value, rtol)
        assert len(ours) == len(stock), f"{path}: {len(ours)} entries, stock has {len(stock)}"
    elif isinstance(stock, float):
        _compare_tensors(path, torch.tensor(ours).double(), torch.tensor(stock).double(), rtol)
    else:
        assert ours == stock or _opaque(stock), f"{path}: {ours!r}, stock has {stock!r}"


def _compare_tensors(path: str, ours: Tensor, stock: Tensor, rtol: float) -> None:
    for name in ("dtype", "shape", "device", "layout"):
        own, expected = getattr(ours, name), getattr(stock, name)
        assert own == expected, f"{path}: {name} {own}, stock has {expected}"
    if stock.layout != torch.strided:
        ours, stock = ours.to_dense(), stock.to_dense()
    if not stock.numel() or torch.equal(ours, stock):
        return
    own, expected = ours.detach().double(), stock.detach().double()
    # Not `error > tolerance`, which NaN would pass; where both are NaN or the same infinity, they agree.
    tolerance = rtol * expected.nan_to_num(0, 0, 0).abs().max()
    agree = (own == expected) | (own.isnan() & expected.isnan()) | ((own - expected).abs() <= tolerance)
    assert agree.all(), (
        f"{path}: {int((~agree).sum())} of {agree.numel()} elements differ, by up to "
        f"{float((own - expected).abs().max()):.3e}; first {float(own[~agree][0])!r}, "
        f"stock has {float(expected[~agree][0])!r}"
    )


def _opaque(value: Any) -> bool:
    """Whether two equal objects of the kind are not found equal: functions, and objects that compare by identity."""
    return callable(value) or type(value).__eq__ is object.__eq__


def _tensors(module: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), str(tensor.device), tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def _optimizer(optimizer: Any, module: torch.nn.Module) -> dict[str, Any]:
    """Class, settings and state; parameters by their name, or by their position if the module does not know them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): names.get(id(parameter), f"outside {index}") for index, parameter in enumerate(held)}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    # Some optimizers key their state by `id(parameter)`, others add names of their own.
    keys = [id(key) if isinstance(key, Tensor) else key for key in optimizer.state]
    state = {names.get(key, key): value for key, value in zip(keys, optimizer.state.values(), strict=True)}
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return {"class": kind, "groups": copy.deepcopy(groups), "state": copy.deepcopy(state)}
