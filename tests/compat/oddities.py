"""Networks that do something unusual with their tensors, each small and each to be trained alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from tests.compat.layers import Net, chain


class Doubled(torch.autograd.Function):
    """A product written by hand, with its derivative."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * (gradient @ weight.t()), 2 * (x.t() @ gradient)


class Rounded(torch.autograd.Function):
    """Rounds to eighths; its derivative is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Remembers(Net):
    """Saves a number beside its weights, renames one of them in the state dict, and renames it back on loading."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: net.layer(x), layer=nn.Linear(8, 8))
        self.calls = 0
        self.register_load_state_dict_pre_hook(self._rename)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        saved = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        saved[f"{prefix}old.weight"] = saved.pop(f"{prefix}layer.weight")
        return saved

    @staticmethod
    def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
        if f"{prefix}old.weight" in state_dict:
            state_dict[f"{prefix}layer.weight"] = state_dict.pop(f"{prefix}old.weight")


def recomputed(use_reentrant: bool) -> Net:
    """Two blocks with dropout whose activations are computed again in backward."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x).requires_grad_()
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)]
    return Net(forward, first=nn.Linear(8, 8), blocks=nn.ModuleList(blocks))


def forces() -> Net:
    """An energy and its derivative by the positions, both in the loss: backward runs through backward."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():  # also while validating
            x = x.detach().requires_grad_()
            energy = net.energy(x).float().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + energy

    return Net(forward, energy=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))


def penalty() -> Net:
    """A penalty on the gradient by the weights."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = net.layer(x).float().square().mean()
            gradients = torch.autograd.grad(loss, list(net.layer.parameters()), create_graph=True)
        return loss + sum(gradient.float().square().sum() for gradient in gradients)

    return Net(forward, layer=nn.Linear(8, 8))


def queue() -> Net:
    """A buffer that is written in place and another that is assigned anew, at each call."""

    def forward(net: Any, x: Tensor) -> Tensor:
        output = net.layer(x)
        with torch.no_grad():
            net.queue[int(net.position)] = output[0].float()
            net.position.add_(1).remainder_(len(net.queue))
            net.last = output.float().mean(0)
        return output - net.queue.mean(0) - net.last

    return Net(
        forward,
        layer=nn.Linear(8, 8),
        queue=torch.randn(4, 8),
        last=torch.zeros(8),
        position=torch.tensor(0),
    )


def non_persistent() -> Net:
    """A buffer that no state dict holds."""
    net = Net(lambda net, x: net.layer(x) * net.gain, layer=nn.Linear(8, 8))
    net.register_buffer("gain", torch.full((8,), 0.3), persistent=False)
    return net


def hooked() -> Net:
    """Forward, backward, tensor and accumulation hooks that all change what they are given, and a pre-hook."""
    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    layer.register_full_backward_hook(lambda module, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs))
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    layer.bias.register_post_accumulate_grad_hook(_clamp_gradient)
    return chain(nn.Linear(8, 8), layer)


def _clamp_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.1, 0.1)


def compiled() -> Net:
    """A submodule compiled in place, a wrapped one and a function, by a backend that changes nothing."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    inner.compile(backend="eager")
    function = torch.compile(lambda x: x.sin() + 1, backend="eager")
    return Net(
        lambda net, x: function(net.wrapped(net.inner(x))),
        inner=inner,
        wrapped=torch.compile(nn.Linear(8, 8), backend="eager"),
    )


def fake_quantized() -> Net:
    """Weights rounded by an own function, activations by torch's observer of ranges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        fake = torch.ao.quantization.FakeQuantize()
    return Net(
        lambda net, x: net.fake(nn.functional.linear(x, Rounded.apply(net.layer.weight)).float()),
        layer=nn.Linear(8, 8),
        fake=fake,
    )


def scripted(trace: bool) -> Net:
    """A part in TorchScript."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part = torch.jit.trace(layer, torch.randn(4, 8)) if trace else torch.jit.script(layer)
    return Net(lambda net, x: net.part(x), part=part)


def other_dtypes() -> Net:
    """Parameters and buffers in FP64, FP16, complex numbers and integers, beside FP32."""

    def forward(net: Any, x: Tensor) -> Tensor:
        precise = (x.double() @ net.precise * net.table).float()
        waves = (torch.fft.fft(x) * net.filter).abs()
        return net.layer(x) + precise + waves + net.halves.float() + net.shift[net.index]

    return Net(
        forward,
        layer=nn.Linear(8, 8),
        precise=nn.Parameter(torch.randn(8, 8, dtype=torch.float64)),
        filter=nn.Parameter(torch.randn(8, dtype=torch.complex64)),
        halves=nn.Parameter(torch.randn(8).half()),
        index=nn.Parameter(torch.arange(8) % 3, requires_grad=False),
        shift=torch.arange(3),
        table=torch.randn(8, dtype=torch.float64),
    )


def through_numpy() -> Net:
    """Leaves torch for a moment, and counts in FP32."""

    def forward(net: Any, x: Tensor) -> Tensor:
        output = net.layer(x).float()
        scale = float(output.detach().numpy().std()) + net.gain.detach().float().numpy().sum()
        return output / scale + net.gain

    return Net(forward, layer=nn.Linear(8, 8), gain=nn.Parameter(torch.full((8,), 0.3)))


def functional() -> Net:
    """Called with weights given from outside, one set per sample."""

    def forward(net: Any, x: Tensor) -> Tensor:
        weights = dict(net.layer.named_parameters())
        shifted = {name: weight * 1.5 for name, weight in weights.items()}
        each = vmap(lambda row: functional_call(net.layer, shifted, (row,)))
        return each(x) + functional_call(net.layer, weights, (x,))

    return Net(forward, layer=nn.Linear(8, 8))


def changing_shapes() -> Net:
    """Parameters of no elements and of no dimensions, in strange layouts, and one read through a view of a part."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([x @ net.turned, net.empty], dim=1) * net.scale + net.long[2:10] + (net.stepped * 2).sum()

    return Net(
        forward,
        turned=nn.Parameter(torch.randn(8, 8).t()),
        stepped=nn.Parameter(torch.randn(4, 4)[:, ::2]),
        empty=nn.Parameter(torch.empty(4, 0)),
        scale=nn.Parameter(torch.tensor(1.1)),
        long=nn.Parameter(torch.randn(16)),
        nothing=nn.Identity(),
        none=nn.ModuleList(),
    )


def many_tiny() -> Net:
    """A hundred parameters of 1 to 3 elements."""
    items = [nn.Parameter(torch.full((1 + index % 3,), 1.1)) for index in range(100)]
    return Net(
        lambda net, x: net.layer(x) * torch.cat(list(net.items)).mean(),
        layer=nn.Linear(8, 8),
        items=nn.ParameterList(items),
    )


ODDITIES: dict[str, Callable[[], Net]] = {
    "checkpoint_reentrant": lambda: recomputed(True),
    "checkpoint": lambda: recomputed(False),
    "own_function": lambda: Net(lambda net, x: Doubled.apply(x, net.layer.weight), layer=nn.Linear(8, 8, bias=False)),
    "forces": forces,
    "gradient_penalty": penalty,
    "fake_quantized": fake_quantized,
    "scripted": lambda: scripted(False),
    "traced": lambda: scripted(True),
    "compiled": compiled,
    "written_buffers": queue,
    "non_persistent_buffer": non_persistent,
    "own_state_dict": Remembers,
    "hooks_of_the_user": hooked,
    "other_dtypes": other_dtypes,
    "through_numpy": through_numpy,
    "functional_call": functional,
    "odd_shapes": changing_shapes,
    "many_tiny_parameters": many_tiny,
}
