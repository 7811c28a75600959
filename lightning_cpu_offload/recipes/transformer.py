"""A decoder-only transformer in plain PyTorch: token ids in, hidden states out.

The layout is GPT-2's (Radford et al. 2019): learned positions, LayerNorm in front of every sublayer, causal
attention, a GELU MLP four times as wide as the model. What turns hidden states into logits or a loss lives
in ``loss.py``; what trains the pair lives in ``gpt.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Causal self-attention, then an MLP, each reading a normalised input and adding to the residual.

    Args:
        d_model: Width of the residual stream.
        num_heads: Attention heads; must divide ``d_model``.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.attention_out = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp_in = nn.Linear(d_model, 4 * d_model)
        self.mlp_out = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, d_model]`` to the same shape."""
        x = x + self.attention_out(self._attention(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attention(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class Transformer(nn.Module):
    """Embeddings, a stack of blocks and a final norm.

    Args:
        num_layers: Number of blocks.
        d_model: Width of the residual stream.
        num_heads: Attention heads per block; must divide ``d_model``.
        vocab_size: Number of token ids.
        context_length: Longest sequence, in tokens.
        activation_checkpointing: Keep only the input of each block for backward and run the block again
            there: the activations of one block at a time instead of all, for about a third more compute.

    Raises:
        ValueError: A size is not positive or ``num_heads`` does not divide ``d_model``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        d_model: int,
        num_heads: int,
        vocab_size: int,
        context_length: int,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        sizes = {
            "num_layers": num_layers,
            "d_model": d_model,
            "num_heads": num_heads,
            "vocab_size": vocab_size,
            "context_length": context_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size!r}: must be 1 or more.")
        if d_model % num_heads:
            raise ValueError(f"num_heads={num_heads!r}: must divide d_model={d_model!r}. Change either.")
        self.context_length = context_length
        self.activation_checkpointing = activation_checkpointing
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(context_length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids ``[B, T]`` to hidden states ``[B, T, d_model]``.

        Raises:
            ValueError: The sequences are longer than ``context_length``.
        """
        length = tokens.shape[1]
        if length > self.context_length:
            raise ValueError(
                f"context_length={self.context_length!r}: the batch has sequences of {length} tokens. "
                "Give the model and the data the same context_length."
            )
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Nothing in a block is random, so there is no RNG state to keep.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.norm(x)


@torch.no_grad()
def initialize(module: nn.Module, std: float = 0.02) -> None:
    """Fill weights as GPT-2 does, in place.

    Matrices are normal with deviation ``std`` and biases zero. The two projections of each block that write
    to the residual stream are smaller by ``sqrt(2 * num_layers)``: that many of them add up.
    """
    blocks = [child for child in module.modules() if isinstance(child, Block)]
    for child in module.modules():
        if isinstance(child, (nn.Linear, nn.Embedding)):
            child.weight.normal_(std=std)
        if isinstance(child, nn.Linear) and child.bias is not None:
            child.bias.zero_()
    for block in blocks:
        for projection in (block.attention_out, block.mlp_out):
            projection.weight.normal_(std=std / math.sqrt(2 * len(blocks)))
