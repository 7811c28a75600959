"""Which precision is computed, who may ask for it where, and what stays FP32 in any case."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from tests.compat.test_modules import Program
from tests.compat.twin import ours, run
from tests.models import quiet_trainer
from tests.net import Net, batches, still

BF16_PRECISIONS = ["bf16-mixed", "bf16-true"]
MEAN = "norm.running_mean"


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ("32-true", "bf16-true"),
        ("32-true", "bf16-mixed"),
        ("bf16-mixed", "bf16-true"),
        ("bf16-true", "bf16-mixed"),
        (None, "bf16-true"),
    ],
)
def test_a_trainer_that_says_otherwise_is_refused(given: Any, precision: Any) -> None:
    with pytest.raises(ValueError, match=f"precision='{precision}': the strategy was constructed with"):
        quiet_trainer(strategy=ours(given), precision=precision)


@pytest.mark.parametrize("precision", BF16_PRECISIONS)
def test_a_trainer_that_says_the_same_is_served(precision: Any) -> None:
    assert quiet_trainer(strategy=ours(precision), precision=precision).precision == precision


def test_a_plugin_of_the_trainer_that_says_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='bf16-true': the strategy was constructed with"):
        quiet_trainer(strategy=ours("32-true"), plugins=[CPUOffloadPrecision("bf16-true")])


@pytest.mark.parametrize("given", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_trainer_that_says_nothing_follows_the_strategy(given: Any) -> None:
    assert quiet_trainer(strategy=ours(given)).precision == given


def test_the_plugin_may_be_given_to_the_trainer() -> None:
    trainer = quiet_trainer(strategy="cpu_offload", plugins=[CPUOffloadPrecision("32-true")])
    assert trainer.precision == "32-true"
    with pytest.raises(ValueError, match="Received both `precision=bf16-true` and `plugins="):
        quiet_trainer(strategy="cpu_offload", plugins=[CPUOffloadPrecision("32-true")], precision="bf16-true")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"precision": "16-true"}, "16-true"),
        ({"precision": "64-true"}, "64-true"),
        ({"plugins": [DoublePrecision()]}, "64-true"),
        ({"plugins": [HalfPrecision("16-true")]}, "16-true"),
        ({"plugins": [MixedPrecision("16-mixed", "cuda")]}, "16-mixed"),
    ],
)
def test_what_is_not_computed_is_refused(options: dict[str, Any], asked: str) -> None:
    with pytest.raises(ValueError, match=f"precision='{asked}': cpu_offload computes in 'bf16-mixed'"):
        quiet_trainer(strategy="cpu_offload", **options)


@pytest.mark.parametrize("precision", BF16_PRECISIONS)
def test_predictions_have_the_dtype_of_stock(precision: Any) -> None:
    def predict(strategy: Any, **options: Any) -> list[Tensor]:
        outcome = run(Net, strategy, drive=lambda trainer, net: trainer.predict(net, batches()), **options)
        return outcome.notes[-1]

    own, stock = predict(ours(precision)), predict("auto", precision=precision)
    assert [value.dtype for value in own] == [value.dtype for value in stock]
    for value, expected in zip(own, stock, strict=True):
        torch.testing.assert_close(value, expected, rtol=0.02, atol=0.01)  # other orders of the same few roundings


@pytest.mark.parametrize("precision", [*BF16_PRECISIONS, "32-true"])
def test_summary_counts_as_stock(precision: Any) -> None:
    """Parameters, and their size in the precision, with the same complaint about a mixed one or none."""

    def summary(strategy: Any, **options: Any) -> tuple[Any, list[str]]:
        seen: list[Any] = []

        def look(trainer: pl.Trainer, net: pl.LightningModule) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made = pl.utilities.model_summary.ModelSummary(net, max_depth=-1)
            said = [str(warning.message) for warning in caught if "model summary" in str(warning.message)]
            seen.append((made.total_parameters, made.trainable_parameters, made.model_size, made.param_nums, said))

        callback = LambdaCallback(on_train_start=look)
        run(Net, strategy, callbacks=lambda: [callback], **options)
        return seen[0]

    assert summary(ours(precision)) == summary("auto", precision=precision)


class Statistics(Net):
    """Every norm of torch that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.momentless = nn.BatchNorm1d(8, momentum=None)
        self.images = nn.BatchNorm2d(1)
        self.instance = nn.InstanceNorm1d(1, track_running_stats=True)

    def loss(self, x: Tensor) -> Tensor:
        x = self.images(self.momentless(x).view(4, 1, 2, 4)).view(4, 1, 8)
        return super().loss(self.instance(x).view(4, 8))


@pytest.mark.parametrize("precision", BF16_PRECISIONS)
def test_running_statistics_stay_fp32(precision: str) -> None:
    """Where nothing but the statistics moves, they are those of FP32 but for the rounding of what they are fed with."""
    kept: dict[str, set[torch.dtype]] = {}

    class Watched(Statistics):
        def on_train_batch_end(self, *_: Any) -> None:
            for name, buffer in self.named_buffers():
                if "running" in name:
                    kept.setdefault(name, set()).add(buffer.dtype)

    def make() -> Watched:
        net = Watched()
        net.optimizer = still
        return net

    stock, own = run(make, max_epochs=12), run(make, ours(precision), max_epochs=12)
    assert set(map(str, kept)) == {name for name in stock.weights if "running" in name}
    assert set.union(*kept.values()) == {torch.float32}
    for name in kept:
        torch.testing.assert_close(own.weights[name], stock.weights[name], rtol=0.01, atol=0.005)
    lightning = run(make, precision="bf16-true", max_epochs=12)
    errors = [(end.weights[MEAN].float() - stock.weights[MEAN]).norm() for end in (own, lightning)]
    assert errors[0] < errors[1] / 3, "Lightning's own BF16 keeps them as well, so that nothing was tested"


@pytest.mark.parametrize("precision", BF16_PRECISIONS)
def test_ranges_of_fake_quantization_stay_fp32(precision: str) -> None:
    """Averaged by hundredths, they would stand still in BF16; what a checkpoint holds of them is exact too."""
    seen: dict[str, Tensor] = {}
    look = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: seen.update(module.net.fake.named_buffers()))
    own = run(lambda: Program("fake_quantized"), ours(precision), callbacks=lambda: [look])
    assert {tensor.dtype for tensor in seen.values() if tensor.is_floating_point()} == {torch.float32}
    assert {"net.fake.scale", "net.fake.activation_post_process.max_val"} <= own.moved


@pytest.mark.slow
@pytest.mark.parametrize("precision", BF16_PRECISIONS)
def test_rotary_frequencies_of_transformers_stay_exact(precision: Any) -> None:
    from tests.compat.real_models import HuggingFace, tiny_llama, token_batches

    seen: dict[str, Tensor] = {}

    class Watched(HuggingFace):
        def on_train_start(self) -> None:
            seen.update({name: buffer.clone() for name, buffer in self.named_buffers() if "inv_freq" in name})

    net = Watched(tiny_llama)
    expected = {name: buffer.clone() for name, buffer in net.named_buffers() if "inv_freq" in name}
    loader: Any = torch.utils.data.DataLoader(token_batches()[:1], batch_size=None)  # type: ignore[arg-type]
    quiet_trainer(strategy=ours(precision), max_epochs=1).fit(net, loader)
    assert seen
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], value) for name, value in expected.items())
    assert not all(torch.equal(value.bfloat16().float(), value) for value in expected.values())


@pytest.mark.parametrize("precision", [*BF16_PRECISIONS, "32-true"])
def test_modules_built_by_the_trainer_start_in_fp32(precision: Any) -> None:
    """`trainer.init_module()` would build in BF16, and on the device."""
    trainer = quiet_trainer(strategy=CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision(precision)))
    with trainer.init_module():
        built = nn.Linear(2, 2)
        made = torch.zeros(1)
    assert {(tensor.dtype, tensor.device.type) for tensor in (*built.parameters(), made)} == {(torch.float32, "cpu")}
