"""One source under two names: `lightning.pytorch` and `pytorch_lightning`, together and alone."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

import lightning_cpu_offload as lco

NAMESPACES = pytest.mark.parametrize("ns", [lightning.pytorch, pytorch_lightning], ids=lambda ns: ns.__name__)


def trainer(ns: Any, strategy: Any, **kwargs: Any) -> Any:
    return ns.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=1,
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def fit(ns: Any, strategy: Any, **kwargs: Any) -> tuple[Any, Any]:
    ns.seed_everything(1, verbose=False)
    module = importlib.import_module(f"{ns.__name__}.demos.boring_classes").BoringModel()
    runner = trainer(ns, strategy, **kwargs)
    runner.fit(module)
    return module, runner


STRATEGIES = {
    "name": lambda: "cpu_offload",
    "instance": lco.CPUOffloadStrategy,
    "instance in FP32": lambda: lco.CPUOffloadStrategy(precision_plugin=lco.CPUOffloadPrecision("32-true")),
}


@NAMESPACES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_either_trainer_takes_it(ns: Any, strategy: str) -> None:
    module, runner = fit(ns, STRATEGIES[strategy](), callbacks=lco.OffloadMonitor())
    base = ns.strategies.SingleDeviceStrategy
    assert type(runner.strategy).setup_optimizers is base.setup_optimizers  # its own code drives it, not the other's
    assert type(runner.strategy.precision_plugin).optimizer_step is ns.plugins.Precision.optimizer_step
    assert isinstance(runner.strategy, lco.CPUOffloadStrategy) or ns is pytorch_lightning
    other, _ = fit(pytorch_lightning if ns is lightning.pytorch else lightning.pytorch, STRATEGIES[strategy]())
    assert torch.equal(module.layer.weight, other.layer.weight)


@NAMESPACES
def test_fp32_equals_the_stock_strategy(ns: Any) -> None:
    # BoringModel trains with SGD: torch's own arithmetic on both sides.
    ours, _ = fit(ns, STRATEGIES["instance in FP32"]())
    stock, _ = fit(ns, "auto")
    assert torch.equal(ours.layer.weight, stock.layer.weight)
    assert torch.equal(ours.layer.bias, stock.layer.bias)


@NAMESPACES
def test_precision_as_plugin_of_the_trainer(ns: Any) -> None:
    _, runner = fit(ns, "cpu_offload", plugins=lco.CPUOffloadPrecision("32-true"))
    assert runner.precision == "32-true"


@NAMESPACES
def test_precision_of_the_trainer(ns: Any) -> None:
    assert trainer(ns, "cpu_offload", precision="bf16-true").precision == "bf16-true"
    assert trainer(ns, lco.CPUOffloadStrategy(), precision="bf16-mixed").precision == "bf16-mixed"


@NAMESPACES
def test_trainer_and_module_can_be_copied_and_pickled(ns: Any) -> None:
    module, runner = fit(ns, lco.CPUOffloadStrategy())
    assert type(pickle.loads(pickle.dumps(runner.strategy))) is type(runner.strategy)
    assert type(pickle.loads(pickle.dumps(runner.strategy.precision_plugin))) is type(runner.strategy.precision_plugin)
    copy.deepcopy(runner)
    assert torch.equal(copy.deepcopy(module).layer.weight, module.layer.weight)


@pytest.mark.parametrize("blocked", ["lightning", "pytorch_lightning"])
def test_one_namespace_is_enough(blocked: str) -> None:
    program = f"""
        import sys
        sys.modules[{blocked!r}] = None
        import lightning_cpu_offload as lco
        from lightning_cpu_offload.namespaces import INSTALLED, pl
        assert {blocked!r} not in [module.__name__.split(".")[0] for module in INSTALLED], INSTALLED
        import importlib
        boring = importlib.import_module(pl.__name__ + ".demos.boring_classes")
        for strategy in ("cpu_offload", lco.CPUOffloadStrategy()):
            module = boring.BoringModel()
            before = module.layer.weight.detach().clone()
            trainer = pl.Trainer(
                strategy=strategy, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, callbacks=[lco.OffloadMonitor()],
            )
            trainer.fit(module)
            assert trainer.strategy.offload is None and not before.equal(module.layer.weight)
        import lightning_cpu_offload.recipes, lightning_cpu_offload.cli
        print("trained with", pl.__name__)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    expected = "pytorch_lightning" if blocked == "lightning" else "lightning.pytorch"
    assert f"trained with {expected}" in result.stdout, result.stderr


def test_without_lightning_the_import_says_what_to_install() -> None:
    program = """
        import sys
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        import lightning_cpu_offload
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "pip install lightning" in result.stderr
