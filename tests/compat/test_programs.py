"""Programs whose unusual part is around the module: batches, casts, hooks that call it, what is frozen when."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.compat.twin import assert_twins, ours, run
from tests.net import Net as Base
from tests.net import batches, sgd


class Net(Base):
    """Of `tests.net`, with notes of what it saw."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.notes: list[Any] = []


@dataclasses.dataclass
class Sample:
    """With a field that the constructor does not take."""

    x: Tensor
    weight: Tensor
    cache: Any = dataclasses.field(default=None, init=False)


Pair = collections.namedtuple("Pair", ["x", "weight"])


class Own:
    """Somebody's batch: it moves itself, and does nothing else that Lightning knows."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight = x, weight

    def to(self, *args: Any, **kwargs: Any) -> Own:
        return Own(self.x.to(*args, **kwargs), self.weight.to(*args, **kwargs))


class Table(MutableMapping[str, Any]):
    """Like a TensorDict: a mapping with a size, which `Table(items)` would lose."""

    def __init__(self, items: Any = (), size: int = 0) -> None:
        self.items_, self.size = dict(items), size

    def to(self, *args: Any, **kwargs: Any) -> Table:
        return Table({name: value.to(*args, **kwargs) for name, value in self.items()}, self.size)

    def __getitem__(self, name: str) -> Any:
        return self.items_[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.items_[name] = value

    def __delitem__(self, name: str) -> None:
        del self.items_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


BATCHES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, w: (x, w), lambda b: b),
    "dictionary": (lambda x, w: {"x": x, "nested": [{"w": w}], "text": "abc"}, lambda b: (b["x"], b["nested"][0]["w"])),
    "dataclass": (Sample, lambda b: (b.x, b.weight)),
    "namedtuple": (Pair, lambda b: (b.x, b.weight)),
    "own_object": (Own, lambda b: (b.x, b.weight)),
    "none": (lambda x, w: [x, None, w], lambda b: (b[0], b[2])),
    "table": (lambda x, w: Table({"x": x, "w": w}, len(x)), lambda b: (b["x"], b["w"])),
    "ragged": (
        lambda x, w: (nn.utils.rnn.pack_sequence(list(x)), w),
        lambda b: (b[0].data.view(4, 8), b[1]),
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_kind(kind: str) -> None:
    """In FP32 all is the same; under autocast batches are handed on untouched; in pure BF16 as Lightning has it."""
    make, take = BATCHES[kind]

    class Takes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, weight = take(batch)
            self.notes.append((type(batch).__name__, str(x.dtype), str(weight.dtype), getattr(batch, "size", 0)))
            return super().training_step(x * weight.to(x.dtype)[:, None], batch_idx)

    def drive(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        data: Any = [make(x, torch.arange(4, dtype=torch.float64) + i) for i, x in enumerate(batches())]
        trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))

    def seen(strategy: Any, **options: Any) -> list[Any]:
        return [note for note in run(Takes, strategy, drive=drive, **options).notes if isinstance(note, tuple)]

    expected = seen("auto")
    assert len(expected) == 3
    assert_twins(Takes, drive=drive)
    assert seen(ours("bf16-mixed")) == expected
    # Lightning converts no tensor in an object it does not know, and its own BF16 model then refuses it.
    assert seen(ours("bf16-true")) == (expected if kind == "own_object" else seen("auto", precision="bf16-true"))


CASTS: dict[str, Callable[[Any], Any]] = {
    "float": lambda net: net.float(),
    "to": lambda net: net.to("cpu", torch.float32),
    "memory_format": lambda net: net.to(memory_format=torch.channels_last),
    "double": lambda net: net.double(),
    "half": lambda net: net.half(),
    "bfloat16": lambda net: net.bfloat16(),
    "part_double": lambda net: net.inner.double(),
    "share_memory": lambda net: net.share_memory(),
}


class Casts(Net):
    """Computes in whatever dtype each of its parts has.

    Args:
        cast: One of `CASTS`.
        hook: In which it is applied; `on_train_epoch_start` means the second epoch.
    """

    def __init__(self, cast: str, hook: str) -> None:
        super().__init__()
        self.cast, self.hook = cast, hook

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.inner, self.norm, self.frozen, self.outer):
            x = part(torch.tanh(x).to(part.weight.dtype))
        return (x * self.gain).float()

    def setup(self, stage: str) -> None:
        self.apply_in("setup")

    def on_fit_start(self) -> None:
        self.apply_in("on_fit_start")

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.apply_in("on_train_epoch_start")

    def apply_in(self, hook: str) -> None:
        if hook == self.hook:
            CASTS[self.cast](self)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_epoch_start"])
@pytest.mark.parametrize("cast", ["float", "to", "memory_format"])
def test_casts_that_change_nothing(cast: str, hook: str) -> None:
    assert_twins(lambda: Casts(cast, hook), max_epochs=2)


@pytest.mark.parametrize("cast", ["double", "half", "part_double", "share_memory"])
def test_casts_before_training(cast: str) -> None:
    """What is FP64 or FP16 then is stepped as it is, like any parameter that needs no master."""
    assert_twins(lambda: Casts(cast, "setup"), max_epochs=2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("cast", ["double", "half", "bfloat16", "part_double", "share_memory"])
def test_casts_during_training_are_refused(cast: str, precision: str) -> None:
    """At the next step, before a weight moves: stock Lightning would go on in the new dtype."""
    message = "its memory was moved during training" if cast == "share_memory" else "was cast to torch"
    for hook in ("on_fit_start", "on_train_epoch_start"):
        with pytest.raises(RuntimeError, match=message):
            run(lambda hook=hook: Casts(cast, hook), ours(precision), max_epochs=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_modules_given_in_another_dtype(dtype: torch.dtype, precision: str) -> None:
    """They train about as under stock Lightning, and come back in their dtype."""

    def make() -> Net:
        net = Casts("to", "never")
        return net.to(dtype)

    own, stock = run(make, ours(precision), max_epochs=2), run(make, precision=precision, max_epochs=2)
    assert {kind[0] for kind in own.tensors.values()} == {str(dtype), "torch.int64"}
    last, expected = (torch.stack(outcome.notes[:-1])[-1].float() for outcome in (own, stock))
    torch.testing.assert_close(last, expected, rtol=0.03, atol=0)  # some roundings of weights by 0.4 %
    assert own.moved >= {"inner.weight", "outer.weight"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_masters_of_what_bf16_true_rounds(dtype: torch.dtype) -> None:
    """Eight epochs stay ten times closer to FP32 than those of Lightning's own `bf16-true`, which steps in BF16."""

    def inner(strategy: Any, to: torch.dtype, **options: Any) -> Tensor:
        outcome = run(lambda: Casts("to", "never").to(to), strategy, max_epochs=8, **options)
        return outcome.weights["inner.weight"].double()

    expected = inner("auto", torch.float32)
    error, stock_error = (
        (inner(strategy, dtype, **options) - expected).norm()
        for strategy, options in ((ours("bf16-true"), {}), ("auto", {"precision": "bf16-true"}))
    )
    assert error < stock_error / 10


def test_weights_given_in_bf16_learn_from_steps_too_small_for_it() -> None:
    """Their masters are FP32: a hundred steps of a thousandth of a rounding unit add up, where stock stands still."""

    class Creeps(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=2.0**-11)

    stock, own = run(Creeps, max_epochs=20), run(Creeps, ours(), max_epochs=20)
    assert not stock.moved
    assert torch.equal(own.weights["weight"], torch.full((8,), 1 - 60 * 2.0**-11).bfloat16())


class CallsItself(Net):
    """Is called from its hooks and by a callback, while training and not, and by parts."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.notes.append(self(batch).detach().clone())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(self.outer(torch.ones(2, 16, dtype=self.dtype)).detach().clone())

    def on_train_epoch_end(self) -> None:
        self.eval()
        with torch.no_grad():
            self.notes.append(self(torch.ones(2, 8)))
        self.train()


def test_called_from_hooks_and_callbacks() -> None:
    def callback() -> list[pl.Callback]:
        call = pl.Callback()
        call.on_train_batch_end = lambda trainer, module, *_: module.notes.append(  # type: ignore[method-assign]
            module(torch.ones(2, 8)).detach().clone()
        )
        return [call]

    own = assert_twins(CallsItself, callbacks=callback, max_epochs=2)
    for precision in ("bf16-mixed", "bf16-true"):
        rounded = run(CallsItself, ours(precision), callbacks=callback, max_epochs=2)
        for value, expected in zip(rounded.notes, own.notes, strict=True):
            if expected is not None:
                torch.testing.assert_close(value.float(), expected, rtol=0.05, atol=0.02)  # a few roundings by 0.4 %
