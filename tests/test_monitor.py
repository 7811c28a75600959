"""What `OffloadMonitor` reports: bytes by formula, norms against FP64, rates by a clock of our own."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cpu_offload import OffloadMonitor
from lightning_cpu_offload.callbacks import measures, monitor
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, SLOT_BYTES
from tests.models import quiet_trainer
from tests.net import (
    PRECISIONS,
    Net,
    Rows,
    adamw,
    assert_equal,
    fit,
    offload,
    sgd,
    weights,
)

TIMES = ("step_ms", "host_step_ms", "arrival_wait_ms", "exposed_wait_ms")
MOVED = ("d2h_bytes", "h2d_bytes", "device_bytes/weights", "device_bytes/gradients")
HELD = ("host_bytes", "host_bytes/ring", "host_bytes/masters", "host_bytes/checks")
NAMES = {f"offload/{name}" for name in (*TIMES, *MOVED, *HELD, "skipped_steps")}
STATE = {
    adamw: {f"offload/{name}" for name in ("host_bytes/moments", "host_gb_per_s", "host_percent_of_limit")},
    sgd: {"offload/host_bytes/gradients"},
}
NORM = "offload/grad_norm"


class Records(Rows):
    """Tells the monitor's own records from what the Trainer logs."""

    @property
    def records(self) -> dict[int, dict[str, float]]:
        # Lightning logs what optimizer step N logged at N - 1.
        return {step + 1: row for step, row in self.rows if any(name.startswith("offload/") for name in row)}


def monitored(module: Net, precision: str | None = "bf16-mixed", every: int | None = 1, **options: Any) -> Records:
    """Trains with a monitor and returns what it logged."""
    logger = Records()
    options = {"log_every_n_steps": 1, **options}
    fit(module, precision, callbacks=[OffloadMonitor(every)], logger=logger, **options)
    return logger


def trained_bytes(module: nn.Module, precision: str) -> int:
    """Bytes of the trained parameters on the device, by the rule."""
    total = 0
    for name, parameter in module.named_parameters():
        is_bf16 = {
            "bf16-mixed": parameter.ndim >= 2,
            "bf16-true": not name.startswith("norm"),
            "32-true": False,
        }[precision]
        total += parameter.requires_grad * parameter.numel() * (2 if is_bf16 else 4)
    return total


class TestBytes:
    @pytest.mark.parametrize("make", [sgd, adamw])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_that_cross_are_those_of_gradients_and_weights(self, precision: str, make: Any) -> None:
        net = Net(make)
        records = monitored(net, precision).records
        assert records.keys() == {1, 2, 3}
        for record in records.values():
            assert record.keys() == NAMES | STATE[make] | {NORM}
            for name in MOVED:  # on the CPU nothing else is counted as the device's
                assert record[f"offload/{name}"] == trained_bytes(net, precision), name

    def test_that_cross_are_fewer_without_some_gradients(self) -> None:
        class Sometimes(Net):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                if self.trainer.global_step == 1:
                    self.outer.weight.grad = None

        net = Sometimes(adamw)
        records = monitored(net).records
        whole = trained_bytes(net, "bf16-mixed")
        assert [record["offload/d2h_bytes"] for record in records.values()] == [whole, whole - 2 * 16 * 4, whole]
        assert [record["offload/h2d_bytes"] for record in records.values()] == [whole, whole - 2 * 16 * 4, whole]

    @pytest.mark.parametrize(("make", "per_parameter"), [(adamw, 12), (sgd, 8)])
    def test_on_the_host_are_master_and_moments_or_gradient(self, make: Any, per_parameter: int) -> None:
        """AdamW: master and two moments. Others: master and gradient; their own state is not counted."""
        net = Net(make)
        trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
        all_of_it = sum(parameter.numel() for parameter in net.parameters())
        slot = min(SLOT_BYTES, 4 * all_of_it)  # no slot is larger than the model in FP32; it divides by 8 here
        for record in monitored(net).records.values():
            checks = record["offload/host_bytes/checks"]
            assert 0 < checks < 16  # one byte for each chunk, and one
            assert record["offload/host_bytes"] == per_parameter * trained + RING_DEPTH * slot + checks
            parts = [value for name, value in record.items() if name.startswith("offload/host_bytes/")]
            assert sum(parts) == record["offload/host_bytes"]
            assert record["offload/host_bytes/masters"] == 4 * trained
            assert record["offload/host_bytes/ring"] == RING_DEPTH * slot


class TestKernelRate:
    @pytest.mark.parametrize("gradients", ["device", "host"])
    def test_is_all_that_a_step_reads_and_writes(self, gradients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(monitor, "kernel_rate", lambda num_threads: 8e9)
        logger, net = Records(), Net(adamw)
        trainer = quiet_trainer(
            strategy=offload(gradients=gradients), max_epochs=1, limit_val_batches=0, callbacks=[OffloadMonitor(1)]
        )
        trainer.loggers = [logger]
        trainer.fit(net, DataLoader([torch.ones(4, 8)] * 3, batch_size=None))
        trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
        weight_bytes = trained_bytes(net, "bf16-mixed")
        gradient_bytes = weight_bytes if gradients == "device" else 4 * trained
        # FP32 master and two moments in and out, the gradient in, the weight out.
        moved = 24 * trained + gradient_bytes + weight_bytes
        for record in logger.records.values():
            rate = moved / record["offload/host_step_ms"] / 1e6
            assert record["offload/host_gb_per_s"] == pytest.approx(rate)
            assert record["offload/host_percent_of_limit"] == pytest.approx(100 * rate / 8)
            # Gradients on the host take no memory on the device.
            kept = weight_bytes if gradients == "device" else 0
            assert record["offload/device_bytes/gradients"] == kept

    def test_is_measured_once_and_not_where_nobody_sees_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(measures, "host_rate", lambda num_threads: asked.append(num_threads) or 8e9)
        measures.kernel_rate.cache_clear()
        try:
            fit(Net(adamw), callbacks=[OffloadMonitor(1, summary=False)])
            assert asked == []
            for _ in range(2):
                monitored(Net(adamw))
            assert len(asked) == 1
            fit(Net(adamw), None, callbacks=[OffloadMonitor(1)], logger=Records())
            assert len(asked) == 1
        finally:
            measures.kernel_rate.cache_clear()


class TestNorm:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_is_that_before_clipping(self, precision: str) -> None:
        expected: list[float] = []

        def look(trainer: pl.Trainer, module: Net, optimizer: Any) -> None:
            gradients = [
                parameter.grad.double().flatten() for parameter in module.parameters() if parameter.requires_grad
            ]
            expected.append(float(torch.cat(gradients).norm()))

        records = monitored(Net(), precision, gradient_clip_val=1e-3, on_before_optimizer_step=look).records
        assert min(expected) > 1e-3
        # Sums of squares of 260 numbers in FP32.
        assert [record[NORM] for record in records.values()] == pytest.approx(expected, rel=1e-6)

    def test_of_sparse_gradients(self) -> None:
        class Sparse(Net):
            def __init__(self) -> None:
                super().__init__(lambda module: torch.optim.SparseAdam(module.embedding.parameters()))
                self.embedding = nn.Embedding(10, 3, sparse=True)

            def loss(self, x: Tensor) -> Tensor:
                return (self.embedding(torch.tensor([1, 2, 2])) * 2.0).sum()

        for module in [Sparse()]:
            module.requires_grad_(False)
            module.embedding.requires_grad_(True)
            for record in monitored(module).records.values():
                # Three elements each of a row that is read once and of one that is read twice.
                assert record[NORM] == pytest.approx((3 * 2.0**2 + 3 * 4.0**2) ** 0.5, rel=1e-6)

    def test_of_no_gradient_is_left_out(self) -> None:
        class Detached(Net):
            def loss(self, x: Tensor) -> Tensor:
                return torch.ones((), requires_grad=True) * 2

        with pytest.warns(UserWarning, match="no gradient"):
            records = monitored(Detached()).records
        assert {frozenset(record) for record in records.values()} == {frozenset(NAMES | STATE[sgd])}


class TestRhythm:
    @pytest.mark.parametrize(("every", "trainers", "steps"), [(2, 1, [2, 4]), (None, 3, [3]), (1, 50, [1, 2, 3, 4, 5])])
    def test_of_records(self, every: int | None, trainers: int, steps: list[int]) -> None:
        assert list(monitored(Net(), every=every, number=5, log_every_n_steps=trainers).records) == steps

    def test_counts_optimizer_steps(self) -> None:
        assert list(monitored(Net(), number=6, accumulate_grad_batches=2).records) == [1, 2, 3]

    @pytest.mark.parametrize("every", [0, -1])
    def test_must_be_positive(self, every: int) -> None:
        with pytest.raises(ValueError, match=rf"log_every_n_steps={every}: a positive number of steps, or None"):
            OffloadMonitor(every)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time the monitor reads, in seconds, until a test moves it."""
    time = [100.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: time[0]))
    return time


class Words(Net):
    """Takes batches of token ids, half a second each."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock[0] += 0.5
        return super().training_step(torch.ones(4, 8), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock[0] += 1000


BATCHES: dict[str, tuple[Callable[[], Any], str, int]] = {
    "tokens": (lambda: torch.ones(4, 7, dtype=torch.int64), "tokens/s", 28),
    "tokens in a dict": (lambda: {"input_ids": torch.ones(4, 7, dtype=torch.int32)}, "tokens/s", 28),
    "tokens in a tuple": (lambda: (torch.ones(4, 7, dtype=torch.int64), torch.ones(4)), "tokens/s", 28),
    "samples": (lambda: torch.ones(4, 8), "samples/s", 4),
    "samples and classes": (lambda: [torch.ones(4, 8), torch.ones(4, dtype=torch.int64)], "samples/s", 4),
    "nothing it knows": (lambda: {"text": ["a", "b"]}, "samples/s", 1),
}


class TestRate:
    def run(self, clock: list[float], make: Callable[[], Any], strategy: Any, **options: Any) -> list[dict[str, float]]:
        """Trains on four batches and returns the metrics in the progress bar after each."""
        seen: list[dict[str, float]] = []

        class Bar(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                seen.append({k: v for k, v in trainer.progress_bar_metrics.items() if k.endswith("/s")})

        data: Any = [make() for _ in range(4)]
        trainer = quiet_trainer(strategy=strategy, callbacks=[OffloadMonitor(), Bar()], **{"max_epochs": 1, **options})
        loader = DataLoader(data, batch_size=None)
        trainer.fit(Words(clock), loader, loader)
        return seen

    @pytest.mark.parametrize("strategy", ["auto", "cpu_offload"])
    @pytest.mark.parametrize("kind", BATCHES)
    def test_is_in_the_progress_bar(self, kind: str, strategy: str, clock: list[float]) -> None:
        make, unit, items = BATCHES[kind]
        seen = self.run(clock, make, strategy)
        assert seen == [{unit: items / 0.5}] * 4

    def test_covers_all_batches_of_a_step(self, clock: list[float]) -> None:
        make, unit, items = BATCHES["tokens"]
        seen = self.run(clock, make, offload(), accumulate_grad_batches=2)
        assert seen == [{}, {unit: 2 * items / 1.0}, {unit: 2 * items / 1.0}, {unit: 2 * items / 1.0}]

    def test_leaves_validation_out(self, clock: list[float]) -> None:
        make, unit, items = BATCHES["tokens"]
        seen = self.run(clock, make, offload(), max_epochs=2, val_check_interval=2)
        assert seen[-1] == {unit: items / 0.5}
        assert all(metrics == {unit: items / 0.5} for metrics in seen)


class TestElsewhere:
    def test_under_stock_lightning_only_the_rate_is_logged(self) -> None:
        logger = monitored(Net(), None)
        assert not logger.records
        assert {name for _, row in logger.rows for name in row} == {"samples/s", "epoch"}

    def test_without_a_logger(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*no logger configured")
            fit(Net(), callbacks=[OffloadMonitor()])

    def test_with_two_loggers(self) -> None:
        loggers = [Records(), Records()]
        trainer = quiet_trainer(strategy=offload(), max_epochs=1, callbacks=[OffloadMonitor(1)])
        trainer.loggers = loggers
        trainer.fit(Net(), DataLoader([torch.ones(4, 8)], batch_size=None), DataLoader([]))  # type: ignore[arg-type]
        assert loggers[0].records == loggers[1].records != {}

    def test_manual_optimization_with_two_optimizers(self) -> None:
        class Two(Net):
            def __init__(self) -> None:
                super().__init__(lambda m: (sgd(m.inner), sgd(m.outer)), manual=True)

            def optimize(self, batch: Tensor, batch_idx: int) -> None:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()

        with pytest.warns(UserWarning, match="no optimizer"):
            records = monitored(Two()).records
        assert list(records) == [2, 4, 6]

    def test_training_is_not_changed(self) -> None:
        net, undisturbed = Net(), Net()
        monitored(net)
        fit(undisturbed)
        assert_equal(weights(net), weights(undisturbed))

    def test_can_be_pickled(self) -> None:
        monitor = OffloadMonitor(3)
        fit(Net(), callbacks=[monitor])
        copied = pickle.loads(pickle.dumps(monitor))
        for name, value in vars(OffloadMonitor(3)).items():
            assert getattr(copied, name) == getattr(monitor, name), f"{name}: was {value} at first"
