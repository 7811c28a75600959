"""A hierarchical forecaster: the model is built with the Trainer's options and keeps them among its hyperparameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MQLoss
from neuralforecast.models import NHITS

REQUIREMENTS = ("neuralforecast==3.3.0",)
NAMESPACE = "pytorch_lightning"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forecast four noisy sines."""
    steps = np.tile(np.arange(120), 4)
    names = np.repeat(np.arange(4), 120)
    values = np.sin(steps / 5.0 + names) + np.random.default_rng(0).normal(0, 0.1, 480)
    frame = pd.DataFrame({"unique_id": names.astype(str), "ds": steps, "y": values.astype(np.float32)})
    model = NHITS(
        h=8,
        input_size=24,
        loss=MQLoss(level=[80]),
        mlp_units=[[32, 32]] * 3,
        max_steps=40,
        windows_batch_size=64,
        learning_rate=1e-3,
        scaler_type="standard",
        random_seed=1,
        **options,
    )
    forecaster = NeuralForecast(models=[model], freq=1)
    forecaster.fit(frame)
    return lambda: torch.from_numpy(forecaster.predict().drop(columns=["unique_id", "ds"]).to_numpy())
