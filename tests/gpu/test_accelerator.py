"""The real engine on a real device: the numbers of the same device run synchronously, bit for bit.

Needs torch, Lightning, numba and pytest, and any accelerator that torch knows; skipped where there is none. Nothing
here looks at a clock: the device is given enough other work to lag behind the host.

`python -m pytest --noconftest tests/gpu` runs these tests without a device, on a simulated one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.offload import attach, sums
from lightning_cpu_offload.offload.bits import words
from lightning_cpu_offload.offload.pipeline import SLOT_BYTES
from lightning_cpu_offload.offload.transfer import AcceleratorEngine, Engine, InlineEngine, Lane
from tests.engines import DeferredEngine

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
SIMULATED = DEVICE.type == "cpu"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type == "mps", reason="torch has no streams for mps")]
on_device = pytest.mark.skipif(SIMULATED, reason="asks the device itself")

LAG = 0 if SIMULATED else 20
"""Products of two 2048 x 2048 matrices before each loss: milliseconds on any device, microseconds for the host."""
REPEATS = 1 if SIMULATED else 5
"""Runs of the engine under test: a race does not show every time."""


class StandIn(DeferredEngine):
    """A simulated device whose schedule is different each time."""

    seeds = iter(range(1 << 30))

    def __init__(self, device: torch.device) -> None:
        super().__init__(next(self.seeds), prompt=True)

    @property
    def _streams(self) -> dict[str, Any]:
        return {}


Base: Any = StandIn if SIMULATED else AcceleratorEngine


class SynchronousEngine(Base):
    """The same streams and copies, with the host waiting for everything before and after each call."""

    def record(self, event: Any, lane: Lane) -> None:
        self.synchronize()
        super().record(event, lane)

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        self.synchronize()
        super().copy(lane, dst, src)
        self.synchronize()

    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        self.synchronize()
        super().gather(lane, dst, sources)
        self.synchronize()

    def launch(self, lane: Lane, *args: Any, **kwargs: Any) -> None:
        self.synchronize()
        super().launch(lane, *args, **kwargs)
        self.synchronize()


class LaggingEngine(Base):
    """Gives each lane a random amount of other work before what it is asked to do, so that another order shows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.random = random.Random(0)
        self.ballast = torch.randn(256 if SIMULATED else 1024, 256 if SIMULATED else 1024, device=device)

    def lag(self, lane: Lane) -> None:
        if not SIMULATED and lane != "compute":
            with self._streams[lane]:
                for _ in range(self.random.randrange(12)):
                    torch.mm(self.ballast, self.ballast)

    def record(self, event: Any, lane: Lane) -> None:
        self.lag(lane)
        super().record(event, lane)

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        self.lag(lane)
        super().copy(lane, dst, src)

    def gather(self, lane: Lane, dst: Tensor, sources: Sequence[Tensor]) -> None:
        self.lag(lane)
        super().gather(lane, dst, sources)


class HastyEngine(Base):
    """Never waits on the host: a wrong engine, which the comparisons below must notice."""

    def host_wait(self, event: Any) -> None:
        pass


class Deep(nn.Sequential):
    """Odd widths, a norm and a frozen layer: many pieces in each chunk, and borders anywhere."""

    inputs, rows = 129, 64

    def __init__(self) -> None:
        layers = [nn.Linear(129, 513), nn.GELU(), nn.LayerNorm(513), nn.Linear(513, 127), nn.GELU()]
        super().__init__(*layers, nn.Linear(127, 127).requires_grad_(False), nn.Linear(127, 129))


class Huge(nn.Sequential):
    """33.6 million parameters that one row goes through: hardly any compute to hide the transfers behind."""

    inputs, rows = 256 if SIMULATED else 4096, 1

    def __init__(self) -> None:
        super().__init__(nn.Linear(self.inputs, self.inputs), nn.Tanh(), nn.Linear(self.inputs, self.inputs))


class Module(pl.LightningModule):
    """Trains a network to return its input, on a device that lags behind."""

    def __init__(self, network: type[Deep] | type[Huge], optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network()
        self.optimizer = optimizer
        self.ballast: Tensor
        self.register_buffer("ballast", torch.randn(2048, 2048), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(LAG):
            torch.mm(self.ballast, self.ballast)
        return (self.network(batch) - batch).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_trainer(strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    # Lightning knows CUDA devices; any other one is given to the strategy.
    known = DEVICE.type == "cuda"
    defaults: dict[str, Any] = {"enable_checkpointing": False, "max_epochs": 1, "precision": "bf16-mixed"}
    return pl.Trainer(
        strategy=CPUOffloadStrategy(**(strategy or {}), device=None if known else DEVICE),
        accelerator=DEVICE.type if known else "cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def make_loader(network: type[Deep] | type[Huge], num_batches: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(num_batches, network.rows, network.inputs, generator=generator)
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def result(module: Module, trainer: pl.Trainer) -> list[Tensor]:
    """Copies of all weights and all optimizer state."""
    states = trainer.optimizers[0].state_dict()["state"]
    tensors = [*module.state_dict().values(), *(value for key in sorted(states) for value in states[key].values())]
    return [tensor.clone() for tensor in tensors if isinstance(tensor, Tensor)]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tensor]]:
    """Trains on an engine of the given kind and returns weights and state."""

    def run(
        engine: Callable[[torch.device], Engine],
        network: type[Deep] | type[Huge] = Deep,
        optimizer: str = "adamw",
        num_batches: int = 8 if SIMULATED else 12,
        **options: Any,
    ) -> list[Tensor]:
        monkeypatch.setattr(attach, "make_engine", engine)
        monkeypatch.setattr(attach, "SLOT_BYTES", 16 << 10 if network is Deep else SLOT_BYTES)
        module, trainer = Module(network, optimizer), make_trainer(**options)
        trainer.fit(module, make_loader(network, num_batches))
        return result(module, trainer)

    return run


def same_bits(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(
        one.device == other.device and torch.equal(words(one), words(other))
        for one, other in zip(ours, expected, strict=True)
    )


# --- the same numbers ---------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "strategy": {"gradients": "host"}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_streams_change_no_bit(fit: Any, optimizer: str, precision: str, options: dict[str, Any]) -> None:
    options = {**options, "precision": precision, "optimizer": optimizer}
    assert_streams_change_no_bit(fit, **options)


def assert_streams_change_no_bit(fit: Callable[..., list[Tensor]], **options: Any) -> None:
    """Streams, streams that lag and copies without streams give the weights and state of the synchronous engine."""
    expected = fit(SynchronousEngine, **options)
    assert all(tensor.isfinite().all() for tensor in expected)
    assert same_bits(fit(SynchronousEngine, **options), expected), "this device does not repeat its own numbers"
    for kind in [InlineEngine, *[Base] * REPEATS, *[LaggingEngine] * 2]:
        assert same_bits(fit(kind, **options), expected)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_streams_change_no_bit_of_a_delayed_update(fit: Any, options: dict[str, Any]) -> None:
    delayed = {**options, "strategy": {"update": "delayed", "exact_steps": 1}}
    assert_streams_change_no_bit(fit, **delayed)
    assert not same_bits(fit(SynchronousEngine, **options), fit(SynchronousEngine, **delayed))


REDUCED: list[dict[str, Any]] = [
    {"state_dtype": "bfloat16"},
    {"state_dtype": "float8"},
    {"state_dtype": "float8", "gradients": "host"},
    {"state_dtype": "float8", "update": "delayed", "exact_steps": 1},
]


@pytest.mark.parametrize("strategy", REDUCED, ids=str)
def test_streams_change_no_bit_of_reduced_moments(fit: Any, strategy: dict[str, Any]) -> None:
    options: dict[str, Any] = {"precision": "bf16-true", "strategy": strategy}
    assert_streams_change_no_bit(fit, **options)
    assert not same_bits(fit(InlineEngine, **options), fit(InlineEngine, precision="bf16-true"))


@pytest.mark.parametrize("network", [Deep, Huge])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_streams_change_no_bit_of_gradients_on_the_host(
    fit: Any, network: type[Deep] | type[Huge], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in its sum, a gradient stays BF16 until the step; of two, the sum is FP32."""
    monkeypatch.setattr(sums, "LEAST_KEPT", 1)
    monkeypatch.setattr(sums, "BLOCK", 1)
    options: dict[str, Any] = {"precision": "bf16-true", "accumulate_grad_batches": accumulate, "num_batches": 4}
    assert_streams_change_no_bit(fit, network=network, strategy={"gradients": "host"}, **options)


PARTIAL: list[dict[str, Any]] = [
    {"strategy": {"device_fraction": 0.5}},
    {"strategy": {"device_fraction": 1.0}},
    {"strategy": {"device_fraction": 0.5}, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"strategy": {"device_fraction": 0.5, "update": "early", "nonfinite": "raise"}},
    {"strategy": {"device_memory": "1MiB"}, "precision": "bf16-true"},
]


@pytest.mark.parametrize("options", PARTIAL, ids=str)
def test_streams_change_no_bit_of_a_part_on_the_device(fit: Any, options: dict[str, Any]) -> None:
    assert_streams_change_no_bit(fit, **options)


def test_a_part_is_stepped_on_the_device_as_on_the_host(fit: Any) -> None:
    """After one step from the same gradients: FP32 arithmetic of two devices, some roundings (6e-8 each) apart."""
    ours = fit(Base, num_batches=1, strategy={"device_fraction": 0.5})
    for one, other in zip(ours, fit(Base, num_batches=1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_two_huge_layers_change_no_bit(fit: Any, optimizer: str) -> None:
    expected = fit(SynchronousEngine, Huge, optimizer, num_batches=4)
    for _ in range(REPEATS):
        assert same_bits(fit(Base, Huge, optimizer, num_batches=4), expected)


def test_a_missing_wait_is_noticed(fit: Any) -> None:
    # 8 MiB take the bus a hundred times longer than the host needs to begin with them.
    expected = fit(SynchronousEngine, Huge, num_batches=2)

    def is_noticed() -> bool:
        try:
            return not same_bits(fit(HastyEngine, Huge, num_batches=2), expected)
        except FloatingPointError:
            return True  # what it read was no number

    assert any(is_noticed() for _ in range(REPEATS))


# --- the engine ---------------------------------------------------------------------------------------------------


def lag() -> Tensor:
    """Keep the device busy; the host goes on at once."""
    ballast = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(10 * LAG):
        ballast = (ballast @ ballast).clamp_(-1, 1)
    return ballast


@on_device
def test_copies_do_not_hold_up_the_host() -> None:
    engine = AcceleratorEngine(DEVICE)
    ready, fetched = engine.event(), engine.event()
    source, staging = torch.ones(1 << 20, device=DEVICE), torch.zeros(1 << 20, pin_memory=True)
    engine.synchronize()
    source.mul_(lag()[0, 0].clamp(2, 2))
    engine.record(ready, "compute")
    engine.wait("d2h", ready)
    engine.copy("d2h", staging, source)
    engine.record(fetched, "d2h")
    assert not fetched.query()
    engine.host_wait(fetched)
    assert staging.eq(2).all()


@on_device
def test_compute_waits_for_weights() -> None:
    engine = AcceleratorEngine(DEVICE)
    ready, done = engine.event(), engine.event()
    weights, staging = torch.zeros(1 << 20, device=DEVICE), torch.ones(1 << 20, pin_memory=True)
    engine.synchronize()
    lag()
    engine.record(ready, "compute")
    engine.wait("h2d", ready)
    engine.copy("h2d", weights, staging)
    engine.record(done, "h2d")
    engine.wait("compute", done)
    assert not done.query()
    assert weights.eq(1).all()


@on_device
def test_compute_is_the_stream_of_the_moment() -> None:
    engine = AcceleratorEngine(DEVICE)
    side = torch.Stream(device=DEVICE)
    event = engine.event()
    engine.synchronize()
    with side:
        lag()
        engine.record(event, "compute")
        assert engine._stream("compute") == side
    assert not event.query()
    assert engine._stream("compute") != side
    side.synchronize()
    assert event.query()


# --- memory and state ---------------------------------------------------------------------------------------------


class Probe(Callback):
    """Looks at the attached module after each optimizer step."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.reserved: list[int] = []
        self.pinned: list[bool] = []
        self.weights: set[tuple[str, torch.dtype]] = set()
        self.state: set[tuple[str, torch.dtype]] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step not in self.steps:
            return
        strategy: Any = trainer.strategy
        pipeline = strategy.offload.pipeline
        self.reserved.append(torch.accelerator.memory_reserved(DEVICE))
        self.pinned += [pipeline.pinned, *(slot.buffer.is_pinned() for slot in pipeline._slots)]
        self.weights |= {(parameter.device.type, parameter.dtype) for parameter in pl_module.network.parameters()}
        states = trainer.optimizers[0].state.values()
        self.state |= {(value.device.type, value.dtype) for state in states for value in state.values()}


@on_device
@pytest.mark.skipif(not hasattr(torch.accelerator, "memory_reserved"), reason="torch is older than this function")
def test_200_steps_reserve_no_more_than_20(fit: Any) -> None:
    probe = Probe(steps=(20, 100, 200))
    fit(Base, num_batches=200, callbacks=[probe])
    assert probe.reserved == [probe.reserved[0]] * 3
    assert all(probe.pinned)
    assert probe.weights == {(DEVICE.type, torch.bfloat16), (DEVICE.type, torch.float32)}
    assert probe.state == {("cpu", torch.float32)}


def test_everything_is_on_the_host_afterwards(fit: Any) -> None:
    for optimizer in ("adamw", "sgd"):
        tensors = fit(Base, optimizer=optimizer)
        assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("cpu", torch.float32)}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_changes_no_bit(optimizer: str, tmp_path: Path) -> None:
    loader = make_loader(Deep, 6)
    module, trainer = Module(Deep, optimizer), make_trainer(max_epochs=2)
    trainer.fit(module, loader)
    expected = result(module, trainer)

    saving = ModelCheckpoint(tmp_path, filename="first", save_top_k=-1)
    make_trainer(enable_checkpointing=True, callbacks=[saving]).fit(Module(Deep, optimizer), loader)
    module, trainer = Module(Deep, optimizer), make_trainer(max_epochs=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.fit(module, loader, ckpt_path=tmp_path / "first.ckpt")
    assert same_bits(result(module, trainer), expected)
