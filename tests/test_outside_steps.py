"""The module, and parts of it, called from hooks and callbacks: outside any step, where no context is set for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn

from tests.net import (
    PRECISIONS,
    Net,
    fit,
    still,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
class TestOutsideSteps:
    def test_the_module_can_be_called(self, precision: str) -> None:
        outputs: dict[str, Tensor] = {}

        def call(name: str) -> Callable[..., None]:
            return lambda trainer, module, *_: outputs.update({name: module(torch.ones(2, 8)).detach()})

        names = ("on_train_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_end")
        net = Net(still)
        fit(net, precision, validate=True, **{name: call(name) for name in names})
        assert outputs.keys() == set(names)
        assert not torch.is_autocast_enabled("cpu")

    def test_parts_can_be_called(self, precision: str) -> None:
        class Deep(Net):
            def __init__(self) -> None:
                super().__init__(still)
                self.backbone = nn.Sequential(nn.Sequential(nn.Linear(8, 4)))

        seen: list[torch.dtype] = []

        def call(trainer: pl.Trainer, module: Deep, *_: Any) -> None:
            x = torch.ones(2, 8, dtype=BF16 if precision == "bf16-true" else FP32)
            seen.extend(part(x).dtype for part in (module.inner, module.backbone, module.backbone[0]))

        fit(Deep(), precision, on_train_batch_end=call)
        assert set(seen) == {FP32 if precision == "32-true" else BF16}

    def test_autocast_is_left_again(self, precision: str) -> None:
        class Fails(Net):
            broken = False

            def forward(self, x: Tensor) -> Tensor:
                if self.broken:
                    raise ValueError("on purpose")
                return super().forward(x)

        def call(trainer: pl.Trainer, module: Fails, *_: Any) -> None:
            for broken in (True, False, True):
                module.broken = broken
                if broken:
                    with pytest.raises(ValueError, match="on purpose"):
                        module(torch.ones(2, 8))
                else:
                    module(torch.ones(2, 8))
                assert not torch.is_autocast_enabled("cpu")
            module.broken = False

        fit(Fails(), precision, on_train_batch_end=call)

    def test_an_interrupt_does_not_leave_autocast_on(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning switches Ctrl+C off

        def call(trainer: pl.Trainer, module: Net, *_: Any) -> None:
            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            module.outer.register_forward_pre_hook(interrupt)
            module(torch.ones(2, 8))

        with pytest.raises(SystemExit):
            fit(Net(), precision, on_train_batch_end=call)
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("depth", [-1, 1])
    def test_example_input_for_the_summary(self, precision: str, depth: int) -> None:
        net = Net()
        net.example_input_array = torch.ones(2, 8)
        summaries: list[Any] = []

        class Kept(ModelSummary):
            def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                summaries.append(self._summary(trainer, pl_module))

        fit(net, precision, callbacks=[Kept(max_depth=depth)])
        assert net.example_input_array.dtype == FP32
        sizes = dict(zip(summaries[0].layer_names, summaries[0].out_sizes, strict=True))
        assert sizes["outer"] == [2, 4]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_example_input_for_the_graph(self, precision: str) -> None:
        """What a TensorBoardLogger does with `log_graph=True`."""
        graphs: list[Any] = []

        def trace(trainer: pl.Trainer, module: Net) -> None:
            graphs.append(torch.jit.trace(module, torch.ones(2, 8), check_trace=False))

        fit(Net(), precision, on_train_start=trace)
        assert graphs[0].graph is not None
