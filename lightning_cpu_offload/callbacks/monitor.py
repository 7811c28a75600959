"""What the offload does, in the logger and in the progress bar."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from lightning_cpu_offload import kernels
from lightning_cpu_offload.callbacks import tensorboard
from lightning_cpu_offload.callbacks.items import count_items
from lightning_cpu_offload.callbacks.measures import costs, device_bytes, host_bytes, is_fused, kernel_rate, rates
from lightning_cpu_offload.callbacks.recording import Span, spans
from lightning_cpu_offload.callbacks.summary import Summary, show
from lightning_cpu_offload.callbacks.timeline import write_trace
from lightning_cpu_offload.namespaces import in_each_namespace

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback as Base

    from lightning_cpu_offload.offload.attach import Attachment
    from lightning_cpu_offload.offload.flight import Flight, StepReport
    from lightning_cpu_offload.offload.transfer import Mark
else:
    Base = object

MOST_TRACED = 20
"""Steps in a trace: the last ones recorded."""


@dataclass
class _Step:
    """A step that has been made, and what is known of it by now.

    Attributes:
        number: From 1.
        flight: The step on its way; None: it has landed.
        report: What it moved and cost, complete once it has landed.
        record: What else is to be logged; None: it is not due.
        marks: Its recording, if it is recorded.
    """

    number: int
    flight: Flight | None
    report: StepReport
    record: dict[str, float] | None
    marks: list[Mark] | None


class MonitorHooks(Base):
    """Logs, for each optimizer step, what it cost and what it moved, draws some steps, and ends with a table.

    `tokens/s` (`samples/s` for batches without token ids) is shown in the progress bar under any strategy. Under
    `cpu_offload` the logger also gets, below `offload/`:

    * `step_ms`: time from one step to the next, without validation;
    * `exposed_wait_ms`: of it, time in which the training thread could not go on because of the offload;
    * `host_step_ms`: time in the host's optimizer; `arrival_wait_ms`: time in which the host waited for gradients;
    * `host_gb_per_s`: what the kernel read and wrote in that time; `host_percent_of_limit`: percent of what it reaches
      alone, over arrays that no cache holds, measured once before training; a small model in caches exceeds it;
    * `d2h_bytes`, `h2d_bytes`: bytes of gradients and weights that crossed;
    * `host_bytes`, and by category `host_bytes/masters`, `/moments`, `/ring` and so on;
    * `device_bytes/weights`, `/gradients`, and on accelerators `/other` and `device_peak_bytes`, the peak since the
      last record;
    * `grad_norm`: L2 norm of the gradients before clipping;
    * `skipped_steps`: steps not made so far, because a gradient was not finite.

    A step with a timeline is recorded, lane by lane and chunk by chunk, and shows up as the image `offload/timeline` in
    TensorBoard (where matplotlib is installed), beside `forward_ms`, `backward_ms`, `d2h_ms`, `h2d_ms`,
    `d2h_gb_per_s` and `h2d_gb_per_s`. TensorBoard logs also get a page of charts, under "Custom Scalars".

    A step that is still under way when the next batch begins is logged when it has landed, under its own number.

    Args:
        log_every_n_steps: Optimizer steps between two records. None: as the Trainer logs.
        timeline_every_n_steps: Optimizer steps between two recorded ones. None: none is recorded.
        trace_path: A JSON file for the last recorded steps, written at the end of fit, for https://ui.perfetto.dev.
        summary: Print a table at the end of fit.

    Raises:
        ValueError: A number of steps is not positive, or `trace_path` is given and nothing is recorded.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        timeline_every_n_steps: int | None = 100,
        trace_path: str | Path | None = None,
        summary: bool = True,
    ) -> None:
        for name, every in (
            ("log_every_n_steps", log_every_n_steps),
            ("timeline_every_n_steps", timeline_every_n_steps),
        ):
            if every is not None and every < 1:
                raise ValueError(f"{name}={every!r}: a positive number of steps, or None.")
        if trace_path is not None and timeline_every_n_steps is None:
            raise ValueError(f"trace_path={str(trace_path)!r}: needs recorded steps. Pass timeline_every_n_steps too.")
        self._every = log_every_n_steps
        self._timeline_every = timeline_every_n_steps
        self._trace_path = trace_path
        self._shows_summary = summary
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._items, self._since, self._last_step = 0, time.perf_counter(), step
        self._record: dict[str, float] = {}
        self._grad_norm: Tensor | None = None
        self._step: _Step | None = None
        self._marks: list[Mark] | None = None
        self._recorded: dict[str, list[Span]] = {}
        self._summary = Summary()
        self._limit: float | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer.global_step)
        offload = _offload(trainer)
        if offload is None:
            return
        tensorboard.lay_out(trainer.loggers)
        if kernels.available() and is_fused(offload) and (trainer.loggers or self._shows_summary):
            self._limit = kernel_rate(offload.threads.num_threads)
        self._record_next(trainer, offload)
        self._since = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Time in validation is not training time.
        self._items, self._since = 0, time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        _mark(trainer, "forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        _mark(trainer, None)
        _mark(trainer, "backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _mark(trainer, None)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        offload = _offload(trainer)
        if offload is not None and self._is_due(trainer, trainer.global_step + 1):
            self._grad_norm = offload.gradient_norm(optimizer)
            self._record = device_bytes(offload, pl_module, trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        items, unit = count_items(batch)
        self._items += items
        offload = _offload(trainer)
        if offload is not None:
            self._finish(trainer, offload)
        step = trainer.global_step
        if step == self._last_step:
            return  # still accumulating
        self._last_step = step
        now = time.perf_counter()
        seconds, rate = now - self._since, self._items / (now - self._since)
        pl_module.log(f"{unit}/s", rate, prog_bar=True, logger=bool(trainer.loggers))
        self._items, self._since = 0, now
        self._summary.steps += 1
        if offload is not None:
            self._summary.add({f"{unit}/s": rate, "step_ms": seconds * 1e3})
            self._take(trainer, offload, step, seconds)
            self._finish(trainer, offload)
            self._record_next(trainer, offload)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        offload = _offload(trainer)
        if offload is None:
            return
        offload.land()
        self._finish(trainer, offload)
        if not trainer.is_global_zero:
            return
        if self._trace_path is not None:
            write_trace(self._trace_path, self._recorded)
        if self._shows_summary and self._summary.steps:
            show(self._summary.rows(), f"cpu_offload: {offload.num_parameters:,} parameters stepped on the host")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None, "_marks": None}  # what is under way stays with this process

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and step % every == 0

    def _record_next(self, trainer: pl.Trainer, offload: Attachment) -> None:
        """Record the step after this one, if it is its turn and no other recording is under way."""
        every, wanted = self._timeline_every, trainer.loggers or self._trace_path is not None
        pipeline = offload.pipeline
        if pipeline is None or every is None or not wanted or (trainer.global_step + 1) % every:
            return
        if pipeline.engine.marks is None:
            self._marks = pipeline.engine.record_marks()

    def _take(self, trainer: pl.Trainer, offload: Attachment, number: int, seconds: float) -> None:
        """Keep what there is to log of the step that was just made, until it has landed."""
        record = None
        if self._is_due(trainer, number):
            record = {"step_ms": seconds * 1e3, **self._record}
            if self._grad_norm is not None:
                record["grad_norm"] = float(self._grad_norm)
        flight = offload.pipeline.working if offload.pipeline is not None else None
        report = offload.report if flight is None else flight.report
        self._step = _Step(number, flight, report, record, self._marks)
        self._marks = None

    def _finish(self, trainer: pl.Trainer, offload: Attachment) -> None:
        """Log the last step, if it has landed by now."""
        step, pipeline = self._step, offload.pipeline
        if step is None or pipeline is None or (step.flight is not None and step.flight is pipeline.working):
            return
        self._step = None
        record = dict(step.record or {})
        if step.record is not None:
            record.update(costs(offload, step.report, self._limit), **host_bytes(offload))
        if step.marks is not None:
            record.update(self._read(trainer, offload, step))
        if not record:
            return
        self._summary.add({name: value for name, value in record.items() if name != "step_ms"})
        for logger in trainer.loggers:
            named = {f"offload/{name}": value for name, value in record.items()}
            logger.log_metrics(named, step=step.number - 1)  # where Lightning puts what this step logged

    def _read(self, trainer: pl.Trainer, offload: Attachment, step: _Step) -> dict[str, float]:
        """End a recording, draw it, and return what it says."""
        assert offload.pipeline is not None
        assert step.marks is not None
        engine = offload.pipeline.engine
        engine.marks = None
        engine.synchronize()  # so that all of it has happened
        recorded = spans(step.marks)
        title = f"step {step.number} on {engine.device}: {step.report.total_ms:.1f} ms of waiting for the offload"
        tensorboard.show_timeline(trainer.loggers, recorded, step.number - 1, title)
        self._recorded[f"step {step.number}"] = recorded
        if len(self._recorded) > MOST_TRACED or self._trace_path is None:
            del self._recorded[next(iter(self._recorded))]
        return rates(recorded, step.report)


if TYPE_CHECKING:
    OffloadMonitor = MonitorHooks
else:
    OffloadMonitor = in_each_namespace("OffloadMonitor", MonitorHooks, "callbacks.Callback")


def _offload(trainer: pl.Trainer) -> Attachment | None:
    return getattr(trainer.strategy, "offload", None)


def _mark(trainer: pl.Trainer, what: str | None) -> None:
    offload = _offload(trainer)
    if offload is not None and offload.pipeline is not None:
        offload.pipeline.engine.mark("compute", what)
