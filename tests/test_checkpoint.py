"""Checkpoints: ordinary in form, exact in resuming, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO

FP32 = "32-true"


class Regression(pl.LightningModule):
    """A tied, partly frozen, normalised little net with two parameter groups and a schedule; records its losses."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.outer = nn.Linear(8, 1)
        self.tied = self.inner
        self.optimizer = optimizer
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.tied(self.frozen(self.norm(torch.relu(self.inner(x))))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).float(), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "lr": 0.02},
        ]
        kwargs = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        optimizer = getattr(torch.optim, self.optimizer)(groups, lr=0.01, **kwargs)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(48, 8, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def offload(precision: str | None = None) -> CPUOffloadStrategy:
    return CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision(precision))


def fit(strategy: Any, epochs: int, ckpt_path: Path | None = None, optimizer: str = "AdamW") -> tuple[Any, pl.Trainer]:
    pl.seed_everything(3, verbose=False)
    module = Regression(optimizer)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return module, trainer


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Every element of two nested structures is equal, bit for bit."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device), where
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def state_of(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "weights": dict(module.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }


def test_assert_same_can_fail() -> None:
    value = {"a": [torch.zeros(3)], "b": 1}
    assert_same({"a": [torch.zeros(3)], "b": 1}, value)
    for other in ({"a": [torch.tensor([0, 0, 1.0])], "b": 1}, {"a": [torch.zeros(3)], "b": 2}, {"a": [torch.zeros(3)]}):
        with pytest.raises(AssertionError):
            assert_same(other, value)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", FP32])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, precision: str, optimizer: str) -> None:
    whole, whole_trainer = fit(offload(precision), 4, optimizer=optimizer)
    _, trainer = fit(offload(precision), 2, optimizer=optimizer)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, resumed_trainer = fit(offload(precision), 4, tmp_path / "half.ckpt", optimizer=optimizer)
    assert len(resumed.losses) == 12  # two epochs of six batches
    assert_same(resumed.losses, whole.losses[12:])
    assert_same(state_of(resumed, resumed_trainer), state_of(whole, whole_trainer))


def test_checkpoint_has_the_form_of_a_stock_one(tmp_path: Path) -> None:
    files = {}
    for name, strategy in (("ours", offload()), ("stock", "auto")):
        _, trainer = fit(strategy, 2)
        trainer.save_checkpoint(tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=True)

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: form(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [form(item) for item in value]
        if isinstance(value, torch.Tensor):
            return (value.shape, value.dtype, value.device, value.untyped_storage().nbytes())
        return type(value)

    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert form(files["ours"][key]) == form(files["stock"][key]), key


# From the same FP32 state, FP32 steps of torch and of the kernel differ in the last bit of sums: 1e-6 relative for one
# step; ten steps of a net this small keep well inside ten times that. `atol`: for elements that cancel to near zero.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("first", ["auto", "ours"])
def test_checkpoint_continues_under_the_other_strategy(tmp_path: Path, first: str) -> None:
    strategies = {"auto": lambda: "auto", "ours": lambda: offload(FP32)}
    second = "ours" if first == "auto" else "auto"
    whole, whole_trainer = fit("auto", 4)
    before, trainer = fit(strategies[first](), 2)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert_same(saved["state_dict"], before.state_dict())

    loaded = Regression()
    loaded.load_state_dict(saved["state_dict"])
    assert_same(loaded.state_dict(), before.state_dict())

    after, after_trainer = fit(strategies[second](), 4, path)
    expected = state_of(whole, whole_trainer)
    actual = state_of(after, after_trainer)
    assert actual["scheduler"] == expected["scheduler"]
    torch.testing.assert_close(actual["weights"], expected["weights"], **CLOSE)
    for index, state in expected["optimizer"]["state"].items():
        torch.testing.assert_close(actual["optimizer"]["state"][index], state, **CLOSE)
    torch.testing.assert_close(torch.stack(after.losses), torch.stack(whole.losses[12:]), **CLOSE)


def test_stock_checkpoint_is_taken_over_exactly(tmp_path: Path) -> None:
    before, trainer = fit("auto", 2)
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    after, after_trainer = fit(offload(), 2, tmp_path / "stock.ckpt")  # nothing is left to train
    assert_same(state_of(after, after_trainer), state_of(before, trainer))


def test_module_loads_with_load_from_checkpoint(tmp_path: Path) -> None:
    before, trainer = fit(offload(), 1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert_same(Regression.load_from_checkpoint(tmp_path / "x.ckpt").state_dict(), before.state_dict())


def test_failed_save_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, path = StreamingCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint({"value": torch.ones(3)}, path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"value": torch.zeros(3)}, path)
    monkeypatch.undo()
    assert torch.equal(io.load_checkpoint(path)["value"], torch.ones(3))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_save_replaces_a_file_that_is_mapped(tmp_path: Path) -> None:
    io, path = StreamingCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint({"value": torch.ones(1000)}, path)
    mapped = io.load_checkpoint(path)["value"]
    io.save_checkpoint({"value": torch.zeros(1000)}, path)
    assert torch.equal(mapped, torch.ones(1000))
    assert torch.equal(io.load_checkpoint(path)["value"], torch.zeros(1000))


def test_file_has_ordinary_permissions(tmp_path: Path) -> None:
    StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "ours")
    torch.save({"value": 1}, tmp_path / "torch")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "torch").stat().st_mode


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        StreamingCheckpointIO().load_checkpoint(tmp_path / "nothing.ckpt")


def test_remote_paths_go_through_fsspec() -> None:
    io = StreamingCheckpointIO()
    io.save_checkpoint({"value": torch.ones(2)}, "memory://folder/x.ckpt")
    assert torch.equal(io.load_checkpoint("memory://folder/x.ckpt")["value"], torch.ones(2))


def test_the_users_checkpoint_io_is_respected() -> None:
    class Own(StreamingCheckpointIO):
        pass

    own = Own()
    trainer = pl.Trainer(strategy=CPUOffloadStrategy(checkpoint_io=own), accelerator="cpu", logger=False)
    assert trainer.strategy.checkpoint_io is own
    default = pl.Trainer(strategy="cpu_offload", accelerator="cpu", logger=False)
    assert isinstance(default.strategy.checkpoint_io, StreamingCheckpointIO)
