"""LightningModules of many kinds, each with a batch, large enough that their memory is not a matter of roundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cpu_offload.recipes import GPT
from tests.models import ResidualBlock

Batch = Any


class Trained(pl.LightningModule):
    """What all of them share: AdamW over what requires a gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)


class ReadsValues(Trained):
    """A constructor that cannot run without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.scale = self.layer.weight.abs().max().item()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum() / self.scale

    def example_batch(self) -> Tensor:
        return torch.zeros(2, 64)


class Classifier(Trained):
    """A network from images to 10 classes, trained with cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True)
        return loss


class LSTM(Trained):
    """A language model of two recurrent layers."""

    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.recurrent = self.kind(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        hidden, _ = self.recurrent(self.embedding(batch[:, :-1]))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())}


class GRU(LSTM):
    kind = nn.GRU


class Attention(nn.Module):
    """Attention as in Hugging Face's models: products, a mask, softmax, dropout, a residual norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5 + mask
        mixed = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        hidden = self.norm(hidden + self.dropout(self.output(mixed)))
        return self.last_norm(hidden + self.dropout(self.down(F.gelu(self.up(hidden)))))


class MaskedLanguageModel(Trained):
    """A BERT written out: a dict of a batch, a padding mask, labels of which most are ignored."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.words, self.places = nn.Embedding(3000, 128), nn.Embedding(64, 128)
        self.layers = nn.ModuleList(Attention(128, 4) for _ in range(3))
        self.head = nn.Linear(128, 3000)
        self.head.weight = self.words.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = (1.0 - batch["attention_mask"][:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=False) if self.recompute else layer(hidden, mask)
        loss = F.cross_entropy(self.head(hidden).view(-1, 3000), batch["labels"].view(-1), ignore_index=-100)
        self.log("loss", loss.item())  # a value, which fakes do not have
        return loss


class Adapter(nn.Module):
    """LoRA: a frozen linear layer and a trained product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LowRank(Trained):
    """Adapters on a frozen network of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Sequential(Adapter(nn.Linear(512, 512)), nn.GELU(), nn.LayerNorm(512)) for _ in range(4))
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])


class Variational(Trained):
    """A variational autoencoder: sampling inside the step, two terms of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.encoder(batch)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(sample), batch)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence})
        return reconstruction + divergence


class Adversarial(pl.LightningModule):
    """A GAN with manual optimization and two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.2), nn.Linear(512, 784), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        made = self.generator(torch.randn(len(batch), 64, device=self.device))
        of_critic.zero_grad()
        self.manual_backward(F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(batch)).mean())
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(made)).mean())
        of_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters()) for part in (self.generator, self.critic)]


class Segmenter(Trained):
    """A small U-Net: skip connections keep activations for long."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.double(3, 16), self.double(16, 32), self.double(32, 64)])
        self.up = nn.ModuleList([self.double(96, 32), self.double(48, 16)])
        self.head = nn.Conv2d(16, 5, 1)

    @staticmethod
    def double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, kept = batch[0], []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2) if level is not self.down[-1] else x
        for level, skip in zip(self.up, reversed(kept[:-1]), strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))
        return F.cross_entropy(self.head(x), batch[1])


class Mixture(Trained):
    """Experts chosen by a gate, all computed and weighted; an auxiliary loss from the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weights = self.gate(batch).softmax(-1)
        mixed = torch.stack([expert(batch) for expert in self.experts], dim=-1) @ weights.unsqueeze(-1)
        return F.mse_loss(mixed.squeeze(-1), batch) + weights.mean(0).pow(2).sum()


class Encoder(Trained):
    """torch's own transformer encoder with dropout, batch first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 128)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.smooth_l1_loss(self.head(self.encoder(batch)), batch)


def gpt(**changes: Any) -> GPT:
    sizes = {"num_layers": 3, "d_model": 128, "num_heads": 4, "vocab_size": 2000, "context_length": 64}
    return GPT(**{**sizes, **changes})


def tokens(vocab: int = 2000, batch: int = 8, length: int = 64) -> Batch:
    return torch.randint(vocab, (batch, length)), torch.randint(vocab, (batch, length))


def images(size: int = 32) -> Batch:
    return torch.randn(16, 3, size, size), torch.randint(10, (16,))


def masked() -> Batch:
    ids = torch.randint(3000, (8, 64))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def residuals() -> nn.Module:
    blocks = [ResidualBlock(32) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


@dataclass(frozen=True)
class Sample:
    """A module and its batch.

    Attributes:
        module: Builds it.
        batch: Builds one batch.
        onednn: Whether a real run on the CPU uses oneDNN. It keeps copies of tensors in layouts of its own, which no
            other device has; but torch's convolution without it unfolds whole images, so one is run with both
            oneDNN and the layout that it takes as it is.
    """

    module: Callable[[], Any]
    batch: Callable[[], Batch]
    onednn: bool = False


SAMPLES = {
    "gpt": Sample(gpt, tokens),
    "gpt untied, checkpointed, loss in 4 chunks": Sample(
        lambda: gpt(tied=False, activation_checkpointing=True, loss_chunks=4), tokens
    ),
    "lstm": Sample(LSTM, lambda: torch.randint(2000, (24, 13))),
    "gru": Sample(GRU, lambda: torch.randint(2000, (24, 13))),
    "cnn": Sample(lambda: Classifier(convolutions()), images),
    "residual network": Sample(lambda: Classifier(residuals()), images),
    "masked language model": Sample(MaskedLanguageModel, masked),
    "masked language model, checkpointed": Sample(lambda: MaskedLanguageModel(recompute=True), masked),
    "low-rank adapters": Sample(LowRank, lambda: (torch.randn(64, 512), torch.randn(64, 512))),
    "variational autoencoder": Sample(Variational, lambda: torch.rand(256, 784)),
    "adversarial, manual optimization": Sample(Adversarial, lambda: torch.rand(128, 784)),
    "u-net": Sample(
        lambda: Segmenter().to(memory_format=torch.channels_last),
        lambda: (torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last), torch.randint(5, (4, 64, 64))),
        onednn=True,
    ),
    "mixture of experts": Sample(Mixture, lambda: torch.randn(512, 256)),
    "torch's encoder": Sample(Encoder, lambda: torch.randn(8, 64, 128)),
}
