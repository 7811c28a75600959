"""Parameters that come later, state that is loaded, settings that a checkpoint brings along."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn

from tests.compat.nets import BOTH, Noted
from tests.compat.twin import RUN_RTOL, assert_twins, compare, ours, run
from tests.models import quiet_trainer
from tests.net import batches, sgd

AMOUNT = {"lr": 0.05}


def of(kind: type[torch.optim.Optimizer], *parts: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes an optimizer of what requires gradients in some parts of the module."""

    def make(module: Any) -> torch.optim.Optimizer:
        held = [p for part in parts for p in module.get_submodule(part).parameters() if p.requires_grad]
        return kind(held, **AMOUNT)

    return make


KINDS = pytest.mark.parametrize(("kind", "rtol"), [(torch.optim.RMSprop, 0.0), (torch.optim.AdamW, RUN_RTOL)])


class Backbone(Noted):
    """Has a `backbone`, which the callback freezes before the optimizer is made."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__(of(kind, ""))
        self.backbone = nn.Sequential(self.inner, self.norm)


@KINDS
def test_backbone_finetuning(kind: type[torch.optim.Optimizer], rtol: float) -> None:
    own = assert_twins(
        lambda: Backbone(kind),
        rtol,
        max_epochs=4,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)],
    )
    assert len(own.optimizers[0]["groups"]) == 2
    assert "inner.weight" in own.moved


@KINDS
def test_backbone_finetuning_that_is_resumed(kind: type[torch.optim.Optimizer], rtol: float, tmp_path: Path) -> None:
    """Two epochs, then two more from the checkpoint: groups are rebuilt from names before the state is loaded."""

    def drive(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        path = tmp_path / type(trainer.strategy).__name__
        first = quiet_trainer(
            strategy=ours() if "Offload" in path.name else "auto",
            max_epochs=2,
            limit_val_batches=0,
            callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
        )
        first.fit(Backbone(kind), batches())
        first.save_checkpoint(path)
        trainer.fit(module, batches(), ckpt_path=path)

    own = assert_twins(
        lambda: Backbone(kind),
        rtol,
        drive=drive,
        max_epochs=4,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
    )
    assert own.progress["step"] == 12


class ByEpoch(BaseFinetuning):
    """Unfreezes one part an epoch, and freezes the first again in the third."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.inner, module.norm], train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.norm, optimizer, lr=0.01)
        elif epoch == 2:
            self.unfreeze_and_add_param_group(module.inner, optimizer, initial_denom_lr=5)
        elif epoch == 3:
            self.freeze(module.norm)


@KINDS
def test_finetuning_by_epochs(kind: type[torch.optim.Optimizer], rtol: float) -> None:
    own = assert_twins(
        lambda: Noted(of(kind, "")), rtol, max_epochs=5, callbacks=lambda: [ByEpoch()], ignore=["checkpoint"]
    )
    assert len(own.optimizers[0]["groups"]) == 3


class Changes(Noted):
    """Changes its groups after the first batch.

    Args:
        way: How.
        make: Makes the optimizer.
    """

    def __init__(self, way: str, make: Any) -> None:
        super().__init__(make)
        self.way = way

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        groups = optimizer.param_groups
        if batch_idx != 1 or self.current_epoch:
            return
        if self.way == "added":
            optimizer.add_param_group({"params": [*self.outer.parameters()], "lr": 0.02})
        elif self.way == "unfrozen and added":
            self.frozen.requires_grad_(True)
            optimizer.add_param_group({"params": [*self.frozen.parameters()]})
        elif self.way == "unfrozen":
            self.frozen.requires_grad_(True)
        elif self.way == "frozen":
            self.inner.requires_grad_(False)
        elif self.way == "removed":
            optimizer.state.pop(groups[0]["params"].pop(0), None)
        elif self.way == "reordered":
            groups[0]["params"].reverse()
        elif self.way == "settings":
            groups[0].update(weight_decay=0.1, lr=0.01)
        elif self.way == "maximize":
            groups[0]["maximize"] = True
        elif self.way == "state cleared":
            optimizer.state.clear()
        elif self.way == "list replaced":
            groups[0]["params"] = [*groups[0]["params"]]
        elif self.way == "new parameter":
            self.extra = nn.Parameter(torch.full((4, 4), 0.1))
            optimizer.add_param_group({"params": [self.extra]})

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y @ self.extra if hasattr(self, "extra") else y


PARTS = {"added": ("inner",), "unfrozen and added": ("inner", "outer")}
CHANGES = ["added", "unfrozen and added", "frozen", "removed", "reordered", "settings", "maximize", "state cleared"]


@pytest.mark.filterwarnings("ignore:.*require gradients but are in no optimizer")
@pytest.mark.parametrize("way", [*CHANGES, "list replaced", "new parameter"])
@KINDS
def test_groups_changed_while_training(way: str, kind: type[torch.optim.Optimizer], rtol: float) -> None:
    make = of(kind, *PARTS.get(way, ("inner", "norm", "outer")))
    assert_twins(lambda: Changes(way, make), rtol, max_epochs=2)


@KINDS
def test_parameters_frozen_in_the_optimizer_and_unfrozen_later(kind: type[torch.optim.Optimizer], rtol: float) -> None:
    def everything(module: Any) -> torch.optim.Optimizer:
        return kind(module.parameters(), **AMOUNT)

    own = assert_twins(lambda: Changes("unfrozen", everything), rtol, max_epochs=2)
    assert "frozen.weight" in own.moved


FLAGS: list[dict[str, Any]] = [
    {"capturable": True},
    {"foreach": True},
    {"fused": True},
    {"lr": torch.tensor(0.02)},
    {"maximize": True},
    {"amsgrad": False, "betas": (0.5, 0.9)},
]


def known(kind: type[torch.optim.Optimizer], flags: dict[str, Any]) -> bool:
    """Whether the optimizer has all of these settings."""
    return set(flags) <= set(kind([nn.Parameter(torch.ones(1))], lr=0.01).param_groups[0])


FLAGGED = [
    pytest.param(kind, flags, id=f"{kind.__name__}-{next(iter(flags))}")
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD)
    for flags in FLAGS
    if known(kind, flags)
]


@pytest.mark.parametrize(("kind", "flags"), FLAGGED)
def test_settings_from_a_checkpoint(kind: type[torch.optim.Optimizer], flags: dict[str, Any], tmp_path: Path) -> None:
    """A run on another machine leaves its switches in the checkpoint; `capturable` means a device we do not step on."""
    first = quiet_trainer(strategy="auto", max_epochs=1)
    first.fit(Noted(of(kind, "")), batches())
    first.save_checkpoint(tmp_path / "plain")
    saved = torch.load(tmp_path / "plain", weights_only=True)
    saved["optimizer_states"][0]["param_groups"][0].update(flags)
    torch.save(saved, tmp_path / "flagged")

    def resume(path: str) -> Callable[..., None]:
        return lambda trainer, module: trainer.fit(module, batches(), ckpt_path=tmp_path / path)

    # torch refuses `capturable` on the CPU: there the truth is a run without it.
    expected = run(
        lambda: Noted(of(kind, "")), drive=resume("plain" if "capturable" in flags else "flagged"), max_epochs=2
    )
    own = run(lambda: Noted(of(kind, "")), ours(), drive=resume("flagged"), max_epochs=2)
    rtol = RUN_RTOL if kind is torch.optim.AdamW else 0.0
    compare("weights", own.weights, expected.weights, rtol)
    compare("state", own.optimizers[0]["state"], expected.optimizers[0]["state"], rtol)
    group = own.optimizers[0]["groups"][0]
    compare("settings", {name: group[name] for name in flags}, flags)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@BOTH
def test_state_that_is_loaded_stays_fp32_and_on_the_host(
    optimizer: Any, rtol: float, precision: str, tmp_path: Path
) -> None:
    """Lightning would move it to the device after setup, and torch cast it to the dtype of the weights."""
    first = quiet_trainer(strategy="auto", max_epochs=1)
    first.fit(Noted(optimizer), batches())
    first.save_checkpoint(tmp_path / "plain")
    truth = torch.load(tmp_path / "plain", weights_only=True)["optimizer_states"][0]["state"]
    seen: list[dict[int, Any]] = []

    class Looks(Noted):
        def on_train_start(self) -> None:
            seen.append(copy.deepcopy(self.optimizers(use_pl_optimizer=False).state_dict()["state"]))

    run(
        lambda: Looks(optimizer),
        ours(precision),
        drive=lambda trainer, module: trainer.fit(module, batches(), ckpt_path=tmp_path / "plain"),
        max_epochs=2,
    )
    compare("state", seen[0], truth)


def test_state_loaded_by_the_user_counts() -> None:
    trained = run(Noted).checkpoint["optimizer_states"][0]

    class Loads(Noted):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                self.optimizers(use_pl_optimizer=False).load_state_dict(copy.deepcopy(trained))

    assert_twins(Loads)


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).state_dict()

    class Loads(Noted):
        def on_train_batch_end(self, *_: Any) -> None:
            with pytest.raises(ValueError, match="doesn't match the size"):
                self.optimizers(use_pl_optimizer=False).load_state_dict(other)

    assert_twins(lambda: Loads(sgd))
