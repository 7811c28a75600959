"""The ways to train a module: what the user writes, and what that means for memory and time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_cpu_offload.estimate.replay import Gradients
from lightning_cpu_offload.estimate.time import POLICIES
from lightning_cpu_offload.offload.attach import Settings

SHOWN = ("gradients", "update", "nonfinite", "device_fraction", "device_memory", "state_dtype")
"""Options of the strategy that memory or time depend on."""


@dataclass(frozen=True)
class Way:
    """One way to train. Two are equal if they mean the same, whatever they are called.

    Attributes:
        name: What the user writes.
        policy: Of the time model.
        gradients: Where they live.
        state_dtype: What Adam's moments on the host are held in.
        share: Part of masters and moments that is on the device.
        checkpointing: Whether blocks are recomputed, where the module does not do so itself.
    """

    name: str = field(compare=False)
    policy: str
    gradients: Gradients = "device"
    state_dtype: str = "float32"
    share: float = 0.0
    checkpointing: bool = False

    @property
    def clips(self) -> bool:
        """Whether it can clip the norm; else it is left out where clipping is on."""
        return POLICIES[self.policy].clips

    @property
    def needs_adam(self) -> bool:
        """Whether it is for Adam and AdamW only."""
        return bool(self.share) or not self.clips or self.state_dtype != "float32"

    def recomputing(self) -> Way:
        """The same with blocks that are recomputed."""
        return replace(self, name=f"{self.name} + checkpointing", checkpointing=True)


STOCK = Way("AdamW on the device (stock, bf16-mixed)", "device")
DEFAULT = Way('gradients="device"', "exact")


def ways(device_fraction: float) -> list[Way]:
    """One for each option, stock training first, and last what takes the least of both memories together.

    Args:
        device_fraction: For the way of that name.
    """
    return [
        STOCK,
        DEFAULT,
        Way('update="early", nonfinite="raise"', "early"),
        Way('update="delayed"', "delayed"),
        Way(f"device_fraction={device_fraction}", "partial", share=device_fraction),
        Way('gradients="host"', "host", gradients="host"),
        Way('state_dtype="bfloat16"', "exact", state_dtype="bfloat16"),
        Way('state_dtype="float8"', "exact", state_dtype="float8"),
        Way('gradients="host", state_dtype="float8"', "host", gradients="host", state_dtype="float8"),
    ]


def configured(settings: Settings, state_bytes: int, *, has_room: bool) -> Way:
    """The way of a strategy's own settings.

    Args:
        settings: What the user gave the strategy.
        state_bytes: Of all masters and moments, in FP32.
        has_room: Whether `gradients="auto"` leaves gradients on the device.
    """
    share = settings.device_fraction
    if settings.device_memory is not None:
        share = min(1.0, settings.device_memory / max(1, state_bytes))
    on_host = settings.gradients == "host" or (settings.gradients == "auto" and not has_room)
    policy: str = "host" if on_host else settings.update
    if share:
        policy = {"exact": "partial", "early": "early partial"}[settings.update]
    return Way(_name(settings), policy, "host" if on_host else "device", settings.state_dtype, share)


def _name(settings: Settings) -> str:
    defaults: dict[str, Any] = {option.name: option.default for option in fields(settings)}
    given = {name: getattr(settings, name) for name in SHOWN if getattr(settings, name) != defaults[name]}
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items()) or DEFAULT.name
