"""Train models whose optimizer does not fit the GPU: `Trainer(strategy="cpu_offload")`.

Importing this package registers the strategy in every Lightning namespace that is installed.
"""

from typing import Any

from lightning_cpu_offload.callbacks import OffloadMonitor
from lightning_cpu_offload.ddp import CPUOffloadDDPStrategy
from lightning_cpu_offload.estimate import estimate
from lightning_cpu_offload.namespaces import INSTALLED
from lightning_cpu_offload.precision import CPUOffloadPrecision
from lightning_cpu_offload.strategy import CPUOffloadStrategy

__version__ = "0.1.0"

__all__ = ["CPUOffloadDDPStrategy", "CPUOffloadPrecision", "CPUOffloadStrategy", "OffloadMonitor", "estimate"]


def _register() -> None:
    descriptions: dict[Any, str] = {
        CPUOffloadStrategy: "FP32 masters and optimizer state in host memory",
        CPUOffloadDDPStrategy: "the same on several devices, each with its part of masters and state",
    }
    for namespace in INSTALLED:
        for strategy, description in descriptions.items():
            namespace.strategies.StrategyRegistry.register(
                strategy.strategy_name, strategy._variants[namespace.__name__], description=description, override=True
            )


_register()
