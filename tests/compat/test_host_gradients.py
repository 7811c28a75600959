"""gradients="host": the same programs, and what is particular to it."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.gradients import HostGradient
from tests.compat import test_gradients, test_hooks, test_several_optimizers, test_steps, twin
from tests.compat.nets import Noted
from tests.compat.test_gradients import *  # noqa: F403
from tests.compat.test_hooks import *  # noqa: F403
from tests.compat.test_several_optimizers import *  # noqa: F403
from tests.compat.test_steps import *  # noqa: F403
from tests.compat.twin import ours, run


@pytest.fixture(autouse=True)
def gradients_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(twin.OPTIONS, "gradients", "host")
    # Norms are summed in double precision here and in single precision by torch, so what is clipped differs by an ulp.
    monkeypatch.setattr(twin, "LEAST_RTOL", [1e-6])


def test_programs_of_other_files_run_here() -> None:
    """And gradients are on the host while they do."""
    for module in (test_gradients, test_hooks, test_several_optimizers, test_steps):
        own = {name for name in vars(module) if name.startswith("test_")}
        assert len(own) > 3
        assert own <= set(globals())
    seen: list[Any] = []

    class Looks(Noted):
        def on_after_backward(self) -> None:
            seen.extend(parameter.grad for parameter in self.inner.parameters())

    run(Looks, ours())
    assert seen
    assert all(isinstance(gradient, HostGradient) for gradient in seen)


def test_a_reader_is_warned_by_name() -> None:
    found: list[tuple[Tensor, Tensor, list[str]]] = []

    class Reads(Noted):
        def on_after_backward(self) -> None:
            exact = self.trainer.strategy.gradient(self.inner.weight)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rounded = self.inner.weight.grad + 0
                self.inner.weight.grad.norm()
            found.append((exact, rounded, [str(warning.message) for warning in caught]))

    run(Reads, ours("bf16-mixed"))
    for exact, rounded, _ in found:
        assert exact.dtype == torch.float32
        assert torch.equal(exact.bfloat16(), rounded)
    (text,) = (text for _, _, texts in found for text in texts)
    assert "'inner.weight' was read on the device" in text
    assert "strategy.gradient(parameter)" in text


@pytest.mark.parametrize("slot", [256, 1024])
def test_live_gradients_stay_below_the_cap(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "SLOT_BYTES", slot)
    peaks: list[tuple[int, int, int]] = []

    class Deep(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean()

        def on_train_end(self) -> None:
            stream = self.trainer.strategy.offload.host.stream
            largest = max(parameter.nbytes for parameter in self.parameters())
            peaks.append((stream.peak_bytes, stream.cap_bytes, largest))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Deep()
    total = sum(parameter.numel() for parameter in module.parameters()) * 2
    trainer = pl.Trainer(
        strategy=ours("bf16-true"),
        accelerator="cpu",
        max_steps=4,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 3, 16), batch_size=None))  # type: ignore[arg-type]
    ((peak, cap, largest),) = peaks
    assert 0 < peak <= cap + largest < total


def test_gradient_is_that_of_a_plain_run() -> None:
    class Keeps(Noted):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradient = getattr(self.trainer.strategy, "gradient", lambda parameter: parameter.grad)
            self.notes.append({name: gradient(p).clone() for name, p in self.named_parameters() if p.grad is not None})

    stock, own = run(Keeps, accumulate_grad_batches=3), run(Keeps, ours(), accumulate_grad_batches=3)
    sums = [[note for note in outcome.notes if isinstance(note, dict)] for outcome in (stock, own)]
    assert len(sums[0]) == len(sums[1]) > 0
    for plain, host in zip(*sums, strict=True):
        assert plain.keys() == host.keys()
        assert all(torch.equal(host[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("free", "on_host"), [(float("inf"), False), (100.0, True)])
def test_auto_goes_by_what_is_free(free: float, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "free_device", lambda _: free)
    kinds: set[type] = set()

    class Looks(Noted):
        def on_after_backward(self) -> None:
            kinds.update(type(parameter.grad) for parameter in self.inner.parameters())

    run(Looks, ours(gradients="auto"))
    assert kinds == {HostGradient if on_host else Tensor}
