import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cpu_offload.recipes.gpt import GPT, Perplexity, parameter_groups, warmup_cosine
from tests.recipes import NUM_LAYERS, batch, stock_trainer, tiny


def test_parameter_count_of_the_458m_model() -> None:
    with torch.device("meta"):
        sizes = {"num_layers": 24, "d_model": 1152, "num_heads": 16, "vocab_size": 32000}
        model = GPT(**sizes, context_length=1024, tied=False)
    assert sum(p.numel() for p in model.parameters()) == 457_475_328


def test_tied_model_has_one_table_less() -> None:
    untied, tied = (sum(p.numel() for p in tiny(tied=tied).parameters()) for tied in (False, True))
    assert untied - tied == 50 * 32


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    inputs, targets = batch()
    tied, untied = tiny(tied=True, loss_chunks=3), tiny(tied=False, loss_chunks=3)
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model.head(model.body(inputs), targets).backward()
    expected = untied.head.weight.grad + untied.body.token_embedding.weight.grad
    # The same two addends, added in FP32 in another order.
    torch.testing.assert_close(tied.head.weight.grad, expected, rtol=1e-6, atol=1e-8)


def test_initial_deviations() -> None:
    model = tiny(d_model=128, num_layers=8, tied=False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            small = name.endswith(("attention_out.weight", "mlp_out.weight"))
            # The deviation of n >= 2048 normal numbers is itself off by 1/sqrt(2n), 1.6 %; six times that.
            assert parameter.std().item() == pytest.approx(0.02 / 4 if small else 0.02, rel=0.1), name


def test_no_token_sees_what_follows() -> None:
    model = tiny()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).flatten(2).any(-1).all()


def reference_logits(model: GPT, tokens: Tensor) -> Tensor:
    """The same network, spelled out from its weights: one head and one sequence at a time, FP64."""
    weights = {name: value.double() for name, value in model.state_dict().items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.T / math.sqrt(q.shape[1])
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ v

    def logits(sequence: Tensor) -> Tensor:
        x = weights["body.token_embedding.weight"][sequence]
        x = x + weights["body.position_embedding.weight"][: len(sequence)]
        for layer in (f"body.blocks.{i}" for i in range(NUM_LAYERS)):
            qkv = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.qkv").split(32, dim=1)
            heads = zip(*(part.split(8, dim=1) for part in qkv), strict=True)
            x = x + linear(torch.cat([attend(*head) for head in heads], dim=1), f"{layer}.attention_out")
            wide = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp_in")
            wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
            x = x + linear(wide, f"{layer}.mlp_out")
        return norm(x, "body.norm") @ weights["head.weight"].T

    return torch.stack([logits(sequence) for sequence in tokens])


def test_logits_against_the_formula() -> None:
    model, (tokens, _) = tiny(), batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # no bias or scale that could go unnoticed
        expected = reference_logits(model, tokens)
        # A dozen FP32 sums of up to 128 terms, one after the other, on logits up to 10.
        torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_activation_checkpointing_changes_no_bit(autocast: bool) -> None:
    losses, grads = [], []
    for activation_checkpointing in (False, True):
        model, (inputs, targets) = tiny(activation_checkpointing=activation_checkpointing), batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.head(model.body(inputs), targets)
        loss.backward()
        losses.append(loss)
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(*losses)
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_activation_checkpointing_runs_each_block_twice() -> None:
    calls = []
    model, (inputs, targets) = tiny(activation_checkpointing=True), batch()
    for block in model.body.blocks:
        block.attention_norm.register_forward_hook(lambda *_: calls.append(1))
    loss = model.head(model.body(inputs), targets)
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_in_one_group(tied: bool) -> None:
    model = tiny(tied=tied)
    model.body.norm.bias.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    grouped = [id(p) for p in decayed["params"] + plain["params"]]
    assert sorted(grouped) == sorted({id(p) for p in model.parameters()} - {id(model.body.norm.bias)})
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in plain["params"])


def test_learning_rate_factors() -> None:
    factors = [warmup_cosine(step, warmup_steps=4, max_steps=12, min_ratio=0.1) for step in range(14)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.55)  # half way down: the mean of 1 and 0.1
    assert factors[6] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter: cos(pi / 4)
    assert factors[12] == factors[13] == pytest.approx(0.1)


class Rates(pl.Callback):
    """Learning rates that the optimizer stepped with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_schedule_counts_optimizer_steps_and_ends_with_the_trainer() -> None:
    rates = Rates()
    model = tiny(learning_rate=1e-3, warmup_steps=2)
    loader = DataLoader(list(zip(*batch(6), strict=True)), batch_size=1)
    stock_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[rates]).fit(model, loader)
    # Three steps in each of two epochs, so the cosine ends at 6.
    assert rates.rates == pytest.approx([1e-3 * warmup_cosine(step, 2, 6, 0.1) for step in range(6)])


def test_endless_training_needs_max_steps() -> None:
    model, loader = tiny(), DataLoader([batch()], batch_size=None)
    with pytest.raises(ValueError, match=r"max_steps=None: the Trainer has no end.*Give max_steps"):
        stock_trainer(max_epochs=-1).fit(model, loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"num_heads=5: must divide d_model=32"),
        ({"num_layers": 0}, r"num_layers=0: must be 1 or more"),
        ({"loss_chunks": 0}, r"loss_chunks=0: must be 1 or more"),
        ({"sample_prompt": "", "sample_tokens": 1}, r"sample_prompt='': must not be empty"),
    ],
)
def test_bad_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_too_long_a_sequence() -> None:
    with pytest.raises(ValueError, match=r"context_length=16: the batch has sequences of 17 tokens"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


def test_perplexity_weighs_tokens() -> None:
    perplexity = Perplexity()
    perplexity.update(torch.tensor(1.0), weight=30)
    perplexity.update(torch.tensor(3.0), weight=10)
    assert perplexity.compute().item() == pytest.approx(math.exp(1.5))


def test_validation_logs_loss_and_perplexity_of_every_token() -> None:
    model, (inputs, targets) = tiny(loss_chunks=3), batch(5)
    loader = DataLoader(list(zip(inputs, targets, strict=True)), batch_size=2)  # the last batch is smaller
    logged = stock_trainer(max_steps=1).validate(model, loader, verbose=False)[0]
    with torch.no_grad():
        expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    # FP32 means of 80 losses, taken in another order.
    assert logged["val/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert logged["val/perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-5)


def test_learns_one_batch_by_heart() -> None:
    model = tiny(learning_rate=1e-2, loss_chunks=2)
    trainer = stock_trainer(max_steps=60)
    trainer.fit(model, DataLoader([batch()] * 60, batch_size=None))
    # From chance, ln 50 = 3.9; 48 tokens are few for 27,000 parameters.
    assert trainer.callback_metrics["train/loss"] < 0.5


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_stock_trainer_in_each_precision(precision: str) -> None:
    # A step large enough to move a norm's weight of 1 in BF16, where the next number is 2^-7 away.
    model = tiny(loss_chunks=2, activation_checkpointing=True, learning_rate=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    loader = DataLoader([batch()], batch_size=None)
    trainer = stock_trainer(max_steps=2, precision=precision)
    trainer.fit(model, loader, loader)
    assert math.isfinite(trainer.callback_metrics["val/loss"])
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_checkpoint_rebuilds_the_model(tmp_path: Any) -> None:
    model = tiny(tied=False)
    trainer = stock_trainer(max_steps=1)
    trainer.fit(model, DataLoader([batch()], batch_size=None))
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    loaded = GPT.load_from_checkpoint(tmp_path / "gpt.ckpt", weights_only=True)
    tokens, _ = batch()
    assert torch.equal(loaded(tokens), model(tokens))
