"""Poisson's equation by a physics-informed network: second derivatives in the loss, the loss inside submodules."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torchphysics as tp

REQUIREMENTS = ("torchphysics==1.1.2",)
NAMESPACE = "pytorch_lightning"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Solve u'' = -1 in the unit square with u = 0 on its border, and a coefficient learned beside it."""
    x, u = tp.spaces.R2("x"), tp.spaces.R1("u")
    square = tp.domains.Parallelogram(x, [0, 0], [1, 0], [0, 1])
    model = tp.models.FCN(input_space=x, output_space=u, hidden=(32, 32))
    inside = tp.samplers.RandomUniformSampler(square, n_points=128).make_static()
    border = tp.samplers.RandomUniformSampler(square.boundary, n_points=64)
    scale = tp.models.Parameter(init=0.5, space=tp.spaces.R1("D"))
    conditions = [
        tp.conditions.PINNCondition(model, inside, lambda u, x, D: D * tp.utils.laplacian(u, x) + 1.0, parameter=scale),
        tp.conditions.PINNCondition(model, border, lambda u: u),
    ]
    module = tp.solver.Solver(conditions, optimizer_setting=tp.OptimizerSetting(torch.optim.AdamW, lr=5e-3))
    pl.Trainer(max_steps=40, **options).fit(module)
    points = tp.spaces.Points(torch.rand(16, 2), x)
    return lambda: model(points).as_tensor
