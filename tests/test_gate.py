"""The gate waits for exactly what an operation touches of a step under way, and lets everything else go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy
from lightning_cpu_offload.offload import gate
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.flight import Flight
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import Engine, InlineEngine
from tests.engines import DeferredEngine
from tests.models import quiet_trainer
from tests.programs import CPU, on_engine, same_bits, simulated

WIDTH = 8
SLOT_BYTES = 4 * WIDTH * WIDTH
"""One layer in FP32: chunk number i is layer number i."""


class UnderWay:
    """Six layers without biases, one chunk each, whose step has just been launched; lazily, nothing has run."""

    def __init__(self, engine: DeferredEngine, **settings: Any) -> None:
        torch.manual_seed(0)
        self.engine = engine
        self.layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
        self.network = nn.Sequential(*self.layers)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.1)
        options = Settings(cpu_threads=1, **settings)
        self.attachment = Attachment(self.network, [self.optimizer], CPU, lambda *_: torch.float32, options)
        self.step()
        self.attachment.land()  # the first step waits for its state; the second one does not
        self.step()

    def step(self) -> None:
        """Gradients and a step that nobody waits for."""
        self.network.zero_grad()
        self.network(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()

    @property
    def arrived(self) -> int:
        """How many chunks the host has stepped."""
        assert self.attachment.pipeline is not None
        flight = self.attachment.pipeline.arriving
        return len(self.layers) if flight is None else len(flight.ranges)

    @property
    def is_landed(self) -> bool:
        """Whether nothing is under way."""
        pipeline = self.attachment.pipeline
        return pipeline is not None and pipeline.working is pipeline.arriving is None

    def weight(self, index: int) -> Tensor:
        """Of one layer."""
        return self.layers[index].weight

    def gradient(self, index: int) -> Tensor:
        """Of one layer."""
        gradient = self.weight(index).grad
        assert gradient is not None
        return gradient

    def state(self, index: int, name: str) -> Tensor:
        """Of one layer in the optimizer."""
        return self.optimizer.state[self.weight(index)][name]

    def master(self, index: int) -> Tensor:
        """Of one layer."""
        return self.attachment._masters[self.weight(index)].host


@pytest.fixture
def under_way() -> Iterator[UnderWay]:
    engine = simulated("lazy")
    with on_engine(engine, slot_bytes=SLOT_BYTES):
        step = UnderWay(engine)
        yield step
        step.attachment.detach()


def test_nothing_has_run_when_the_step_returns(under_way: UnderWay) -> None:
    assert under_way.arrived == 0
    assert not under_way.is_landed
    assert torch._C._len_torch_function_stack() == 1


PARTIAL: dict[str, tuple[int, Callable[[UnderWay], Any]]] = {
    "a weight": (3, lambda step: step.weight(2) + 1),
    "a layer": (3, lambda step: step.layers[2](torch.ones(1, WIDTH))),
    "a view of a weight": (3, lambda step: step.weight(2).T[1:3].sum()),
    "what .data gives": (2, lambda step: step.weight(1).data.clamp_(-1, 1)),
    "a weight written in place": (2, lambda step: nn.init.ones_(step.weight(1))),
    "other data for a weight": (1, lambda step: setattr(step.weight(0), "data", torch.ones(WIDTH, WIDTH))),
    "a list of weights": (4, lambda step: torch._foreach_norm([step.weight(0), step.weight(3)])),
    "a keyword": (5, lambda step: nn.functional.linear(torch.ones(1, WIDTH), weight=step.weight(4))),
    "a dict in a list": (3, lambda step: torch.utils._pytree.tree_map(torch.sum, [{"weight": step.weight(2)}])),
    "the target of out=": (4, lambda step: torch.neg(torch.ones(WIDTH, WIDTH), out=step.gradient(3))),
    "an array": (2, lambda step: step.weight(1).detach().numpy()),
    "a gradient that is read": (3, lambda step: step.gradient(2).norm()),
    "a gradient cleared in place": (6, lambda step: step.network.zero_grad(set_to_none=False)),
    "one gradient cleared in place": (2, lambda step: step.gradient(1).zero_()),
    "gradients that are clipped": (6, lambda step: nn.utils.clip_grad_norm_(step.network.parameters(), 0.1)),
}
"""What touches some chunks, and how many have been stepped then."""


@pytest.mark.parametrize("what", PARTIAL)
def test_it_waits_for_the_chunks_that_are_touched(under_way: UnderWay, what: str) -> None:
    arrived, touch = PARTIAL[what]
    with torch.no_grad():
        touch(under_way)
    assert under_way.arrived == arrived


HOST_MEMORY: dict[str, Callable[[UnderWay], Any]] = {
    "a moment": lambda step: step.state(0, "exp_avg").sum(),
    "a moment written": lambda step: step.state(5, "exp_avg_sq").zero_(),
    "a step count": lambda step: step.state(0, "step").item(),
    "a master": lambda step: step.master(0).sum(),
    "many moments": lambda step: torch._foreach_norm([step.state(index, "exp_avg") for index in range(3)]),
    "a tensor without memory": lambda step: torch.eye(2).to_sparse().sum(),
}


@pytest.mark.parametrize("what", HOST_MEMORY)
def test_it_lands_for_host_memory_that_is_being_stepped(under_way: UnderWay, what: str) -> None:
    with torch.no_grad():
        HOST_MEMORY[what](under_way)
    assert under_way.is_landed


HARMLESS: dict[str, Callable[[UnderWay], Any]] = {
    "another tensor": lambda step: torch.ones(3).sum(),
    "shapes": lambda step: [(weight.shape, weight.dtype, weight.device) for weight in step.network.parameters()],
    "dropped gradients": lambda step: step.optimizer.zero_grad(),
    "an attribute": lambda step: setattr(step.weight(0), "requires_grad", True),
    "settings": lambda step: step.optimizer.param_groups[0].update(lr=0.5),
    "an empty tensor": lambda step: torch.empty(0).sum(),
}


@pytest.mark.parametrize("what", [name for name in HARMLESS])
def test_it_lets_others_pass(under_way: UnderWay, what: str) -> None:
    HARMLESS[what](under_way)
    assert under_way.arrived == 0


def test_forward_goes_layer_by_layer(under_way: UnderWay) -> None:
    x = torch.ones(1, WIDTH)
    for index, layer in enumerate(under_way.layers):
        x = layer(x)
        assert under_way.arrived == index + 1
    assert x.isfinite().all()
    assert not under_way.is_landed


def test_backward_waits_for_everything(under_way: UnderWay) -> None:
    loss = under_way.layers[0](torch.ones(1, WIDTH)).sum()
    assert under_way.arrived == 1
    loss.backward()
    assert under_way.is_landed


def test_after_landing_the_gate_is_open(under_way: UnderWay) -> None:
    under_way.attachment.land()
    assert torch._C._len_torch_function_stack() == 0
    under_way.step()
    assert torch._C._len_torch_function_stack() == 1
    under_way.network.state_dict()
    assert torch._C._len_torch_function_stack() == 0
    assert under_way.is_landed


def test_a_mode_that_is_entered_later_may_be_left_first(under_way: UnderWay) -> None:
    with torch.device("cpu"):
        under_way.attachment.land()
        assert torch._C._len_torch_function_stack() == 2
    assert torch._C._len_torch_function_stack() == 1
    under_way.attachment.land()
    assert torch._C._len_torch_function_stack() == 0


# --- where it cannot be closed ------------------------------------------------------------------------------------


def launched(engine: Engine, context: Any, **settings: Any) -> bool:
    """Whether a step is under way after `optimizer.step()` within a context."""
    with on_engine(engine, slot_bytes=SLOT_BYTES), context:
        step = UnderWay(engine, **settings)  # type: ignore[arg-type]
        result = not step.is_landed
        step.attachment.detach()
    assert torch._C._len_torch_function_stack() == 0
    return result


@contextmanager
def compiled(module: str = "torch._dynamo.utils") -> Iterator[None]:
    """As if something had been compiled."""
    counters = mock.Mock(counters={"frames": {"total": 1}})
    with (
        mock.patch.dict("sys.modules", {module: counters}),
        mock.patch.object(gate, "_something_is_compiled", SOMETHING),
    ):
        yield


SOMETHING = gate._something_is_compiled


def test_it_stays_open_under_another_mode_or_when_something_is_compiled() -> None:
    assert launched(simulated("lazy"), compiled("nothing"))
    assert not launched(simulated("lazy"), compiled())
    assert not launched(simulated("lazy"), BaseTorchFunctionMode())
    assert not launched(InlineEngine(CPU), compiled("nothing"))


def test_a_delayed_step_is_guarded_on_any_engine() -> None:
    assert launched(InlineEngine(CPU), compiled("nothing"), update="delayed")
    assert launched(
        simulated("lazy"), BaseTorchFunctionMode(), update="delayed"
    )  # under way, and nobody may look at it


# --- a delayed update ---------------------------------------------------------------------------------------------


@pytest.fixture
def delayed() -> Iterator[UnderWay]:
    engine = simulated("lazy")
    with on_engine(engine, slot_bytes=SLOT_BYTES):
        step = UnderWay(engine, update="delayed")
        yield step
        step.attachment.detach()


def num_stepped(step: UnderWay) -> int:
    flight: Flight | None = step.attachment.pipeline.working  # type: ignore[union-attr]
    assert flight is not None
    return len(flight.ranges)


def test_weights_wait_for_no_host_work(delayed: UnderWay) -> None:
    delayed.network(torch.ones(1, WIDTH)).sum().backward()
    assert num_stepped(delayed) == 0
    delayed.step()
    delayed.network(torch.ones(1, WIDTH)).sum().backward()
    assert num_stepped(delayed) == 0
    assert delayed.engine.races == []


@pytest.mark.parametrize("what", HOST_MEMORY)
def test_host_memory_lands_a_delayed_step(delayed: UnderWay, what: str) -> None:
    with torch.no_grad():
        HOST_MEMORY[what](delayed)
    assert delayed.is_landed


def test_a_gradient_waits_for_its_copy_only(delayed: UnderWay) -> None:
    before = delayed.gradient(3).clone()
    delayed.gradient(3).zero_()
    assert num_stepped(delayed) == 0
    delayed.attachment.land()
    assert delayed.engine.races == []
    assert before.ne(0).any()


# --- a loop that clamps its weights -------------------------------------------------------------------------------


class Critic(pl.LightningModule):
    """Clamps its weights through `.data`, as the critic of a WGAN, after each step or at the head of each batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.where = where
        self.losses: list[Tensor] = []

    def clamp(self, where: str) -> None:
        if where == self.where:
            for parameter in self.layers.parameters():
                parameter.data.clamp_(-0.05, 0.05)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clamp("training_step")
        loss = self.layers(batch).mean()
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *_unused: Any) -> None:
        self.clamp("on_train_batch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train_critic(where: str, engine: Engine) -> list[Tensor]:
    with on_engine(engine):
        module = Critic(where)
        strategy = CPUOffloadStrategy(cpu_threads=1, precision_plugin=CPUOffloadPrecision("bf16-mixed"))
        data: Any = torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        quiet_trainer(strategy=strategy, max_epochs=1).fit(module, loader)
    return [*module.losses, *(tensor.clone() for tensor in module.state_dict().values())]


@pytest.mark.parametrize("where", ["on_train_batch_end", "training_step"])
def test_weights_clamped_under_way_are_those_of_the_inline_engine(where: str) -> None:
    inline = train_critic(where, InlineEngine(CPU))
    assert max(tensor.abs().max() for tensor in inline[-6:]) <= 0.07
    for schedule in ("lazy", 0, 1):
        engine = simulated(schedule)  # type: ignore[arg-type]
        assert same_bits(train_critic(where, engine), inline)
        assert engine.races == []
    assert not same_bits(train_critic("nowhere", InlineEngine(CPU)), inline)
