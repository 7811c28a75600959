"""What all optimizers of a module share on the host."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cpu_offload.kernels.threads import ThreadPool
from lightning_cpu_offload.offload.gate import Gate
from lightning_cpu_offload.offload.gradients import GradientStream
from lightning_cpu_offload.offload.memory import HostMemory
from lightning_cpu_offload.offload.nonfinite import Nonfinite
from lightning_cpu_offload.offload.partition import Partition
from lightning_cpu_offload.offload.pipeline import Pipeline
from lightning_cpu_offload.offload.watch import Watch


@dataclass(frozen=True)
class Host:
    """One of each, for one module.

    Attributes:
        memory: Where host memory comes from.
        threads: The pool for host work.
        pipeline: Moves gradients and weights.
        gate: Lets the training thread go on while they move.
        watch: Notices what others write into the weights.
        nonfinite: Judges gradients that are not finite.
        stream: Takes gradients to the host as they are made; None: they stay on the device until the step.
        early: Steps begin under backward.
        exact_steps: With a pipeline that holds weights back, so many steps are exact before the first one is late.
        state_dtype: What Adam's moments are held in, see `moments`.
        partition: The ranks that train together by torch's DDP; None: this process alone.
    """

    memory: HostMemory
    threads: ThreadPool
    pipeline: Pipeline
    gate: Gate
    watch: Watch
    nonfinite: Nonfinite
    stream: GradientStream | None
    exact_steps: int
    early: bool = False
    state_dtype: str = "float32"
    partition: Partition | None = None

    def land(self) -> None:
        """Wait until nothing is under way."""
        try:
            self.pipeline.land()
        finally:
            self.gate.open()  # also after a failure, or no later fit would overlap

    def depart(self, num_steps: int) -> None:
        """Let the training thread go on after step number `num_steps`, as far as somebody guards what is under way."""
        if self.pipeline.hold and num_steps > self.exact_steps:
            if not self.gate.close():
                self.pipeline.arrive_all()
        elif self.pipeline.hold or not self.gate.close():
            self.land()

    def before_backward(self) -> None:
        """What the forward pass did not wait for must be there now; and gradients, if they stay, must have left."""
        self.pipeline.before_backward()
        self.gate.open()
