"""What a training will need and how long its steps will take, known before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_cpu_offload.estimate.choices import Survey
from lightning_cpu_offload.estimate.hardware import hardware
from lightning_cpu_offload.estimate.memory import Compute
from lightning_cpu_offload.estimate.report import Estimate
from lightning_cpu_offload.offload.attach import Settings
from lightning_cpu_offload.precision import CPUOffloadPrecision

__all__ = ["Estimate", "estimate"]


def estimate(
    module: Any,
    batch: Any,
    *,
    strategy: Any = None,
    precision: str | None = None,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    vram: int | None = None,
    ram: int | None = None,
    device_fraction: float = 0.25,
    rates: Mapping[str, float | None] | None = None,
) -> Estimate:
    """Memory and step time of every way to train a module, without data, weights or a device.

    The module's own `training_step` runs on tensors that have no memory, so a model of any size is looked at in
    seconds; built under `torch.device("meta")`, it takes no memory itself. Module and batch are left as they were.

    Args:
        module: A LightningModule.
        batch: One batch of its training data; tensors may be on "meta".
        strategy: A `CPUOffloadStrategy`, whose precision is taken and whose options get a row, or its name,
            `"cpu_offload"`; anything else says nothing.
        precision: `"bf16-mixed"`, `"bf16-true"` or `"32-true"`; None: the strategy's, or `"bf16-mixed"`.
        accumulate_grad_batches: As for a Trainer.
        gradient_clip_val: As for a Trainer.
        vram: Bytes the device has, for the verdict.
        ram: Bytes the host has, for the verdict.
        device_fraction: Part of the parameters stepped on the device in the row of that name.
        rates: Rates by their names in `Rates`, per second in FLOP or bytes; others are measured where possible.

    Raises:
        ValueError: `accumulate_grad_batches` is not positive, `device_fraction` is not from 0 to 1, `precision` is not
            computed here, or the module has nothing to train.
    """
    if accumulate_grad_batches < 1:
        raise ValueError(f"accumulate_grad_batches={accumulate_grad_batches!r}: must be 1 or more.")
    if not 0 <= device_fraction <= 1:
        raise ValueError(f"device_fraction={device_fraction!r}: must be from 0 to 1. Give the device's part.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"module={type(module).__name__}: has no parameter to train. Create them in its constructor.")
    measured = hardware(rates or {})
    survey = Survey(
        module=module,
        batch=batch,
        compute=_compute(precision or _precision_of(strategy)),
        rates=measured.rates,
        device_fraction=device_fraction,
        settings=_settings_of(strategy),
        accumulate=accumulate_grad_batches,
        clip=bool(gradient_clip_val),
        vram=vram,
    )
    rows = survey.rows()
    own = survey.configured.name if survey.configured is not None else None
    notes = [survey.subject.note] if survey.subject.note else []
    if own is not None and all(row.name != own for row in rows):
        notes.append(f"As configured, {own} will be refused: it is for Adam and AdamW, or does not go with clipping.")
    if guesses := sorted({guess for row in rows for guess in row.device.guesses}):
        named = ", ".join(guesses)
        notes.append(f"The step looks at values, which were taken for one or for the most there could be: {named}.")
    return Estimate(
        module=type(module).__name__,
        parameters=survey.subject.numel,
        rows=tuple(rows),
        hardware=measured,
        accumulate=accumulate_grad_batches,
        vram=vram,
        ram=ram,
        configured=own,
        reason=survey.reason,
        notes=tuple(notes),
    )


def _precision_of(strategy: Any) -> str:
    asked = getattr(getattr(strategy, "precision_plugin", None), "precision", None)
    return asked if isinstance(asked, str) else "bf16-mixed"


def _settings_of(strategy: Any) -> Settings | None:
    settings = Settings() if strategy == "cpu_offload" else getattr(strategy, "_settings", None)
    return settings if isinstance(settings, Settings) else None


def _compute(precision: str) -> Compute:
    plugin = CPUOffloadPrecision(precision)  # type: ignore[arg-type]
    plugin.choose(torch.device("cpu"))  # fakes are on the CPU, whatever is trained on
    return Compute(plugin.dtype_of, plugin.forward_context, plugin.convert_input)
