"""How much a batch holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def count_items(batch: Any) -> tuple[int, str]:
    """How much one batch holds: token ids if its first tensor has integers in rows, else samples."""
    tensor = next(_tensors(batch), None)
    if tensor is None or tensor.ndim == 0:
        return 1, "samples"
    if tensor.ndim >= 2 and not tensor.is_floating_point():
        return tensor.numel(), "tokens"
    return tensor.shape[0], "samples"


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _tensors(item)
    elif isinstance(batch, dict):
        yield from _tensors(list(batch.values()))
