"""Keeps a parameter's gradient accumulator while it is given data of another dtype or device.

torch drops the accumulator then, and with it the hooks by which DistributedDataParallel hears of gradients. So the
parameter's Python object gets another tensor underneath for that time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Decoy:
    """Stands underneath a parameter until `remove`: same data, gradient and version, but no accumulator.

    Args:
        parameter: Of the module; others of its tensors are left alone.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._own: Tensor | None = None
        if isinstance(parameter, nn.Parameter):
            version, gradient = parameter._version, parameter.grad
            self._own = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, self._own)
            parameter.grad = gradient
            _set_version(parameter, version)

    def remove(self) -> None:
        """Put the parameter's own tensor back, with the data, gradient and version it has by now."""
        own, parameter = self._own, self._parameter
        if own is None:
            return
        data, gradient, version = parameter.data, parameter.grad, parameter._version
        trained = parameter.requires_grad
        torch._C._swap_tensor_impl(parameter, own)
        self._own = None
        parameter.grad = None
        if data.data_ptr() != parameter.data_ptr() or data.dtype != parameter.dtype:
            parameter.data = data
        parameter.requires_grad_(trained)
        parameter.grad = gradient
        _set_version(parameter, version)


def _set_version(tensor: Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
