from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cpu_offload.recipes.loss import CrossEntropyHead, chunked_cross_entropy


class Operands:
    """A row count that no chunk count divides, and targets that include the first and the last id."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(37, 24, generator=generator).to(dtype).requires_grad_()
        self.weight = torch.randn(61, 24, generator=generator).to(dtype).requires_grad_()
        self.targets = torch.randint(61, (37,), generator=generator)
        self.targets[:2] = torch.tensor([0, 60])

    def chunked(self, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
        loss = chunked_cross_entropy(self.hidden, self.weight, self.targets, num_chunks)
        return (loss, *torch.autograd.grad(loss, (self.hidden, self.weight)))

    def float64(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients by the formula, in FP64: softmax minus one-hot, over the number of rows."""
        hidden, weight = self.hidden.detach().double(), self.weight.detach().double()
        logits = hidden @ weight.T
        one_hot = F.one_hot(self.targets, len(weight)).double()
        loss = (logits.logsumexp(1) - (logits * one_hot).sum(1)).mean()
        grad_logits = (logits.softmax(1) - one_hot) / len(hidden)
        return loss, grad_logits @ weight, grad_logits.T @ hidden


def assert_all_close(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    for ours, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 37, 100])
def test_chunked_loss_and_gradients_in_float32(num_chunks: int) -> None:
    operands = Operands()
    # Sums of up to 61 terms below 1 in FP32: 61 * 2^-24 is 4e-6 of the largest term.
    assert_all_close(operands.chunked(num_chunks), operands.float64(), rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("num_chunks", [1, 5])
def test_chunked_loss_and_gradients_in_bfloat16(num_chunks: int) -> None:
    operands = Operands(torch.bfloat16)
    loss, grad_hidden, grad_weight = operands.chunked(num_chunks)
    assert (loss.dtype, grad_hidden.dtype, grad_weight.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    # Logits up to 20 are rounded by 2^-9 of themselves, 0.04, and so is exp of them; gradients are below 0.2.
    assert_all_close((loss, grad_hidden, grad_weight), operands.float64(), rtol=4e-2, atol=4e-3)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_chunks", [1, 5])
def test_chunked_loss_under_autocast(num_chunks: int, weight_dtype: torch.dtype) -> None:
    operands = Operands(torch.bfloat16)  # values that BF16 holds, so that autocast's cast of them is exact
    hidden = operands.hidden.detach().float().requires_grad_()
    weight = operands.weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, operands.targets, num_chunks)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.float32, weight_dtype]
    # As under pure BF16: the same products of the same numbers.
    assert_all_close((loss, *grads), operands.float64(), rtol=4e-2, atol=4e-3)


def test_float64_reference_notices_one_wrong_target() -> None:
    operands = Operands()
    expected = operands.float64()
    operands.targets[5] += 1
    with pytest.raises(AssertionError):
        assert_all_close(operands.chunked(5), expected, rtol=4e-2, atol=4e-3)


def test_loss_without_gradients_is_the_same() -> None:
    operands = Operands()
    loss, _, _ = operands.chunked(5)
    with torch.no_grad():
        alone = chunked_cross_entropy(operands.hidden, operands.weight, operands.targets, 5)
    assert torch.equal(alone, loss)
    assert not alone.requires_grad


def test_scaled_loss_scales_both_gradients() -> None:
    operands = Operands()
    _, *grads = operands.chunked(5)
    (0.25 * chunked_cross_entropy(operands.hidden, operands.weight, operands.targets, 5)).backward()
    assert torch.equal(operands.hidden.grad, 0.25 * grads[0])  # a power of two is exact
    assert torch.equal(operands.weight.grad, 0.25 * grads[1])


def test_second_backward_is_refused() -> None:
    operands = Operands()
    loss = chunked_cross_entropy(operands.hidden, operands.weight, operands.targets, 5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest result of any operation had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(("num_chunks", "rows"), [(1, 64), (8, 8)])
def test_logits_of_a_chunk_are_the_largest_that_exist(num_chunks: int, rows: int) -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, weight, torch.arange(64), num_chunks).backward()
    assert largest.elements == rows * 1000


def test_head_without_targets_gives_logits() -> None:
    head, hidden = CrossEntropyHead(8, 11, num_chunks=2), torch.randn(2, 3, 8)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)
