"""Programs off the beaten track that a plain run takes: they must train the same here, or be refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.models import quiet_trainer

FP32 = "32-true"


class Net(pl.LightningModule):
    """A line of two layers under any optimizer."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.make = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(list(torch.randn(24, 8, generator=torch.Generator().manual_seed(1))), batch_size=4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def fit(module: pl.LightningModule, ours: bool = True, precision: Any = FP32, **options: Any) -> pl.LightningModule:
    strategy: Any = CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision(precision)) if ours else "auto"
    quiet_trainer(strategy=strategy, max_epochs=2, **options).fit(module)
    return module


def assert_same(ours: nn.Module, stock: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class ListsFirst(torch.optim.Optimizer):
    """Lists its parameters, calls the closure then, and looks at what hangs on them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in parameters:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.add_(momentum, alpha=-0.1 * getattr(parameter, "lr_scale", 1.0))
        return loss


def test_optimizer_that_lists_its_parameters_before_the_closure() -> None:
    trained = []
    for ours in (True, False):
        module = Net(ListsFirst)
        module.net[0].weight.lr_scale = 0.1
        trained.append(fit(module, ours))
    assert_same(*trained)


@pytest.mark.parametrize("precision", [FP32, "bf16-mixed", "bf16-true"])
def test_weights_written_through_a_state_dict_are_computed_with_at_once(precision: str) -> None:
    class Halved(Net):
        seen: Tensor

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 3:
                for value in self.state_dict().values():
                    value.zero_()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                self.seen = loss.detach()
            return loss

    for optimizer in (sgd, adamw):
        assert fit(Halved(optimizer), precision=precision).seen == 0


def test_backward_through_a_graph_older_than_the_step_is_refused() -> None:
    class Stale(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            self.manual_backward(loss)

    for optimizer in (sgd, adamw):
        for ours in (True, False):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                fit(Stale(optimizer), ours)


def test_optimizers_replaced_during_fit_are_refused() -> None:
    class Rebuilds(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.setup_optimizers(self.trainer)

    with pytest.raises(ValueError, match="optimizers: replaced by new ones during fit"):
        fit(Rebuilds(sgd))


def test_scripted_parts_train() -> None:
    trained = []
    for ours in (True, False):
        module = Net(sgd)
        module.scripted = torch.jit.script(nn.Linear(8, 8))
        trained.append(fit(module, ours))
    assert_same(*trained)


def test_lazy_parameters_are_refused_by_name() -> None:
    module = Net(sgd)
    module.late = nn.LazyLinear(4)
    with pytest.raises(ValueError, match=r"parameter 'late\.weight' is lazy"):
        fit(module)


def test_metrics_of_the_module_are_moved_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their state is in plain attributes, which only `Module._apply` reaches."""
    moved = []
    monkeypatch.setattr(MeanMetric, "_apply", lambda self, fn, *_: moved.append(self) or self)
    module = Net(sgd)
    module.metric = MeanMetric()
    fit(module)
    assert module.metric in moved


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_may_ask_for_the_state_dict() -> None:
    class Forks(Net):
        status = -1

        def on_train_epoch_end(self) -> None:
            child = os.fork()
            if not child:
                os._exit(0 if all(value.isfinite().all() for value in self.state_dict().values()) else 1)
            self.status = os.waitpid(child, 0)[1]

    assert fit(Forks(adamw)).status == 0


def test_num_nodes_beyond_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes=2: strategy='cpu_offload' trains on one machine"):
        pl.Trainer(strategy="cpu_offload", accelerator="cpu", num_nodes=2)


def test_checkpoint_in_the_format_of_old_continues(tmp_path: Path) -> None:
    module = Net(adamw)
    trainer = quiet_trainer(strategy=CPUOffloadStrategy(), max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / ("long" * 60))
    saved = torch.load(tmp_path / ("long" * 60), weights_only=True)
    torch.save(saved, tmp_path / "old", _use_new_zipfile_serialization=False)
    again = Net(adamw)
    quiet_trainer(strategy=CPUOffloadStrategy(), max_epochs=1).fit(again, ckpt_path=tmp_path / "old")
    assert_same(again, module)
