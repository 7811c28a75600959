"""The state of AdamW and Adam, in torch's form, over memory that the kernel steps.

`optimizer.state[parameter]` holds `step`, `exp_avg` and `exp_avg_sq`, and each of them shows one parameter's part of
what a region has as a whole: a vector of counters, and the moments. So a step counts all parameters at once, and
whoever reads or writes the state finds ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_cpu_offload.offload.moments import (
    NAMES,
    FloatMoments,
    ReducedMoments,
    ReducedTensor,
    make_moments,
    saved,
)
from lightning_cpu_offload.offload.region import Region

View = tuple[Tensor, Tensor, Tensor]
"""`step`, `exp_avg` and `exp_avg_sq` of one parameter."""


class AdamState:
    """What an optimizer keeps for the parameters of its regions.

    Args:
        optimizer: The user's AdamW or Adam.
        state_dtype: What the moments are held in, see `moments`.

    Attributes:
        moments: Of each region.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state_dtype: str) -> None:
        self.moments: dict[Region, FloatMoments | ReducedMoments] = {}
        self._optimizer = optimizer
        self._state_dtype = state_dtype
        self._steps: dict[Region, np.ndarray] = {}
        self._views: dict[Region, list[View | None]] = {}

    def allocate(self, regions: Iterable[Region]) -> None:
        """Make room for the state of regions that are new."""
        for region in regions:
            if region not in self.moments:
                self.moments[region] = make_moments(self._state_dtype, region)
                self._steps[region] = np.zeros(len(region.masters), np.float32)
                self._views[region] = [None] * len(region.masters)

    def strange(self, region: Region, indices: Iterable[int]) -> list[int]:
        """Those of the parameters at `indices` whose state is not here: not made yet, or replaced by somebody."""
        states, views, masters = self._optimizer.state, self._views[region], region.masters
        strange = []
        for index in indices:
            state, view = states.get(masters[index].tensor), views[index]
            if (
                not state
                or view is None
                or state.get("step") is not view[0]
                or state.get("exp_avg") is not view[1]
                or state.get("exp_avg_sq") is not view[2]
            ):
                strange.append(index)
        return strange

    def attach(self, region: Region, index: int) -> None:
        """Take a parameter's state in, with the values it has, or zeros."""
        state, view = self._optimizer.state[region.masters[index].tensor], self._view(region, index)
        step = state["step"] if state else 0
        if step is not view[0]:
            self._steps[region][index] = float(step)
        for name, moment in zip(NAMES, view[1:], strict=True):
            if state.get(name) is not moment:
                self.moments[region].put(index, moment, state.get(name))
        state.update(zip(("step", *NAMES), view, strict=True))

    def adopt(self, regions: Iterable[Region]) -> None:
        """Take in whatever state the optimizer has, in ordinary tensors."""
        for region in regions:
            held = [index for index, master in enumerate(region.masters) if self._optimizer.state.get(master.tensor)]
            if held:
                self.allocate([region])
            for index in held:
                self._clear(region, index)
            for index in held:
                self.attach(region, index)

    def steps(self, region: Region, index: int) -> int:
        """How many steps a parameter has made."""
        return int(self._steps[region][index])

    def count(self, region: Region, groups: Sequence[int | None]) -> list[int]:
        """Count a step for the parameters that have a group in `groups`; returns the steps that all have made."""
        steps = self._steps[region]
        steps += np.array([group is not None for group in groups], np.float32)
        return steps.astype(np.int64).tolist()

    def memory(self) -> list[Tensor]:
        """Host tensors that cover it."""
        with torch._C.DisableTorchFunction():  # the gate would wait for them; here nobody touches their elements
            arenas = [arena.flat(0, arena.numel) for moments in self.moments.values() for arena in moments.arenas]
            return arenas + [torch.from_numpy(steps) for steps in self._steps.values()]

    def saved(self, regions: Iterable[Region], deferring: bool) -> dict[Tensor, dict[str, Tensor]]:
        """The moments of each parameter of which other ranks hold parts, for a state dict; see `moments.saved`."""
        found: dict[Tensor, dict[str, Tensor]] = {}
        for region in regions:
            if region.spread is None or region not in self.moments:
                continue
            for index, master in enumerate(region.masters):
                if self._optimizer.state.get(master.tensor):
                    found[master.tensor] = saved(self.moments[region], index, master.name, deferring)
        return found

    def bring_home(self, regions: Iterable[Region]) -> None:
        """Give state that is on the device to the optimizer on the CPU; training is over."""
        for region in regions:
            for master in region.masters if region.resident else ():
                state = self._optimizer.state.get(master.tensor, {})
                state.update({name: value.to("cpu") for name, value in state.items() if isinstance(value, Tensor)})

    def inherit_on_fork(self) -> None:
        """Make the moments ordinary memory for children of this process, once training is over."""
        for moments in self.moments.values():
            for arena in moments.arenas:
                arena.inherit_on_fork()

    def _view(self, region: Region, index: int) -> View:
        view = self._views[region][index]
        if view is None:
            # A storage of its own, or saving one parameter's state would write the counters of all.
            step = torch.from_numpy(self._steps[region][index : index + 1]).view(())
            view = self._views[region][index] = (step, *self.moments[region].show(index))
        return view

    def _clear(self, region: Region, index: int) -> None:
        """Before new values come in: in 8 bits, large old ones nearby would leave them no digits."""
        state = self._optimizer.state[region.masters[index].tensor]
        for name, view in zip(NAMES, self._view(region, index)[1:], strict=True):
            value = state.get(name)
            if value is not view and isinstance(view, ReducedTensor):
                if isinstance(value, ReducedTensor):
                    state[name] = value.decode()  # may be of what is cleared
                view.encode(None)
