"""Train models whose optimizer does not fit the GPU: `Trainer(strategy="cpu_offload")`.

Importing this package registers the strategy in every Lightning namespace that is installed.
"""

from lightning_cpu_offload.callbacks import OffloadMonitor
from lightning_cpu_offload.estimate import estimate
from lightning_cpu_offload.namespaces import INSTALLED
from lightning_cpu_offload.precision import CPUOffloadPrecision
from lightning_cpu_offload.strategy import CPUOffloadStrategy

__version__ = "0.1.0"

__all__ = ["CPUOffloadPrecision", "CPUOffloadStrategy", "OffloadMonitor", "estimate"]


def _register() -> None:
    for namespace in INSTALLED:
        namespace.strategies.StrategyRegistry.register(
            CPUOffloadStrategy.strategy_name,
            CPUOffloadStrategy._variants[namespace.__name__],
            description="FP32 masters and optimizer state in host memory",
            override=True,
        )


_register()
