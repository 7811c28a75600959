"""Models people train, as LightningModules that know nothing of the strategy, small enough for a test.

Each has data of its own, `batches()`, from which something can be learned in a dozen steps, and `score(batch)`, the
loss it is judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cpu_offload.recipes.gpt import GPT
from tests.models import ResidualBlock

VOCABULARY, LENGTH = 32, 12

EPS = 1e-4
"""Of Adam: some gradients are zero but for rounding (those of the keys' bias in attention), and the
usual 1e-8 would blow up the difference of two roundings to full steps."""


def generator() -> torch.Generator:
    """Gives the same numbers at every call."""
    return torch.Generator().manual_seed(2)


def token_batches() -> list[Tensor]:
    """12 batches of 8 sequences that count upwards from anywhere: the next token is the last plus one."""
    starts = torch.randint(VOCABULARY, (12, 8, 1), generator=generator())
    return list((starts + torch.arange(LENGTH)) % VOCABULARY)


def image_batches() -> list[tuple[Tensor, Tensor]]:
    """12 batches of 16 images [3, 8, 8], each brighter in the quadrant of its class."""
    labels = torch.randint(4, (12, 16), generator=generator())
    images = torch.randn(12, 16, 3, 8, 8, generator=generator()) * 0.3
    for label in range(4):
        row, column = 4 * (label // 2), 4 * (label % 2)
        images[..., row : row + 4, column : column + 4] += (labels == label)[..., None, None, None] * 1.0
    return list(zip(images, labels, strict=True))


class Real(pl.LightningModule):
    """Trains by AdamW what `score` gives, and logs it."""

    batches: Callable[[], list[Any]] = staticmethod(token_batches)
    learning_rate = 3e-3

    def score(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.score(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.score(batch), batch_size=8)

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, eps=EPS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=24)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LanguageGPT(GPT):
    """The GPT recipe of the configs."""

    batches = staticmethod(lambda: [(tokens[:, :-1], tokens[:, 1:]) for tokens in token_batches()])

    def __init__(self) -> None:
        super().__init__(
            num_layers=2, d_model=32, num_heads=2, vocab_size=VOCABULARY, context_length=LENGTH, warmup_steps=2
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("score", self.score(batch), batch_size=8)

    def score(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return self.head(self.body(inputs), targets)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["eps"] = EPS
        return configured


class LSTMLanguageModel(Real):
    """Embedding, two layers of LSTM with dropout, and an output layer tied to the embedding."""

    learning_rate = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 24, 2, dropout=0.1, batch_first=True)
        self.out = nn.Linear(24, VOCABULARY, bias=False)
        self.out.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.2)

    def score(self, batch: Tensor) -> Tensor:
        logits = self.out(self.lstm(self.embedding(batch[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class ResNet(Real):
    """Residual blocks over images in channels-last memory, a pool, and a linear layer."""

    batches = staticmethod(image_batches)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            ResidualBlock(8),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            ResidualBlock(16),
            nn.Flatten(),
            nn.Linear(256, 4),
        ).to(memory_format=torch.channels_last)

    def score(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images.contiguous(memory_format=torch.channels_last)), labels)


class VAE(Real):
    """A variational autoencoder, which draws noise at every step."""

    batches = staticmethod(image_batches)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 192))

    def score(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images = batch[0]
        mean, log_variance = self.encoder(images).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.ones_like(mean)
        drawn = self.decoder(mean + noise * (log_variance / 2).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).float().mean()
        return F.mse_loss(drawn.float(), images.flatten(1).float()) + 0.01 * divergence


class GAN(Real):
    """Generator and discriminator with an Adam each, stepped by hand, each toggled while the other is at work."""

    batches = staticmethod(image_batches)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 192), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def judged(self, images: Tensor, real: float) -> Tensor:
        verdict = self.discriminator(images.flatten(1))
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, real))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images = batch[0]
        first, second = self.optimizers()
        noise = torch.randn(len(images), 8, device=self.device, dtype=images.dtype)
        self.toggle_optimizer(first)
        self.manual_backward(self.judged(self.generator(noise), 1.0))
        self.clip_gradients(first, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.judged(self.generator(noise).detach(), 0.0)
        self.manual_backward((self.judged(images, 1.0) + fake) / 2)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def score(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """How well the discriminator knows what is real."""
        return self.judged(batch[0], 1.0)

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), lr=3e-3, betas=(0.5, 0.999), eps=EPS) for net in nets], []


def tiny_gpt2() -> nn.Module:
    """GPT-2 of `transformers`, built from a configuration, with dropout and tied embeddings."""
    import transformers  # late: it takes seconds

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def tiny_llama() -> nn.Module:
    """Llama likewise: RMS norms, rotary positions, grouped queries, gated layers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


class HuggingFace(Real):
    """A model of `transformers` that computes its own loss."""

    learning_rate = 1e-2

    def __init__(self, build: Callable[[], nn.Module] = tiny_gpt2) -> None:
        super().__init__()
        self.model = build()

    def score(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class LoRA(HuggingFace):
    """Adapters of `peft` on a frozen Llama, which alone are trained, with the output layer in full."""

    learning_rate = 3e-2

    def __init__(self) -> None:
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        super().__init__(lambda: peft.get_peft_model(tiny_llama(), config))


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "gpt_recipe": LanguageGPT,
    "lstm_language_model": LSTMLanguageModel,
    "resnet": ResNet,
    "vae": VAE,
    "gan": GAN,
    "hugging_face_gpt2": HuggingFace,
    "hugging_face_llama": lambda: HuggingFace(tiny_llama),
    "lora": LoRA,
}
