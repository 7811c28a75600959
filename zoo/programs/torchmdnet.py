"""Energies and forces of atoms by an equivariant transformer: double backward, `optimizer_step` overridden."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torchmdnet.module import LNNP

# requests: imported by torch_geometric, not among the library's requirements.
REQUIREMENTS = ("torchmd-net==3.1.0", "requests")
NAMESPACE = "lightning.pytorch"

MODEL = {
    "model": "equivariant-transformer",
    "embedding_dimension": 32,
    "num_layers": 2,
    "num_rbf": 16,
    "rbf_type": "expnorm",
    "trainable_rbf": False,
    "activation": "silu",
    "attn_activation": "silu",
    "num_heads": 4,
    "distance_influence": "both",
    "neighbor_embedding": True,
    "cutoff_lower": 0.0,
    "cutoff_upper": 4.0,
    "max_z": 10,
    "max_num_neighbors": 16,
    "output_model": "Scalar",
    "reduce_op": "add",
    "derivative": True,
    "atom_filter": -1,
    "prior_model": None,
    "precision": 32,
    "load_model": None,
    "remove_ref_energy": False,
}
TRAINING = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    "lr_factor": 0.8,
    "lr_patience": 10,
    "lr_min": 1e-6,
    "lr_warmup_steps": 5,
    "ema_alpha_y": 1.0,
    "ema_alpha_neg_dy": 1.0,
    "y_weight": 0.1,
    "neg_dy_weight": 0.9,
    "test_interval": -1,
}


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Fit springs between nine atoms and their lattice places."""
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0), torch.zeros(1)) * 1.2
    kinds = torch.tensor([6, 6, 8, 1, 1, 1, 1, 1, 1])
    moves = torch.randn(40, 9, 3) * 0.15
    systems = [
        Data(z=kinds, pos=places + move, y=4 * move.square().sum().reshape(1, 1), neg_dy=-8 * move) for move in moves
    ]
    module = LNNP({**MODEL, **TRAINING})
    loader = DataLoader(systems, batch_size=8)
    pl.Trainer(max_epochs=8, **options).fit(module, loader, DataLoader(systems[:8], batch_size=8))
    return lambda: module(kinds, places)[1].detach()
