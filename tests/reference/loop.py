"""A hand-written training loop with FP32 masters, in plain PyTorch.

    forward, backward   weights in the precision's dtypes; gradients sum up in the dtype of their weight
    clip                those gradients, in place
    step                torch's own optimizer on FP32 masters, with the gradients widened to FP32
    push                weights become the masters, rounded

Windows of accumulated batches are Lightning's: each loss is divided by the full window length, and the last
batch of an epoch ends its window, however short.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .cases import Case
from .compare import Snapshot

BuildOptimizer = Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer]


class ReferenceLoop:
    """Trains a copy of `network` as `case` says; each method is one idea that a test may spoil.

    Args:
        network: FP32 module with a method `loss(batch)`.
        build_optimizer: Makes the optimizer from named parameters.
        schedule: Factor of the learning rates after a number of optimizer steps.
        case: Precision, window length and clipping.
    """

    def __init__(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        schedule: Callable[[int], float],
        case: Case,
    ) -> None:
        self.case = case
        self.network: Any = copy.deepcopy(network)
        self.original_buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        self.masters = {name: self.initial_master(p) for name, p in self.network.named_parameters()}
        self.optimizer = build_optimizer(self.masters.items())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.losses: list[Tensor] = []
        self._convert_network()

    def initial_master(self, parameter: Tensor) -> Tensor:
        """The FP32 value itself, never its rounding."""
        return parameter.detach().clone()

    def device_dtype(self, owner: nn.Module, tensor: Tensor) -> torch.dtype:
        """The dtype in which the forward pass sees a parameter or buffer of `owner`."""
        narrow = {
            "32-true": False,
            "bf16-mixed": isinstance(tensor, nn.Parameter) and tensor.ndim >= 2,
            "bf16-true": not isinstance(owner, _BatchNorm),
        }
        return torch.bfloat16 if tensor.is_floating_point() and narrow[self.case.precision] else tensor.dtype

    def fit(self, batches: Sequence[Any], epochs: int, after_step: Callable[[], None] | None = None) -> ReferenceLoop:
        """Trains on `batches` in order, `epochs` times; calls `after_step` after every optimizer step."""
        for _ in range(epochs):
            for index, batch in enumerate(batches):
                place = index % self.case.accumulate
                if place == 0:
                    self.zero_grad()
                self.backward(batch, self.loss_divisor(min(self.case.accumulate, len(batches) - index + place)))
                if place + 1 == self.case.accumulate or index + 1 == len(batches):
                    self.step()
                    if after_step is not None:
                        after_step()
        return self

    def loss_divisor(self, window_length: int) -> int:
        """The full window length, also in a short window of `window_length` batches."""
        return self.case.accumulate

    def backward(self, batch: Any, divisor: int) -> None:
        """Adds the gradients of one batch."""
        with self._forward_context():
            loss = self.network.loss(self._convert_batch(batch))
        self.losses.append(loss.detach().clone())
        (loss / divisor).backward()

    def zero_grad(self) -> None:
        """Begins a window."""
        self.network.zero_grad()

    def step(self) -> None:
        """One optimizer step on the masters."""
        self.collect_gradients()
        self.optimizer.step()
        self.scheduler.step()
        self.push()

    def collect_gradients(self) -> None:
        """Clipped where they are, then widened for the masters."""
        weights = dict(self.network.named_parameters())
        self.clip([weights[name] for name in self._names_in_optimizer_order()])
        for name, master in self.masters.items():
            gradient = weights[name].grad
            master.grad = None if gradient is None else gradient.to(master.dtype, copy=True)

    def clip(self, weights: list[Tensor]) -> None:
        """Clips the gradients of `weights`, in their own dtype."""
        if self.case.clip_value is None:
            return
        if self.case.clip == "norm":
            torch.nn.utils.clip_grad_norm_(weights, self.case.clip_value)
        else:
            torch.nn.utils.clip_grad_value_(weights, self.case.clip_value)

    def push(self) -> None:
        """Rounds the masters into the weights."""
        for name, weight in self.network.named_parameters():
            weight.data.copy_(self.masters[name])

    def snapshot(self) -> Snapshot:
        """The state a checkpoint would hold: FP32 weights under every name they have, and the optimizer's."""
        exact = {id(weight): self.masters[name] for name, weight in self.network.named_parameters()}
        for name, buffer in self.network.named_buffers():
            if buffer.dtype != self.original_buffers[name].dtype:
                exact[id(buffer)] = self.original_buffers[name]
        state = self.network.state_dict(keep_vars=True)
        weights = {name: exact.get(id(tensor), tensor).detach() for name, tensor in state.items()}
        return Snapshot(weights, self.optimizer.state_dict())

    def adopt(self, snapshot: Snapshot) -> None:
        """Goes on from the weights and moments of `snapshot`, which has the entries of `self.snapshot()`."""
        for name, master in self.masters.items():
            master.copy_(snapshot.entries[f"weight/{name}"])
        for index, name in enumerate(self._names_in_optimizer_order()):
            for key, value in self.optimizer.state[self.masters[name]].items():
                value.copy_(snapshot.entries[f"state/{index}/{key}"])
        self.push()

    def _names_in_optimizer_order(self) -> list[str]:
        names = {id(master): name for name, master in self.masters.items()}
        return [names[id(master)] for group in self.optimizer.param_groups for master in group["params"]]

    def _convert_network(self) -> None:
        for module in self.network.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(self.device_dtype(module, tensor))
            if self.case.precision == "bf16-mixed" and isinstance(module, nn.Embedding):
                # Autocast does not know lookups: under Lightning's own they return the FP32 of the table.
                module.register_forward_hook(lambda _module, _arguments, output: output.float())

    def _convert_batch(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return {key: self._convert_batch(value) for key, value in batch.items()}
        narrow = self.case.precision == "bf16-true" and batch.is_floating_point()
        return batch.to(torch.bfloat16) if narrow else batch

    def _forward_context(self) -> AbstractContextManager[None]:
        if self.case.precision == "bf16-mixed":
            # Lightning's own autocast keeps no cache either: a cached cast would sum gradients in BF16.
            return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        return _default_dtype(torch.bfloat16) if self.case.precision == "bf16-true" else nullcontext()


class HostGradientLoop(ReferenceLoop):
    """Takes each batch's gradients off the weights and sums them up in FP32."""

    def zero_grad(self) -> None:
        """Begins a window."""
        for master in self.masters.values():
            master.grad = None

    def backward(self, batch: Any, divisor: int) -> None:
        """Adds the gradients of one batch to those of the masters."""
        super().backward(batch, divisor)
        for name, weight in self.network.named_parameters():
            master, gradient, weight.grad = self.masters[name], weight.grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()

    def collect_gradients(self) -> None:
        """Clipped in FP32."""
        self.clip([self.masters[name] for name in self._names_in_optimizer_order()])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
