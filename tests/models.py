"""Small networks, their data and optimizers, and two ways to train them: Lightning and the reference loop.

Every network has a `loss(batch)`, so that both can train the same one. The networks are odd on purpose, each
in the way its name says; dimensions stay under 100 where oddness allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import EPOCHS, Case, ReferenceLoop, Snapshot

Batch = Any
NamedParameters = Iterable[tuple[str, Tensor]]


class Plain(nn.Module):
    """Two linear layers around a norm, a buffer and a constant that are no BF16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(24)
        self.outer = nn.Linear(24, 5)
        self.register_buffer("gain", torch.full((24,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 12) to (batch, 5)."""
        hidden = self.norm(F.gelu(self.inner(x))) * self.gain
        return self.outer(hidden + torch.full((24,), 0.1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error, a scalar."""
        return F.mse_loss(self(batch["x"]), batch["y"])


class Frozen(Plain):
    """The first layer and the norm's bias are not trained, but stay in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.inner.weight, self.inner.bias, self.norm.bias):
            parameter.requires_grad_(False)


class Unused(Plain):
    """One layer never gets a gradient, another one only from batches whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.rarely = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 12) to (batch, 5)."""
        return super().forward(x) + self.rarely(x) if x[0, 0] > 0 else super().forward(x)


class Tied(nn.Module):
    """A next-token model whose output layer is its embedding, and whose one inner layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.mixer = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of tokens (batch, length) given the one before each, a scalar."""
        hidden = self.embedding(batch[:, :-1])
        for _ in range(2):
            hidden = hidden + torch.tanh(self.mixer(hidden))
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Odd(nn.Module):
    """Parameters of 1, 7 and 4097 elements, of 0, 1 and 2 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(7, 1)
        self.wide = nn.Linear(1, 4097)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of the sum of 4097 outputs, a scalar."""
        outputs = torch.tanh(self.wide(self.narrow(batch["x"])) * self.scale)
        return F.mse_loss(outputs.sum(dim=1, keepdim=True) / 64, batch["y"])


class Normalized(nn.Module):
    """A convolution (3 dimensions) and two batch norms, whose running statistics train along."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 6, kernel_size=3, bias=False)
        self.conv_norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(60, 5, bias=False)
        self.outer_norm = nn.BatchNorm1d(5)

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error, a scalar."""
        hidden = torch.relu(self.conv_norm(self.conv(batch["x"].unsqueeze(1))))
        return F.mse_loss(self.outer_norm(self.outer(hidden.flatten(1))), batch["y"])


def regression_batch(inputs: int, outputs: int) -> Callable[[], Batch]:
    """Makes batches of 4 samples, FP32."""
    return lambda: {"x": torch.randn(4, inputs), "y": torch.randn(4, outputs)}


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(hidden)))


def token_batch() -> Batch:
    """3 sequences of 8 of 31 tokens."""
    return torch.randint(31, (3, 8))


@dataclass(frozen=True)
class Structure:
    """A network, its data, and whether its matrices form a parameter group of their own."""

    network: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    grouped: bool = False


STRUCTURES = {
    "plain": Structure(Plain, regression_batch(12, 5)),
    "tied": Structure(Tied, token_batch),
    "frozen": Structure(Frozen, regression_batch(12, 5)),
    "unused": Structure(Unused, regression_batch(12, 5)),
    "groups": Structure(Plain, regression_batch(12, 5), grouped=True),
    "odd": Structure(Odd, regression_batch(7, 1)),
    "batchnorm": Structure(Normalized, regression_batch(12, 5)),
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    # A power of two: g + decay * p, which may cancel, rounds once whether or not the multiply-add is fused.
    "adam_l2": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.125}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}


def build_optimizer(name: str, named_parameters: NamedParameters, grouped: bool) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` over all parameters, or over two groups that differ in lr and weight decay."""
    kind, options = OPTIMIZERS[name]
    parameters = [parameter for _, parameter in named_parameters]
    if not grouped:
        return kind(parameters, **options)
    vectors = {"params": [p for p in parameters if p.ndim < 2], "lr": options["lr"] / 3, "weight_decay": 0.0}
    matrices = {"params": [p for p in parameters if p.ndim >= 2]}
    return kind([vectors, matrices], **options)


def falling(step: int) -> float:
    """Factor of the learning rate after `step` optimizer steps."""
    return 1 / (1 + 0.3 * step)


def make_network(structure: str) -> nn.Module:
    """The same FP32 network at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return STRUCTURES[structure].network()


def make_batches(case: Case) -> list[Batch]:
    """One epoch of batches, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [STRUCTURES[case.structure].batch() for _ in range(case.num_batches)]


class NetworkModule(pl.LightningModule):
    """Trains the network of `case`, keeping every loss and, if `watched`, the state after every step."""

    def __init__(self, case: Case, watched: bool = False) -> None:
        super().__init__()
        self.case = case
        self.watched = watched
        self.network: Any = make_network(case.structure)
        self.losses: list[Tensor] = []
        self.trail: list[Snapshot] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The network's loss, a scalar."""
        loss: Tensor = self.network.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Records a step once its scheduler has moved too."""
        if self.watched and self.trainer.global_step > len(self.trail):
            self.trail.append(self.snapshot())

    def configure_optimizers(self) -> Any:
        """The optimizer of the case, with a learning rate that falls at every step."""
        grouped = STRUCTURES[self.case.structure].grouped
        optimizer = build_optimizer(self.case.optimizer, self.network.named_parameters(), grouped)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def snapshot(self) -> Snapshot:
        """What a user reads now: `state_dict()` of the module and of its optimizer."""
        weights = {name.removeprefix("network."): tensor for name, tensor in self.state_dict().items()}
        return Snapshot(weights, self.trainer.optimizers[0].state_dict())


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on the CPU that writes nothing, unless it is asked for checkpoints."""
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def train_with_lightning(case: Case, watched: bool = False, **options: Any) -> NetworkModule:
    """Trains the case with a Trainer that takes `options` (strategy, precision) beside those of the case."""
    module = NetworkModule(case, watched)
    loader: Any = torch.utils.data.DataLoader(make_batches(case), batch_size=None)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_value,
        gradient_clip_algorithm=None if case.clip == "none" else case.clip,
        **options,
    )
    trainer.fit(module, loader)
    return module


def reference_loop(case: Case, kind: type[ReferenceLoop] = ReferenceLoop) -> ReferenceLoop:
    """The reference for the case, untrained; `kind` may be a wrong one."""

    def build(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return build_optimizer(case.optimizer, named_parameters, STRUCTURES[case.structure].grouped)

    return kind(make_network(case.structure), build, falling, case)


def train_reference(case: Case, kind: type[ReferenceLoop] = ReferenceLoop) -> ReferenceLoop:
    """The reference for the case, trained on the same batches as often as `train_with_lightning` does."""
    return reference_loop(case, kind).fit(make_batches(case), EPOCHS)
