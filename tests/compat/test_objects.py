"""What the strategy leaves alone: the optimizer's class, where its state is, and the rest of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import strategy as stock_strategy

from tests.compat.nets import Noted
from tests.compat.twin import RUN_RTOL, assert_same, assert_twins, ours, run
from tests.models import quiet_trainer
from tests.net import adamw, batches, sgd


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_state_never_goes_to_the_device(optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning moves it there after setup and after a checkpoint was loaded: 8 bytes for each parameter."""
    moves: list[str] = []

    def spy(name: str) -> None:
        move = getattr(stock_strategy, name)

        def record(*args: Any) -> None:
            moves.append("teardown" if tearing_down else "training")
            move(*args)

        monkeypatch.setattr(stock_strategy, name, record)

    spy("_optimizers_to_device")
    spy("_optimizer_to_device")
    tearing_down: list[bool] = []

    class Watched(Noted):
        def on_train_end(self) -> None:
            tearing_down.append(True)

    seen = {}
    for strategy in ("auto", ours()):
        moves.clear()
        tearing_down.clear()
        first = quiet_trainer(strategy="auto", max_epochs=1)
        first.fit(Noted(optimizer), batches())
        first.save_checkpoint(tmp_path / "first")
        moves.clear()
        trainer = quiet_trainer(strategy=strategy, max_epochs=2)
        trainer.fit(Watched(optimizer), batches(), ckpt_path=tmp_path / "first")
        seen[type(trainer.strategy).__name__] = "training" in moves
    assert seen == {"SingleDeviceStrategy": True, "CPUOffloadStrategy": False}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_object_the_user_made_is_the_one_that_steps(optimizer: Any) -> None:
    made: list[torch.optim.Optimizer] = []

    class Keeps(Noted):
        def configure_optimizers(self) -> Any:
            made.append(super().configure_optimizers())
            return made[-1]

        def on_train_batch_end(self, *_: Any) -> None:
            held = made[-1].param_groups[0]["params"]
            self.notes.append([p is own for p, own in zip(held, self.parameters(), strict=True)])
            self.notes.append(
                (self.trainer.optimizers[0] is made[-1], self.optimizers().optimizer is made[-1], type(made[-1]))
            )

    before = set(type(optimizer(Noted())).__subclasses__())
    assert_twins(lambda: Keeps(optimizer), RUN_RTOL if optimizer is adamw else 0.0)
    assert vars(made[-1]).keys() == vars(optimizer(Noted())).keys()
    # Lightning's wrapper is a subclass of its own making; one by the name of torch's class would shadow that.
    added = set(type(made[-1]).__subclasses__()) - before
    assert {cls.__name__ for cls in added} <= {f"Lightning{type(made[-1]).__name__}"}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_step_that_the_user_put_on_the_object(optimizer: Any) -> None:
    """Libraries wrap `optimizer.step` on the instance, as torch's schedulers do, and call the class's own inside."""

    class Wrapped(Noted):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            plain = made.step

            def step(closure: Any = None) -> Any:
                self.notes.append("step")
                return plain(closure)

            made.step = step
            return made

    own = assert_twins(lambda: Wrapped(optimizer), RUN_RTOL if optimizer is adamw else 0.0)
    assert own.notes.count("step") == 3


def test_plain_trainers_of_the_same_process_are_not_touched() -> None:
    stock = run(Noted)
    run(lambda: Noted(adamw), ours("bf16-mixed"))
    run(Noted, ours("bf16-true"))
    assert_same(stock, run(Noted))
    assert not vars(sgd(Noted()))["_optimizer_step_pre_hooks"]
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.filterwarnings("ignore:.*LightningCLI's args parameter")
def test_command_lines_find_optimizers_by_their_short_names() -> None:
    run(Noted, ours())
    run(lambda: Noted(adamw), ours("bf16-mixed"))
    for name in ("SGD", "AdamW"):
        cli = LightningCLI(
            BoringModel,
            run=False,
            args=[f"--optimizer={name}", "--optimizer.lr=0.25"],
            save_config_callback=None,
            trainer_defaults={"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
        )
        chosen = cli.model.configure_optimizers()
        assert type(chosen) is getattr(torch.optim, name)
        assert chosen.param_groups[0]["lr"] == 0.25


def test_the_strategy_is_one_word() -> None:
    """The promise itself: with a string and nothing else, on whatever precision the machine is good at."""
    before, module = Noted(adamw).state_dict(), Noted(adamw)
    trainer = quiet_trainer(strategy="cpu_offload", max_epochs=1)
    trainer.fit(module, batches())
    assert isinstance(trainer, pl.Trainer)
    assert trainer.global_step == 3
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == run(lambda: Noted(adamw)).moved
