"""Collective variables of a walk between two wells: an eigenvalue problem in the loss, buffers written in each step."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from mlcolvar.cvs import DeepTICA
from mlcolvar.data import DictModule
from mlcolvar.utils.timelagged import create_timelagged_dataset

REQUIREMENTS = ("mlcolvar==1.3.1",)
NAMESPACE = "lightning.pytorch"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Maximize the eigenvalues of the slow modes."""
    walk = torch.randn(1025, 4).cumsum(0) * 0.05
    walk = torch.cat([walk.sin(), torch.randn(1025, 2)], 1)
    data = DictModule(create_timelagged_dataset(walk, lag_time=1), lengths=[0.8, 0.2], batch_size=256)
    module = DeepTICA([6, 32, 32, 3], n_cvs=2)
    lightning.Trainer(max_epochs=10, **options).fit(module, data)
    return lambda: module.eval()(walk)
