"""A GPT as a LightningModule: model, loss, optimizer, schedule and text samples, nothing about offload."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lightning_cpu_offload.namespaces import pl
from lightning_cpu_offload.recipes.loss import CrossEntropyHead
from lightning_cpu_offload.recipes.transformer import Transformer, initialize

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig


@runtime_checkable
class TextCodec(Protocol):
    """What a data module needs so that the GPT can show the text it writes.

    Attributes:
        vocab_size: Ids lie below this.
    """

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Text to ids."""

    def decode(self, ids: list[int]) -> str:
        """Ids to text."""


class Perplexity(MeanMetric):
    """``exp`` of the mean loss per token; torchmetrics' own asks for full logits, which never exist here."""

    def compute(self) -> Tensor:
        """The perplexity of all tokens seen since the last reset."""
        return super().compute().exp()


class GPT(pl.LightningModule):
    """A GPT-2 style language model that learns from batches ``(inputs, targets)`` of ids ``[B, T]``.

    Logs ``train/loss``, ``val/loss`` and ``val/perplexity``, and after each validation a text sample when the
    logger is TensorBoard and the data module is a ``TextCodec``.

    Args:
        num_layers: Number of transformer blocks.
        d_model: Width of the residual stream.
        num_heads: Attention heads per block; must divide ``d_model``.
        vocab_size: Number of token ids.
        context_length: Longest sequence, in tokens.
        tied: Let the head share the token embedding's weight.
        activation_checkpointing: Keep only each block's input for backward: less memory, a third more work.
        loss_chunks: Pieces in which the loss is computed, so that the full logits never exist; 1 is fastest.
        learning_rate: Peak learning rate.
        min_learning_rate_ratio: Where the cosine ends, as a part of ``learning_rate``.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        max_steps: Optimizer step at which the cosine ends; None for the Trainer's own end.
        weight_decay: AdamW's decoupled decay, on matrices only.
        betas: AdamW's two averaging coefficients.
        sample_prompt: Text that the sample continues.
        sample_tokens: Length of the sample in tokens; 0 for none.

    Raises:
        ValueError: A size is not positive, ``num_heads`` does not divide ``d_model``, or there is a sample to
            write and nothing to continue.
    """

    def __init__(
        self,
        *,
        num_layers: int = 4,
        d_model: int = 256,
        num_heads: int = 4,
        vocab_size: int = 256,
        context_length: int = 256,
        tied: bool = True,
        activation_checkpointing: bool = False,
        loss_chunks: int = 1,
        learning_rate: float = 1e-3,
        min_learning_rate_ratio: float = 0.1,
        warmup_steps: int = 100,
        max_steps: int | None = None,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        sample_prompt: str = "def ",
        sample_tokens: int = 0,
    ) -> None:
        super().__init__()
        if sample_tokens and not sample_prompt:
            raise ValueError(f"sample_prompt={sample_prompt!r}: must not be empty. Give a beginning.")
        self.save_hyperparameters()
        self.body = Transformer(
            num_layers=num_layers,
            d_model=d_model,
            num_heads=num_heads,
            vocab_size=vocab_size,
            context_length=context_length,
            activation_checkpointing=activation_checkpointing,
        )
        self.head = CrossEntropyHead(d_model, vocab_size, loss_chunks)
        if tied:
            self.head.weight = self.body.token_embedding.weight
        initialize(self)
        self.perplexity = Perplexity()

    def setup(self, stage: str) -> None:
        """Compares the vocabulary with the data's, before an id out of range stops a device.

        Raises:
            ValueError: The data has ids that the model has no embedding for.
        """
        data, vocab_size = self._codec(), self.hparams["vocab_size"]
        if data is not None and data.vocab_size > vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size!r}: must be {data.vocab_size} or more for this data. "
                "Give the model and the data the same vocab_size."
            )

    def _codec(self) -> TextCodec | None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return data if isinstance(data, TextCodec) else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids ``[B, T]`` to logits ``[B, T, vocab_size]``."""
        return self.head(self.body(tokens))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy of the next token."""
        inputs, targets = batch
        loss = self.head(self.body(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss and the perplexity, each as a mean over the tokens of the epoch."""
        inputs, targets = batch
        loss = self.head(self.body(inputs), targets)
        self.perplexity.update(loss, weight=targets.numel())
        self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))
        self.log("val/perplexity", self.perplexity, batch_size=len(targets))

    def on_validation_epoch_end(self) -> None:
        """Adds a text sample to TensorBoard."""
        trainer, codec = self.trainer, self._codec()
        if not self.hparams["sample_tokens"] or trainer.sanity_checking or not trainer.is_global_zero:
            return
        for logger in self.loggers:
            if isinstance(logger, pl.loggers.TensorBoardLogger) and codec is not None:
                as_code = textwrap.indent(self._sample(codec), "    ")  # TensorBoard renders Markdown
                logger.experiment.add_text("sample", as_code, self.global_step)

    def _sample(self, codec: TextCodec) -> str:
        prompt = torch.tensor([codec.encode(self.hparams["sample_prompt"])], device=self.device)
        # A generator of its own: the global one must run on as if nothing had been sampled.
        generator = torch.Generator().manual_seed(0)
        tokens = self.generate(prompt, self.hparams["sample_tokens"], generator=generator)
        return codec.decode(tokens[0].tolist())

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, num_tokens: int, *, temperature: float = 0.8, generator: torch.Generator
    ) -> Tensor:
        """Continues each prompt by ``num_tokens`` sampled tokens.

        Args:
            prompt: Ids ``[B, T]``, ``T`` at least 1.
            num_tokens: Tokens to add.
            temperature: Divides the logits; 0 takes the likeliest token each time.
            generator: Source of randomness, on the CPU.

        Returns:
            Ids ``[B, T + num_tokens]``.
        """
        tokens = prompt
        for _ in range(num_tokens):
            hidden = self.body(tokens[:, -self.body.context_length :])
            logits = self.head(hidden[:, -1:])[:, 0].float().cpu()
            if temperature:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
        return tokens

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW under a linear warm-up and a cosine."""
        hparams = self.hparams
        groups = parameter_groups(self, hparams["weight_decay"])
        optimizer = torch.optim.AdamW(groups, lr=hparams["learning_rate"], betas=hparams["betas"])
        warmup_steps, max_steps = hparams["warmup_steps"], self._max_steps()
        min_ratio = hparams["min_learning_rate_ratio"]
        scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup_steps, max_steps, min_ratio))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _max_steps(self) -> int:
        if self.hparams["max_steps"] is not None:
            return self.hparams["max_steps"]
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ValueError(
                "max_steps=None: the Trainer has no end from which to take it. "
                "Give max_steps to the model, or max_steps or max_epochs to the Trainer."
            )
        return int(steps)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices, which decay, and norms and biases, which do not."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(step: int, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """Factor on the learning rate of optimizer step ``step``, counted from 0.

    It rises linearly to 1 over ``warmup_steps``, falls as half a cosine to ``min_ratio`` at ``max_steps`` and
    stays there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
