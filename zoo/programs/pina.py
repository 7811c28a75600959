"""Competing networks for Poisson's equation: two optimizers stepped by the library itself, tensors with labels."""

from collections.abc import Callable
from typing import Any

import torch
from pina import Trainer
from pina.model import FeedForward
from pina.optim import TorchOptimizer
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import CompetitivePhysicsInformedSolver

REQUIREMENTS = ("pina-mathlab==0.3.2.post2610",)
NAMESPACE = "lightning.pytorch"


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Solve it in the unit square."""
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(16, "grid")
    model = FeedForward(input_dimensions=2, output_dimensions=1, layers=[32, 32])
    solver = CompetitivePhysicsInformedSolver(
        problem,
        model,
        discriminator=FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16]),
        optimizer_model=TorchOptimizer(torch.optim.AdamW, lr=2e-3),
        optimizer_discriminator=TorchOptimizer(torch.optim.RMSprop, lr=1e-4),
    )
    Trainer(solver, max_epochs=40, **options).train()
    points = problem.spatial_domain.sample(16, "random")
    return lambda: solver(points).as_subclass(torch.Tensor)
