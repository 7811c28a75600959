"""Networks built of torch's own layers and of its ways to change layers, each small and each to be trained alike.

A network is `Net(function, **parts)`: it holds the parts and computes `function(net, x)` for `x` [4, 8].
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Parts (modules, parameters, or tensors, which become buffers) and what is computed with them.

    Args:
        function: Takes this module and the input [4, 8].
        parts: Attributes; a tensor that is no parameter becomes a buffer.
    """

    def __init__(self, function: Forward, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def loss(self, x: Tensor) -> Tensor:
        """Mean square distance of the outputs from 1, a scalar."""
        return (self(x).abs() - 1).square().mean()


def chain(*layers: nn.Module) -> Net:
    """Layers one after the other."""
    return Net(lambda net, x: net.layers(x), layers=nn.Sequential(*layers))


def recurrent(layer: nn.Module) -> Net:
    """A recurrent layer that reads 4 steps, and packed sequences of unequal lengths, each step of 8 features."""

    def forward(net: Any, x: Tensor) -> Tensor:
        steps = torch.stack([x, x * 0.5, -x, x + 1], dim=1)
        packed = nn.utils.rnn.pack_padded_sequence(steps, torch.tensor([4, 3, 2, 1]), batch_first=True)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(net.layer(packed)[0], batch_first=True)
        return net.layer(steps)[0].float().mean(1) + unpacked.float().mean(1)

    return Net(forward, layer=layer)


def image(*layers: nn.Module, layout: torch.memory_format = torch.contiguous_format) -> Net:
    """Layers over images [4, 2, 2, 2]."""
    parts = nn.Sequential(*layers).to(memory_format=layout)
    return Net(lambda net, x: net.layers(x.view(4, 2, 2, 2).contiguous(memory_format=layout)), layers=parts)


def attention(query_chunks: bool) -> Net:
    """Self-attention over the batch by torch's function, from one product that is cut in three or from three."""

    def forward(net: Any, x: Tensor) -> Tensor:
        query, key, value = net.all(x).chunk(3, dim=-1) if query_chunks else (part(x) for part in net.three)
        return net.out(F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True))

    return Net(
        forward,
        all=nn.Linear(8, 24) if query_chunks else nn.Identity(),
        three=nn.ModuleList([] if query_chunks else [nn.Linear(8, 8) for _ in range(3)]),
        out=nn.Linear(8, 8),
    )


def tied() -> Net:
    """An output layer whose weight is the embedding's."""
    embedding, out = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
    out.weight = embedding.weight
    return Net(lambda net, x: net.out(net.embedding(x.argmax(1)) + x), embedding=embedding, out=out)


def shared() -> Net:
    """One layer under two names, computed twice."""
    layer = nn.Linear(8, 8)
    return Net(lambda net, x: net.second(torch.tanh(net.first(x))), first=layer, second=layer)


def sparse() -> Net:
    """An embedding and a bag with sparse gradients."""
    return Net(
        lambda net, x: net.rows(x.argmax(1)) + net.bag(x.argsort(1)),
        rows=nn.Embedding(8, 8, sparse=True),
        bag=nn.EmbeddingBag(8, 8, mode="sum", sparse=True),
    )


def pruned() -> Net:
    """A layer half of whose weights are masked."""
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return chain(layer)


def momentum_teacher() -> Net:
    """A copy of the student that follows it in small steps, made inside `forward`."""
    student = nn.Linear(8, 8)

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
                slow.lerp_(fast.to(slow.dtype), 0.01)
        return net.student(x) + 0.5 * net.teacher(x)

    return Net(forward, student=student, teacher=copy.deepcopy(student).requires_grad_(False))


def transformer() -> Net:
    """Encoder and decoder with dropout."""
    options: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.1, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, norm_first=True, **options), 1)
    return Net(lambda net, x: net.decoder(x[None], net.encoder(x[None])), encoder=encoder, decoder=decoder)


LAYERS: dict[str, Callable[[], Net]] = {
    "batch_norm": lambda: chain(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None)),
    "batch_norm_without_weights": lambda: chain(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)),
    "other_norms": lambda: chain(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 8)
    ),
    "instance_norm": lambda: image(
        nn.Conv2d(2, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Conv2d(4, 2, 1)
    ),
    "rnn": lambda: recurrent(nn.RNN(8, 8, batch_first=True, nonlinearity="relu")),
    "lstm": lambda: recurrent(nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.1)),
    "lstm_projected": lambda: recurrent(nn.LSTM(8, 8, proj_size=4, batch_first=True)),
    "gru": lambda: recurrent(nn.GRU(8, 8, batch_first=True)),
    "cells": lambda: Net(
        lambda net, x: net.lstm(x)[0] + net.gru(x) + net.rnn(x),
        lstm=nn.LSTMCell(8, 8),
        gru=nn.GRUCell(8, 8),
        rnn=nn.RNNCell(8, 8),
    ),
    "convolutions": lambda: image(nn.Conv2d(2, 4, 2, padding=1), nn.PReLU(4), nn.ConvTranspose2d(4, 2, 2)),
    "channels_last": lambda: image(
        nn.Conv2d(2, 4, 2, padding=1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2), layout=torch.channels_last
    ),
    "bilinear": lambda: Net(lambda net, x: net.layer(x, x), layer=nn.Bilinear(8, 8, 4)),
    "multihead_attention": lambda: Net(
        lambda net, x: net.layer(x[None], x[None], x[None])[0], layer=nn.MultiheadAttention(8, 2, batch_first=True)
    ),
    "transformer": transformer,
    "attention_of_one_product": lambda: attention(query_chunks=True),
    "attention_of_three_products": lambda: attention(query_chunks=False),
    "dropout": lambda: chain(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4), nn.AlphaDropout(0.1)),
    "tied_weights": tied,
    "shared_module": shared,
    "sparse_embedding": sparse,
    "renormalised_embedding": lambda: Net(
        lambda net, x: net.layer(x.argmax(1)), layer=nn.Embedding(8, 8, max_norm=1.0, padding_idx=0)
    ),
    "parameter_list": lambda: Net(
        lambda net, x: x @ net.items[0] @ net.items[1],
        items=nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)]),
    ),
    "parameter_dict": lambda: Net(
        lambda net, x: x @ net.items["a"] + net.items["b"],
        items=nn.ParameterDict({"a": torch.randn(8, 8), "b": torch.randn(8)}),
    ),
    "weight_norm_by_hooks": lambda: chain(nn.utils.weight_norm(nn.Linear(8, 8))),
    "weight_norm": lambda: chain(parametrizations.weight_norm(nn.Linear(8, 8))),
    "spectral_norm_by_hooks": lambda: chain(nn.utils.spectral_norm(nn.Linear(8, 8))),
    "spectral_norm": lambda: chain(parametrizations.spectral_norm(nn.Linear(8, 8))),
    "orthogonal": lambda: chain(parametrizations.orthogonal(nn.Linear(8, 8))),
    "pruned": pruned,
    "momentum_teacher": momentum_teacher,
}
