"""What the user chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Options of a strategy.

    Attributes:
        gradients: `"device"`: on the parameters until the step. `"host"`: each leaves when autograd has it.
            `"auto"`: on the device if they fit there beside the weights, and as much again is left for activations.
        update: `"exact"`; `"early"`: the same, begun under the last backward; or `"delayed"`: weights follow their
            masters one step later.
        exact_steps: With delayed updates, so many steps are exact first.
        nonfinite: What to do when a gradient is not finite: `"skip"` the step, or `"raise"`.
        pin_memory: Page-lock the staging buffers: True, False, or `"auto"` (where the machine allows it).
        cpu_threads: Threads of the host step; None: one for each physical core this process may use, less the one that
            the training thread works on meanwhile.
        check_memory: Compare what is needed with what is free before anything is allocated.
        device_fraction: Part of the masters and moments that is kept and stepped on the device.
        device_memory: The same as a number of bytes; None: by the fraction.
        state_dtype: What Adam's moments are held in: `"float32"`, `"bfloat16"` or `"float8"`.
        local_ranks: Processes on this machine that train the module together.
    """

    gradients: Literal["device", "host", "auto"] = "device"
    update: Literal["exact", "early", "delayed"] = "exact"
    exact_steps: int = 0
    nonfinite: Literal["skip", "raise"] = "skip"
    pin_memory: bool | Literal["auto"] = "auto"
    cpu_threads: int | None = None
    check_memory: bool = True
    device_fraction: float = 0.0
    device_memory: int | None = None
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    local_ranks: int = 1
