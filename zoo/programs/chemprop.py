"""Message passing over molecules: batches are dataclasses of graphs, the schedule is the library's own."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from chemprop import data, featurizers, models, nn

REQUIREMENTS = ("chemprop==2.3.1",)
NAMESPACE = "lightning.pytorch"

SMILES = ["C" * n + tail for n in range(1, 9) for tail in ("O", "N", "C(=O)O", "c1ccccc1")]


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Fit the number of atoms of 32 small molecules."""
    points = [data.MoleculeDatapoint.from_smi(smiles, np.array([len(smiles) / 8.0])) for smiles in SMILES]
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    loader = data.build_dataloader(dataset, batch_size=8, num_workers=0, seed=0)
    module = models.MPNN(
        nn.BondMessagePassing(d_h=64),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=64, hidden_dim=64),
        batch_norm=True,
    )
    pl.Trainer(max_epochs=10, **options).fit(module, loader)
    batch = next(iter(loader))
    return lambda: module.eval()(batch.bmg)
