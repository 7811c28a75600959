"""A temporal fusion transformer: nested dictionaries as batches, metrics as losses, the library's own optimizer."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

REQUIREMENTS = ("pytorch-forecasting==1.8.0",)
NAMESPACE = "lightning.pytorch"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forecast quantiles of eight noisy sines."""
    steps = np.tile(np.arange(60), 8)
    group = np.repeat(np.arange(8), 60)
    values = np.sin(steps / 4.0 + group) + np.random.default_rng(0).normal(0, 0.1, 480) + 2.0
    frame = pd.DataFrame({"time": steps, "group": group.astype(str), "value": values.astype(np.float32)})
    dataset = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=16,
        max_prediction_length=4,
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    loader = dataset.to_dataloader(train=True, batch_size=32, num_workers=0)
    module = TemporalFusionTransformer.from_dataset(
        dataset, learning_rate=0.003, hidden_size=16, attention_head_size=2, loss=QuantileLoss(), optimizer="adamw"
    )
    pl.Trainer(max_steps=30, gradient_clip_val=0.5, **options).fit(
        module, loader, dataset.to_dataloader(train=False, batch_size=32, num_workers=0)
    )
    batch, _ = next(iter(loader))
    return lambda: module.eval()(batch).prediction
