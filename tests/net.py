"""A tiny LightningModule for the tests of one behaviour at a time, and how they train it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.models import quiet_trainer
from tests.reference import Snapshot, assert_close, assert_identical, assert_same_losses, over_a_run

PRECISIONS = ["bf16-mixed", "bf16-true", "32-true"]

BF16_UNIT = 2**-8
"""Half of the distance between neighbouring BF16 numbers, relative to the smaller one."""

RUN_RTOL = 1e-4
"""A difference in the last bit grows from step to step, as it does on any two machines."""


def adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW, fast enough that three steps show."""
    return torch.optim.AdamW(module.parameters(), **{"lr": 0.01, **options})


def sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """SGD with a momentum, so that it has a state: arithmetic that ours must match bit for bit."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def still(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that steps and changes nothing."""
    return torch.optim.SGD(module.parameters(), lr=0.0)


class Net(pl.LightningModule):
    """Trained and frozen matrices and vectors, running statistics and a buffer, none of them BF16 numbers.

    Args:
        optimizer: Makes what `configure_optimizers` returns, given the module.
        manual: Optimizes manually, by `self.optimize(batch, batch_idx)`.
    """

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, manual: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 16)
            self.norm = nn.BatchNorm1d(16)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.outer = nn.Linear(16, 4)
        self.register_buffer("gain", torch.full((4,), 0.3))
        self.register_buffer("count", torch.tensor(0))
        self.optimizer = optimizer
        self.automatic_optimization = not manual
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to (batch, 4)."""
        return self.outer(self.frozen(self.norm(torch.tanh(self.inner(x))))) * self.gain

    def loss(self, x: Tensor) -> Tensor:
        """Mean square of the outputs, a scalar."""
        return self(x).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:
            return self.optimize(batch, batch_idx)
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def optimize(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        raise NotImplementedError

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


def batches(number: int = 3) -> DataLoader:
    """The same `number` batches of 4 samples at every call."""
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randn(4, 8, generator=generator) for _ in range(number)]
    return DataLoader(data, batch_size=None)


def offload(precision: Any = "bf16-mixed", **options: Any) -> CPUOffloadStrategy:
    """The strategy in a precision that does not depend on the machine."""
    return CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision(precision), **options)


def fit(
    module: pl.LightningModule,
    precision: str | None = "bf16-mixed",
    number: int = 3,
    validate: bool = False,
    **options: Any,
) -> pl.Trainer:
    """Trains for one epoch under the strategy, or under stock Lightning in FP32 if `precision` is None.

    Args:
        module: What to train.
        precision: Of the strategy.
        number: Batches in the epoch.
        validate: Validate after it, on the same batches.
        options: For the Trainer; names of hooks and their functions make a callback.
    """
    hooks = {name: options.pop(name) for name in list(options) if name == "setup" or name.startswith("on_")}
    callbacks = [*options.pop("callbacks", []), LambdaCallback(**hooks)]
    strategy = offload(precision) if precision else "auto"
    defaults = {"strategy": strategy, "callbacks": callbacks, "max_epochs": 1, "limit_val_batches": float(validate)}
    logger = options.pop("logger", None)
    trainer = quiet_trainer(**{**defaults, **options})
    trainer.loggers = [logger] if logger else []
    trainer.fit(module, batches(number), batches(number))
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of `state_dict()`."""
    return copy.deepcopy(module.state_dict())


def snapshots(module: nn.Module, trainer: pl.Trainer) -> list[Snapshot]:
    """Weights with the state of each optimizer; a list in the state (of LBFGS) counts as one tensor."""
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    for state in (state for optimizer in states for state in optimizer["state"].values()):
        lists = {name: value for name, value in state.items() if isinstance(value, list)}
        for name, items in lists.items():
            state[name] = torch.stack([torch.as_tensor(item) for item in items if item is not None])
    return [Snapshot(module.state_dict(), state) for state in states]


def assert_as_stock(make: Callable[[], Net], **options: Any) -> Net:
    """In FP32, the strategy trains exactly as stock Lightning does: losses, weights, buffers and optimizer state.

    Returns:
        The module trained under the strategy.

    Raises:
        AssertionError: Names what differs first; or nothing moved, so that nothing was compared.
    """
    ours, stock = make(), make()
    before = weights(ours)
    torch.manual_seed(0)
    trainer = fit(ours, "32-true", **options)
    torch.manual_seed(0)
    stock_trainer = fit(stock, None, **options)
    for own, expected in zip(snapshots(ours, trainer), snapshots(stock, stock_trainer), strict=True):
        assert_identical(own, expected)
    assert_same_losses(ours.losses, stock.losses)
    assert not torch.equal(before["inner.weight"], stock.state_dict()["inner.weight"]), "nothing was trained"
    return ours


def assert_close_to_stock(make: Callable[[], Net], rtol: float, **options: Any) -> None:
    """Like `assert_as_stock`, up to `rtol` times the largest element of each tensor.

    Raises:
        AssertionError: Names what differs first.
    """
    ours, stock = make(), make()
    trainer, stock_trainer = fit(ours, "32-true", **options), fit(stock, None, **options)
    for own, expected in zip(snapshots(ours, trainer), snapshots(stock, stock_trainer), strict=True):
        assert_close(own, expected, over_a_run(rtol))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and for each the same dtype, shape, device and elements.

    Raises:
        AssertionError: Names the first tensor that differs.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        own = actual[name]
        assert (own.dtype, own.shape, own.device) == (value.dtype, value.shape, value.device), name
        differs = own != value
        assert not differs.any(), f"{name}: {int(differs.sum())} of {value.numel()} elements differ"


def anatomy(module: nn.Module) -> dict[str, Any]:
    """All of a module but the values: attributes, hooks, and what its tensors are."""
    parts: dict[str, Any] = {}
    for name, part in module.named_modules():
        attributes = {key: value for key, value in vars(part).items() if key not in ("_trainer", "_hparams", "losses")}
        parts[name] = (
            type(part),
            attributes.keys(),
            {
                key: len(value)
                for key, value in attributes.items()
                if key.endswith(("_hooks", "_with_kwargs", "_called"))
            },
            {key: value for key, value in attributes.items() if key in ("_dtype", "_device")},
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        hooks = len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
        parts[f"tensor {name}"] = (id(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad, hooks)
    parts["process"] = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
    return parts


def assert_free(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """No hook is left on the optimizer, it holds the module's parameters, and its state is FP32 on the CPU.

    Raises:
        AssertionError: Something is left.
    """
    hooks = {name: len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    assert not any(hooks.values()), hooks
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in module.parameters()]
    for parameter, state in optimizer.state.items():
        assert any(parameter is own for own in held)
        for name, value in state.items():
            if isinstance(value, Tensor):
                assert (value.dtype, value.device.type) == (torch.float32, "cpu"), name


class Foreign(torch.optim.Optimizer):
    """Somebody's SGD, which counts its steps and draws a random number at each."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"])
        return loss

    def update(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        state["noise"] = torch.rand_like(parameter)
        parameter.add_(parameter.grad * state["noise"], alpha=-lr)


class Rows(pl.loggers.logger.DummyLogger):
    """A logger that keeps what is logged, with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))
