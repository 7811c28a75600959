"""An exception or Ctrl+C in any hook of a Trainer leaves the module usable: FP32, on the CPU, free of the offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.models import quiet_trainer
from tests.net import Net, adamw, anatomy, assert_free, batches, offload, weights

CALLBACK_HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = sorted(
    {name for hooks in (ModelHooks, DataHooks, CheckpointHooks) for name in dir(hooks) if not name.startswith("_")}
    - {"configure_sharded_model"}  # gone from Lightning: it refuses to train with one
    - {"test_dataloader", "train_dataloader", "val_dataloader", "predict_dataloader"}  # given to the Trainer here
    | {
        "backward", "configure_callbacks", "configure_gradient_clipping", "configure_optimizers", "forward",
        "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "predict_step", "test_step", "training_step",
        "validation_step", "state_dict", "load_state_dict",
    }
)  # fmt: skip
ERRORS = {"error": (RuntimeError("no"), RuntimeError), "interrupt": (KeyboardInterrupt(), SystemExit)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two epochs."""
    path = tmp_path_factory.mktemp("checkpoint") / "two.ckpt"
    net = Net(scheduled)
    trainer = quiet_trainer(strategy=offload(), max_epochs=2)
    trainer.fit(net, batches(), batches())
    trainer.save_checkpoint(path)
    return path


def scheduled(module: Any) -> Any:
    optimizer = adamw(module)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def stage(hook: str) -> str:
    """The method of a Trainer that calls a hook."""
    return next((name for name in ("test", "predict") if name in hook), "fit")


class Trap:
    """Raises in a method, once that was called `skip` times."""

    def __init__(self, owner: Any, hook: str, error: BaseException, skip: int) -> None:
        self.calls = 0
        original = getattr(owner, hook)

        def trap(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > skip:
                raise error
            return original(*args, **kwargs)

        setattr(owner, hook, trap)  # a function, by which Lightning knows that the hook was overridden


def run(trainer: pl.Trainer, net: Net, hook: str, checkpoint: Path) -> None:
    """Resumes, sanity-checks, trains, validates and saves; or tests; or predicts."""
    if stage(hook) == "fit":
        trainer.fit(net, batches(), batches(), ckpt_path=str(checkpoint))
    else:
        getattr(trainer, stage(hook))(net, batches(), ckpt_path=str(checkpoint))


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    ("owner", "hook"),
    [*(("callback", hook) for hook in CALLBACK_HOOKS), *(("module", hook) for hook in MODULE_HOOKS)],
)
def test_leaves_the_module_usable(owner: str, hook: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    error, raised = ERRORS[kind]
    net, callback = Net(scheduled), pl.Callback()
    before = anatomy(net)
    trainer = quiet_trainer(strategy=offload(), max_epochs=4, gradient_clip_val=1.0)
    trainer.callbacks.extend([callback, ModelCheckpoint(tmp_path, every_n_train_steps=1)])
    holder: Any = net if owner == "module" else callback
    trap = Trap(holder, hook, error, skip=1 if called_often(hook) else 0)
    if hook == "on_exception":
        Trap(net, "training_step", error, skip=1)
    with pytest.raises((raised, type(error))):
        run(trainer, net, hook, checkpoint)
    assert trap.calls, "nobody called the hook"
    vars(holder).pop(hook)
    vars(net).pop("training_step", None)
    if hook == "on_exception":  # Lightning stops at once, and nobody is told that training is over
        trainer.strategy.teardown()
    assert trainer.strategy.offload is None
    assert_usable(net, before)


def called_often(hook: str) -> bool:
    """Whether a run calls it more than once: then it fails in the middle, with state on the host."""
    return any(word in hook for word in ("batch", "step", "backward", "zero_grad", "forward", "clipping"))


def assert_usable(net: Net, before: dict[str, Any]) -> None:
    """The module has what it had before, computes in FP32, trains on in a plain loop and in a stock Trainer."""
    after = anatomy(net)
    assert after == before
    output = net(torch.randn(4, 8))
    assert output.dtype == torch.float32
    assert output.isfinite().all()
    held = weights(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.loss(torch.randn(4, 8)).backward()
    optimizer.step()
    assert_free(optimizer, net)
    assert any(not torch.equal(value, held[name]) for name, value in net.state_dict().items())


def test_the_check_can_fail() -> None:
    net = Net()
    before = anatomy(net)
    net.inner.bfloat16()
    with pytest.raises(AssertionError):
        assert_usable(net, before)
