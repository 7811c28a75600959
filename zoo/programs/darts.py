"""Series mixing with quantiles: the library builds its Trainers itself, one to fit and another to predict."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from darts import TimeSeries
from darts.models import TSMixerModel
from darts.utils.likelihood_models.torch import QuantileRegression

REQUIREMENTS = ("darts[torch]==0.48.1",)
NAMESPACE = "pytorch_lightning"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forecast three noisy sines."""
    time = np.arange(300)[:, None] / 6.0 + np.arange(3)
    values = np.sin(time) + np.random.default_rng(0).normal(0, 0.1, time.shape)
    series = TimeSeries.from_values(values.astype(np.float32))
    model = TSMixerModel(
        input_chunk_length=24,
        output_chunk_length=6,
        hidden_size=32,
        ff_size=32,
        use_reversible_instance_norm=True,
        likelihood=QuantileRegression([0.1, 0.5, 0.9]),
        batch_size=64,
        n_epochs=8,
        random_state=0,
        pl_trainer_kwargs=options,
    )
    model.fit(series)
    return lambda: torch.from_numpy(model.predict(6, num_samples=2).all_values().copy())
