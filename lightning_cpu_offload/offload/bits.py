"""The bits of floating-point tensors, for what must be compared or hashed exactly, and for kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def words(tensor: Tensor) -> Tensor:
    """The bits of a floating-point tensor as integers of the same size, shape and strides kept."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer)


def as_array(vector: Tensor) -> np.ndarray:
    """The same memory as the kernels take it: float32, or BF16 numbers in uint16."""
    return vector.numpy() if vector.dtype == torch.float32 else words(vector).numpy().view(np.uint16)
