"""What is held and computed in which dtype: D11's rule, and what it must not disturb."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision
from lightning_cpu_offload import precision as precision_module
from tests.models import quiet_trainer
from tests.net import (
    PRECISIONS,
    Net,
    adamw,
    assert_equal,
    batches,
    fit,
    offload,
    still,
    weights,
)

BF16, FP32 = torch.bfloat16, torch.float32
EXPECTED = {"bf16-mixed": BF16, "bf16-true": BF16, "32-true": FP32}
"""The dtype of a product of two matrices."""


class Zoo(Net):
    """A tensor of each sort that the rule tells apart."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0))
        self.scalar = nn.Parameter(torch.tensor(0.3))
        self.cube = nn.Parameter(torch.rand(2, 3, 4))
        self.precise = nn.Parameter(torch.rand(3, 3, dtype=torch.float64))
        self.short = nn.Parameter(torch.rand(3, 3).bfloat16())
        self.embedding = nn.Embedding(5, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.rand(3, 3))
        self.register_buffer("indices", torch.arange(3))
        self.register_buffer("mask", torch.tensor([True]))
        self.register_buffer("angles", torch.rand(3, dtype=torch.float64))


RULE = {
    #                       trained                            while training, in no optimizer
    "bf16-mixed": {"matrix": BF16, "vector": FP32, "frozen": FP32, "buffer": FP32, "batch norm": FP32},
    "bf16-true": {"matrix": BF16, "vector": BF16, "frozen": BF16, "buffer": BF16, "batch norm": FP32},
    "32-true": {"matrix": FP32, "vector": FP32, "frozen": FP32, "buffer": FP32, "batch norm": FP32},
}

SORTS = {
    "matrix": ["inner.weight", "outer.weight", "embedding.weight"],
    "vector": ["inner.bias", "outer.bias", "scalar", "cube", "layer_norm.weight", "layer_norm.bias"],
    "frozen": ["frozen.weight"],
    "buffer": ["table", "gain"],
    "batch norm": ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"],
}

ALWAYS = {
    "precise": torch.float64,
    "angles": torch.float64,
    "short": BF16,
    "indices": torch.int64,
    "mask": torch.bool,
    "count": torch.int64,
    "norm.num_batches_tracked": torch.int64,
}


def dtypes_of(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


class TestRule:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_each_tensor_while_training(self, precision: str) -> None:
        seen: list[dict[str, torch.dtype]] = []
        net = Zoo()
        before = dtypes_of(net)
        fit(net, precision, on_train_batch_end=lambda trainer, module, *_: seen.append(dtypes_of(module)))
        expected = {name: RULE[precision][sort] for sort, names in SORTS.items() for name in names} | ALWAYS
        if precision == "bf16-true":
            expected |= {"precise": BF16, "angles": BF16}  # as Lightning's own does
        expected["frozen.bias"] = expected["inner.bias"]
        for dtypes in seen:
            assert dtypes == expected
        assert dtypes_of(net) == before

    def test_of_matrices_that_may_meet_what_autocast_does_not_know(self) -> None:
        """Stock `bf16-mixed` computes with each of them; in BF16 they would be refused."""

        class Odd(Net):
            def __init__(self) -> None:
                super().__init__()
                self.norm2d = nn.LayerNorm((4, 8))
                self.bilinear = nn.Bilinear(8, 8, 8)
                self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
                self.token = nn.Parameter(torch.randn(1, 8))
                self.large = nn.Parameter(torch.randn(8, 1 << 13))

            def loss(self, x: Tensor) -> Tensor:
                x = self.spectral(self.bilinear(self.norm2d(x), x)).float()
                x[x[:, 0] > 0] = self.token
                return super().loss(x) + (x @ self.large).float().mean()

        seen: list[dict[str, torch.dtype]] = []
        fit(Odd(), "bf16-mixed", on_train_batch_end=lambda trainer, module, *_: seen.append(dtypes_of(module)))
        assert {name: seen[0][name] for name in ("norm2d.weight", "bilinear.weight", "token", "large")} == {
            "norm2d.weight": FP32,
            "bilinear.weight": FP32,
            "token": FP32,
            "large": BF16,
        }

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_of_each_matrix_while_validating(self, precision: str) -> None:
        """Nobody writes then, so that frozen ones may take the same dtype."""
        seen: list[dict[str, torch.dtype]] = []
        look = LambdaCallback(on_validation_start=lambda trainer, module: seen.append(dtypes_of(module)))
        trainer = quiet_trainer(strategy=offload(precision), callbacks=[look])
        trainer.validate(Zoo(), batches(), verbose=False)
        assert {seen[0][name] for name in (*SORTS["matrix"], *SORTS["frozen"])} == {RULE[precision]["matrix"]}

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_keeps_the_layout_of_memory(self, precision: str) -> None:
        class Convolution(Net):
            def __init__(self) -> None:
                super().__init__(adamw)
                self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
                self.transposed = nn.Parameter(torch.rand(8, 8).t())

            def loss(self, x: Tensor) -> Tensor:
                return super().loss(x @ self.transposed) + self.conv(x.view(4, 2, 2, 2)).float().square().mean()

        strides: list[Any] = []
        net, reference = Convolution(), None
        before = {name: parameter.stride() for name, parameter in net.named_parameters()}
        reference = copy.deepcopy(net)
        fit(net, precision, on_train_batch_end=lambda trainer, module, *_: strides.append(module.conv.weight.stride()))
        assert {name: parameter.stride() for name, parameter in net.named_parameters()} == before
        assert set(strides) == {before["conv.weight"]}
        assert not torch.equal(net.conv.weight, reference.conv.weight)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
    def test_lets_layers_of_torch_compute(self, precision: str) -> None:
        class Layers(Net):
            def __init__(self) -> None:
                super().__init__(adamw)
                self.lstm = nn.LSTM(8, 8, batch_first=True)
                self.gru = nn.GRU(8, 8, batch_first=True)
                self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
                self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
                self.group_norm = nn.GroupNorm(2, 4)
                self.conv = nn.Conv1d(4, 4, 3, padding=1)
                self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

            def loss(self, x: Tensor) -> Tensor:
                x = x.unsqueeze(1).expand(-1, 4, -1)
                x = self.lstm(x)[0] + self.gru(x)[0]
                x = self.encoder(self.attention(x, x, x)[0])
                return super().loss(self.normed(self.conv(self.group_norm(x))).mean(1))

        net = Layers()
        before = weights(net)
        fit(net, precision, validate=True)
        after = weights(net)
        trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        assert all(not torch.equal(before[name], after[name]) for name in trained)


class TestSteps:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_compute_in_the_precision(self, precision: str) -> None:
        seen: dict[str, Any] = {}

        class Watched(Net):
            def watch(self, name: str) -> None:
                product = self.inner(torch.randn(4, 8))
                made = torch.zeros(1).dtype
                seen[name] = (product.dtype, torch.is_autocast_enabled("cpu"), made)

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.watch("training")
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.watch("validation")

            def test_step(self, batch: Tensor, batch_idx: int) -> None:
                self.watch("test")

            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.watch("predict")
                return self(batch)

        net = Watched()
        trainer = fit(net, precision, validate=True)
        trainer.test(net, batches(), verbose=False)
        trainer.predict(net, batches())
        made = BF16 if precision == "bf16-true" else FP32
        expected = (EXPECTED[precision], precision == "bf16-mixed", made)
        assert seen == {name: expected for name in ("training", "validation", "test", "predict")}

    def test_autocast_switched_off_for_a_loss(self) -> None:
        class Guarded(Net):
            def __init__(self) -> None:
                super().__init__()
                self.criterion = Product()

            def loss(self, x: Tensor) -> Tensor:
                output = self(x)
                with torch.autocast("cpu", enabled=False):
                    return self.criterion(output.float())

        class Product(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                product = x @ x.t()
                seen.append(product.dtype)
                return product.mean()

        seen: list[torch.dtype] = []
        fit(Guarded(), validate=True)
        assert set(seen) == {FP32}

    def test_autocast_switched_off_for_a_layer(self) -> None:
        """Its weights are BF16, so that it can compute in nothing else."""

        class Guarded(Net):
            def loss(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", enabled=False):
                    seen.append(self.inner(x.float()).dtype)
                return super().loss(x)

        seen: list[torch.dtype] = []
        fit(Guarded(), validate=True)
        assert set(seen) == {BF16}

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_default_dtype_in_hooks_is_that_of_the_user(self, precision: str) -> None:
        made: dict[str, torch.dtype] = {}

        def look(name: str) -> Callable[..., None]:
            return lambda *_: made.update({name: torch.zeros(1).dtype})

        names = [name for name in dir(pl.Callback) if name.startswith("on_") and "exception" not in name]
        callback = pl.Callback()
        for name in names:
            if "checkpoint" not in name:
                setattr(callback, name, look(name))
        fit(Net(), precision, validate=True, callbacks=[callback])
        assert {"on_train_batch_end", "on_validation_epoch_end", "on_before_optimizer_step"} <= made.keys()
        assert set(made.values()) == {FP32}

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_logged_constants_are_exact(self, precision: str) -> None:
        class Logs(Net):
            def on_train_epoch_end(self) -> None:
                self.log("constant", torch.tensor(0.1))

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("python", 0.1)

        trainer = fit(Logs(), precision, validate=True)
        assert trainer.callback_metrics["constant"] == torch.tensor(0.1)
        assert trainer.callback_metrics["python"] == torch.tensor(0.1)


@dataclasses.dataclass
class Batch:
    """Carries what Lightning's conversion of inputs would lose or rebuild."""

    x: Tensor
    weight: Tensor
    hidden: Any = dataclasses.field(default=None, init=False)


class TestInputs:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_are_never_rebuilt_unless_everything_is_bf16(self, precision: str) -> None:
        class OnBatches(Net):
            def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
                return batch

            def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
                given.append(batch)
                return super().training_step(batch.x, batch_idx)

        made = [Batch(torch.randn(4, 8), torch.rand(4, dtype=torch.float64)) for _ in range(3)]
        given: list[Batch] = []
        trainer = quiet_trainer(strategy=offload(precision), max_epochs=1)
        trainer.fit(OnBatches(), torch.utils.data.DataLoader(made, batch_size=None))  # type: ignore[arg-type]
        if precision == "bf16-true":
            assert {batch.x.dtype for batch in given} == {BF16}
        else:
            assert all(own is batch for own, batch in zip(given, made, strict=True))

    def test_of_integers_stay_under_bf16_true(self) -> None:
        data = {"ids": torch.arange(3), "x": torch.rand(2), "text": "abc", "nested": [torch.rand(1).double()]}
        converted = CPUOffloadPrecision("bf16-true").convert_input(data)
        assert converted["ids"] is data["ids"]
        assert converted["text"] == "abc"
        assert (converted["x"].dtype, converted["nested"][0].dtype) == (BF16, BF16)


class TestChoice:
    @pytest.fixture
    def slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(precision_module, "cpu_has_fast_bf16", lambda: False)

    @pytest.fixture
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(precision_module, "cpu_has_fast_bf16", lambda: True)

    def run(self, trainer: pl.Trainer | None = None, **options: Any) -> tuple[torch.dtype, str]:
        """Trains with the Trainer given, or with the strategy by name.

        Returns:
            The dtype of a trained matrix meanwhile, and what the Trainer says its precision is.
        """
        seen: list[torch.dtype] = []
        trainer = trainer or quiet_trainer(**{"strategy": "cpu_offload", "max_epochs": 1, **options})
        look = LambdaCallback(on_fit_start=lambda trainer, module: seen.append(module.inner.weight.dtype))
        trainer.callbacks.append(look)
        trainer.fit(Net(), batches(), batches())
        return seen[0], trainer.precision

    @pytest.mark.usefixtures("fast")
    def test_default_is_autocast_over_bf16(self) -> None:
        assert self.run() == (BF16, "bf16-mixed")

    @pytest.mark.usefixtures("slow")
    def test_slow_cpu_computes_in_fp32_and_says_so_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            assert self.run() == (FP32, "32-true")
        (line,) = (message for message in caplog.messages if "BF16 products are slow" in message)
        assert 'precision="bf16-mixed" or "bf16-true"' in line

    @pytest.mark.usefixtures("slow")
    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_what_was_asked_for_is_done_on_a_slow_cpu_too(
        self, precision: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO"):
            assert self.run(precision=precision) == (BF16, precision)
            assert self.run(strategy=offload(precision)) == (BF16, precision)
        assert not [message for message in caplog.messages if "slow" in message]

    @pytest.mark.usefixtures("fast")
    def test_fp32_can_be_asked_for(self) -> None:
        assert self.run(strategy=offload("32-true")) == (FP32, "32-true")

    @pytest.mark.usefixtures("fast")
    def test_choice_is_made_anew_for_each_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = quiet_trainer(strategy="cpu_offload", max_epochs=1)
        assert self.run(trainer) == (BF16, "bf16-mixed")
        monkeypatch.setattr(precision_module, "cpu_has_fast_bf16", lambda: False)
        assert self.run(trainer) == (FP32, "32-true")

    def test_probe_answers(self) -> None:
        assert isinstance(precision_module.cpu_has_fast_bf16(), bool)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_module_dtype_answers_what_it_computes_with(precision: str) -> None:
    """`self.dtype` is what user code converts by; stock says BF16 under "bf16-true" alone."""
    seen: list[torch.dtype] = []
    net = Net()
    fit(net, precision, on_train_batch_end=lambda trainer, module, *_: seen.append(module.dtype))
    assert set(seen) == {BF16 if precision == "bf16-true" else FP32}
    assert net.dtype == FP32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_module_built_in_configure_model_starts_in_fp32(precision: str) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(5)
                    self.late = nn.Linear(8, 8)

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(self.late(x))

    torch.manual_seed(5)
    expected = nn.Linear(8, 8)
    net = Late(still)
    fit(net, precision)
    assert_equal(weights(net.late), weights(expected))
