"""What the offload does, in the logger and in the progress bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cpu_offload.namespaces import in_each_namespace

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback as Base

    from lightning_cpu_offload.offload.attach import Attachment
else:
    Base = object


class MonitorHooks(Base):
    """Logs, for each optimizer step, what it cost and what it moved.

    `tokens/s` (`samples/s` for batches without token ids) is shown in the progress bar under any strategy. Under
    `cpu_offload` the logger also gets, below `offload/`:

    * `host_step_ms`: time in the host's optimizer;
    * `exposed_wait_ms`: time the training thread spent in the step, during which the device had no new work;
    * `d2h_bytes`, `h2d_bytes`: bytes of gradients and weights that crossed;
    * `host_bytes`: bytes of masters, moments and staging held on the host;
    * `device_peak_bytes`: peak of memory allocated on the device since the last step (accelerators only);
    * `grad_norm`: L2 norm of the gradients before clipping.

    Args:
        log_every_n_steps: Optimizer steps between two records. None: as the Trainer logs.

    Raises:
        ValueError: `log_every_n_steps` is not positive.
    """

    def __init__(self, log_every_n_steps: int | None = None) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps={log_every_n_steps!r}: a positive number of steps, or None.")
        self._every = log_every_n_steps
        self._items = 0
        self._last_step = 0
        self._since = 0.0
        self._grad_norm: Tensor | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._items, self._since, self._last_step = 0, time.perf_counter(), trainer.global_step

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Time in validation is not training time.
        self._items, self._since = 0, time.perf_counter()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if _offload(trainer) is not None and self._is_due(trainer, trainer.global_step + 1):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norms = [_norm(parameter.grad) for parameter in parameters if parameter.grad is not None]
            self._grad_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        items, unit = count_items(batch)
        self._items += items
        step = trainer.global_step
        if step == self._last_step:
            return  # still accumulating
        self._last_step = step
        now = time.perf_counter()
        pl_module.log(f"{unit}/s", self._items / (now - self._since), prog_bar=True, logger=bool(trainer.loggers))
        self._items, self._since = 0, now
        offload = _offload(trainer)
        if offload is not None and self._is_due(trainer, step):
            record = _record(offload, self._grad_norm, trainer.strategy.root_device)
            for logger in trainer.loggers:
                logger.log_metrics(record, step=step - 1)  # where Lightning puts what this step logged

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and step % every == 0


if TYPE_CHECKING:
    OffloadMonitor = MonitorHooks
else:
    OffloadMonitor = in_each_namespace("OffloadMonitor", MonitorHooks, "callbacks.Callback")


def _offload(trainer: pl.Trainer) -> Attachment | None:
    return getattr(trainer.strategy, "offload", None)


def _record(offload: Attachment, grad_norm: Tensor | None, device: torch.device) -> dict[str, float]:
    report = offload.report
    record = {
        "offload/host_step_ms": report.host_ms,
        "offload/exposed_wait_ms": report.total_ms,
        "offload/d2h_bytes": float(report.d2h_bytes),
        "offload/h2d_bytes": float(report.h2d_bytes),
        "offload/host_bytes": float(offload.memory.nbytes),
    }
    if grad_norm is not None:
        record["offload/grad_norm"] = float(grad_norm)
    if device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated"):  # torch 2.9
        record["offload/device_peak_bytes"] = float(torch.accelerator.max_memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
    return record


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def count_items(batch: Any) -> tuple[int, str]:
    """How much one batch holds: token ids if its first tensor has integers in rows, else samples."""
    tensor = next(_tensors(batch), None)
    if tensor is None or tensor.ndim == 0:
        return 1, "samples"
    if tensor.ndim >= 2 and not tensor.is_floating_point():
        return tensor.numel(), "tokens"
    return tensor.shape[0], "samples"


def _tensors(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _tensors(item)
    elif isinstance(batch, dict):
        yield from _tensors(list(batch.values()))
