"""Lets Lightning's averaging callbacks average masters.

They read and write what the module's parameters hold: under `cpu_offload` numbers of BF16, whose average is no better
than they are. While a fit runs, the hooks in which they do so find FP32 masters on the host instead. So the average is
that of a plain run, is best kept there (`EMAWeightAveraging(device="cpu")`), and no validation rounds it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_cpu_offload.namespaces import INSTALLED

if TYPE_CHECKING:
    from lightning_cpu_offload.offload.attach import Attachment

READS = {"WeightAveraging": ("on_train_batch_end", "on_train_epoch_end"), "StochasticWeightAveraging": ()}
"""Hooks of callbacks, by class name, that read weights."""

WRITES = {
    "WeightAveraging": ("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_end"),
}
"""Those that write them too."""


class Averages:
    """The averaging callbacks among those of a Trainer, which see masters until `detach`.

    Args:
        callbacks: All of the Trainer's.
        attachment: What holds the masters.
    """

    def __init__(self, callbacks: Iterable[Any], attachment: Attachment) -> None:
        self._hooks: list[_Hook] = []
        for callback in callbacks:
            for kind in READS:
                if any(isinstance(callback, own) for own in _classes(kind)):
                    for name in (*READS[kind], *WRITES[kind]):
                        self._hooks.append(_Hook(callback, name, attachment, name in WRITES[kind]))

    def detach(self) -> None:
        """Leave the callbacks as they were."""
        while self._hooks:
            self._hooks.pop().remove()


class _Hook:
    """One hook of a callback, called in sight of the masters; in copies of the callback, the hook itself."""

    def __init__(self, callback: Any, name: str, attachment: Attachment, writes: bool) -> None:
        self._callback, self._name = callback, name
        self._attachment = attachment
        self._writes = writes
        self._before = vars(callback).get(name)
        self._step = -1
        self._call = getattr(callback, name)
        functools.update_wrapper(self, self._call)
        setattr(callback, name, self)

    def __call__(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it; between two steps there is nothing new to read."""
        if not self._writes and trainer.global_step == self._step:
            return self._call(trainer, *args, **kwargs)
        self._step = trainer.global_step
        with self._attachment.masters_shown(self._writes):
            return self._call(trainer, *args, **kwargs)

    def remove(self) -> None:
        """Put back what the callback had."""
        if self._before is None:
            delattr(self._callback, self._name)
        else:
            setattr(self._callback, self._name, self._before)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._callback, self._name)


def _classes(name: str) -> list[type]:
    return [getattr(namespace.callbacks, name) for namespace in INSTALLED if hasattr(namespace.callbacks, name)]
