"""DeepAR: a recurrent network that samples its forecasts, built and trained by the library's estimator."""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

REQUIREMENTS = ("gluonts[torch]==0.17.0",)
NAMESPACE = "lightning.pytorch"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forecast eight noisy sines; the predictor is read from the best checkpoint."""
    folder = tempfile.TemporaryDirectory()
    time = np.arange(120) / 5.0
    rng = np.random.default_rng(0)
    data = ListDataset(
        [{"start": "2020-01-01", "target": np.sin(time + n) + rng.normal(0, 0.1, 120) + 2} for n in range(8)], freq="D"
    )
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=8,
        context_length=16,
        hidden_size=32,
        batch_size=32,
        num_batches_per_epoch=10,
        trainer_kwargs={"max_epochs": 4, **options, "enable_checkpointing": True, "default_root_dir": folder.name},
    )
    predictor = estimator.train(data)
    return lambda: torch.from_numpy(np.stack([forecast.samples for forecast in predictor.predict(data)]))
