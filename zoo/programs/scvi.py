"""A variational autoencoder of RNA and proteins against a classifier: two optimizers, stepped by the library."""

from collections.abc import Callable
from typing import Any

import scvi
import torch

REQUIREMENTS = ("scvi-tools==1.5.1",)
NAMESPACE = "lightning.pytorch"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Fit totalVI to synthetic cells of two laboratories."""
    scvi.settings.seed = 7
    cells = scvi.data.synthetic_iid(batch_size=128, n_genes=40, n_proteins=10)
    scvi.model.TOTALVI.setup_anndata(cells, batch_key="batch", protein_expression_obsm_key="protein_expression")
    model = scvi.model.TOTALVI(cells, n_latent=5, n_hidden=32)
    model.train(
        max_epochs=10, batch_size=64, adversarial_classifier=True, early_stopping=False, **{**options, "logger": None}
    )
    return lambda: torch.from_numpy(model.get_latent_representation(cells))
