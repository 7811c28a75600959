from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_cpu_offload.recipes.gpt import GPT
from tests.recipes import batch, stock_trainer, tiny


class Alphabet(pl.LightningDataModule):
    """Random ids that stand for characters."""

    vocab_size = 50

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 50 for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + token) for token in ids)

    def train_dataloader(self) -> DataLoader:
        return DataLoader([batch()], batch_size=None)

    val_dataloader = train_dataloader


def test_greedy_generation_takes_the_likeliest_token() -> None:
    model, (tokens, _) = tiny(), batch()
    generated = model.generate(tokens[:, :4], 5, temperature=0, generator=torch.Generator())
    assert torch.equal(generated[:, :4], tokens[:, :4])
    for length in range(4, 9):
        assert torch.equal(generated[:, length], model(generated[:, :length])[:, -1].argmax(-1))


def test_generation_slides_past_the_context() -> None:
    model, (tokens, _) = tiny(), batch()
    read = []
    model.body.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    generated = model.generate(tokens, 3, temperature=0, generator=torch.Generator())
    assert generated.shape == (3, 19)
    assert all(map(torch.equal, read, (generated[:, start : start + 16] for start in range(3))))


def test_generation_draws_from_its_generator_alone() -> None:
    model, (tokens, _) = tiny(), batch()
    state = torch.get_rng_state()
    first, second, other = (
        model.generate(tokens, 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def run_with_sample(tmp_path: Path, sample_tokens: int) -> tuple[GPT, list[tuple[str, str, int]]]:
    model, written = tiny(sample_prompt="ab", sample_tokens=sample_tokens), []
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_text = lambda *arguments: written.append(arguments)
    stock_trainer(max_steps=2, logger=logger, num_sanity_val_steps=1).fit(model, datamodule=Alphabet())
    return model, written


def test_text_sample_follows_each_validation(tmp_path: Path) -> None:
    _, written = run_with_sample(tmp_path, 7)
    assert [(tag, step) for tag, _, step in written] == [("sample", 1), ("sample", 2)]
    prompt = Alphabet().decode(Alphabet().encode("ab"))
    assert all(text.startswith("    " + prompt) and len(text) == 4 + 2 + 7 for _, text, _ in written)


def test_text_sample_does_not_change_the_run(tmp_path: Path) -> None:
    states, weights = [], []
    for sample_tokens in (0, 7):
        model, written = run_with_sample(tmp_path, sample_tokens)
        assert len(written) == (2 if sample_tokens else 0)
        states.append(torch.get_rng_state())
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*states)
    assert torch.equal(*weights)
