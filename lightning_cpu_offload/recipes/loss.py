"""Cross-entropy of a language model whose full logits never exist.

With 32,000 words, the logits of 512 positions, their FP32 softmax and its gradient take 230 MB, as much as
the weights of several layers. But rows are independent, and the gradient of a row's logits is known as soon
as its loss is: softmax minus one at the target. So a few rows at a time go all the way, from hidden states to
their loss and to their share of both gradients, and what stays is as large as the gradients themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, num_chunks: int) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``targets``, a chunk of rows at a time.

    Matrix products have the dtype of the operands, or autocast's; what lies between them is FP32. The
    weight's gradient is rounded to its dtype once a chunk.

    Args:
        hidden: ``[N, d_model]``.
        weight: ``[vocab_size, d_model]``.
        targets: ``[N]`` ids; every one counts.
        num_chunks: Pieces to cut the ``N`` rows into.

    Returns:
        The FP32 scalar mean over all rows. It can be differentiated once.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, num_chunks)
        return loss
    chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
    losses = [_summed_loss(_log_probs(rows, weight), ids) for rows, ids in chunks]
    return torch.stack(losses).sum() / len(targets)


def _log_probs(rows: Tensor, weight: Tensor) -> Tensor:
    return F.log_softmax((rows @ weight.T).float(), dim=1)


def _summed_loss(log_probs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(log_probs, targets, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, num_chunks: int) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        losses = []
        chunked = (tensor.chunk(num_chunks) for tensor in (hidden, targets, grad_hidden))
        for rows, ids, grad_rows in zip(*chunked, strict=True):
            log_probs = _log_probs(rows, weight)
            losses.append(_summed_loss(log_probs, ids))
            grad_logits = log_probs.exp_()
            grad_logits[torch.arange(len(ids), device=ids.device), ids] -= 1
            grad_logits = grad_logits.div_(len(targets)).to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_rows)
            grad_weight.addmm_(grad_logits.T, rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None


class CrossEntropyHead(nn.Linear):
    """The last layer of a language model: logits, or with targets their mean cross-entropy.

    The loss is taken inside the layer because then nobody but the layer itself reads its weight: whatever
    hooks into a module's forward (to wait for a weight that is on its way, to gather shards) stays right.

    Args:
        d_model: Width of the hidden states.
        vocab_size: Number of token ids.
        num_chunks: Pieces to cut the rows of a batch into; see ``chunked_cross_entropy``.

    Raises:
        ValueError: ``num_chunks`` is not positive.
    """

    def __init__(self, d_model: int, vocab_size: int, num_chunks: int = 1) -> None:
        if num_chunks < 1:
            raise ValueError(f"loss_chunks={num_chunks!r}: must be 1 or more.")
        super().__init__(d_model, vocab_size, bias=False)
        self.num_chunks = num_chunks

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[B, T, d_model]`` to logits ``[B, T, vocab_size]``; with targets ``[B, T]`` to the FP32 loss."""
        if targets is None:
            return super().forward(hidden)
        return chunked_cross_entropy(hidden.flatten(0, 1), self.weight, targets.flatten(), self.num_chunks)
