"""Optimizers as people write them outside torch, each odd in the way its docstring says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled decay."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = (state["exp_avg"] * beta1 + p.grad * (1 - beta1)).sign_()
                p.data.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - beta2)
        return loss


class KeyedById(Optimizer):
    """Keeps its momentum under `id(p)`, in a dictionary of its own and in the state."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.table: dict[int, Tensor] = {id(p): torch.zeros_like(p) for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.table[id(p)].mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])
        return loss


class Named(Optimizer):
    """Decides by names in its groups and by attributes hung on parameters, and counts for all of them at once."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})
        self.state["steps"] = 0  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        self.state["steps"] += 1  # type: ignore[index, operator]
        for group in self.param_groups:
            for name, p in zip(group.get("param_names", group["params"]), group["params"], strict=True):
                if p.grad is not None:
                    decay = 0.0 if str(name).endswith("bias") else getattr(p, "decay", 0.1)
                    p.add_(p.grad + decay * p, alpha=-group["lr"] / self.state["steps"])  # type: ignore[index]
        return loss


class FlatCopy(Optimizer):
    """Works on a flat FP32 copy made in its constructor, as mixed-precision wrappers do, and writes it back."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.flat = torch.cat([p.detach().float().flatten() for g in self.param_groups for p in g["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        parameters = [p for g in self.param_groups for p in g["params"]]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        self.flat.sub_(self.param_groups[0]["lr"] * torch.cat([g.float().flatten() for g in gradients]))
        for p, piece in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            p.copy_(piece.view_as(p))
        return loss


class Lookahead(Optimizer):
    """Wraps an optimizer, shares its groups, and every other step pulls the weights back to slow ones."""

    def __init__(self, base: Optimizer, every: int = 2, alpha: float = 0.5):
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.base, self.every, self.alpha, self.count = base, every, alpha, 0
        self.param_groups = base.param_groups
        self.slow = {p: p.detach().clone() for g in base.param_groups for p in g["params"]}

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                for p, slow in self.slow.items():
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class LookaheadOfState(Optimizer):
    """The other common way: its state is a `defaultdict` of its own, its slow weights sit in the base's state."""

    def __init__(self, base: Optimizer, every: int = 2, alpha: float = 0.5):
        self.defaults = base.defaults
        super().__init__(base.param_groups, base.defaults)
        self.base, self.every, self.alpha, self.count = base, every, alpha, 0
        self.param_groups = base.param_groups
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        self.base.step()
        self.count += 1
        for p in (p for g in self.param_groups for p in g["params"]):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.count % self.every == 0:
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)
        return loss


class SAM(Optimizer):
    """Climbs to the sharpest neighbour, takes the gradient there, and steps its base from where it was."""

    def __init__(self, params: Any, base: Any = torch.optim.SGD, rho: float = 0.05, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        self.first_step()
        evaluate(closure)
        self.second_step()
        return loss


class ByDevice(Optimizer):
    """Makes its tensors on the device of its parameters and adapts one step size for all of them."""

    def __init__(self, params: Any):
        super().__init__(params, {"d": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.zeros((), device=held[0].device)
        for p in held:
            total += p.grad.square().sum()
        size = self.param_groups[0]["d"] = float(self.param_groups[0]["d"] * (1 + total.clamp(max=1)))
        for p in held:
            p.sub_(size * p.grad)
        return loss


class Averaging(Optimizer):
    """Computes at one point and is evaluated at another: `train()` and `eval()` exchange its weights."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "training": True, "k": 0})

    @torch.no_grad()
    def exchange(self, training: bool) -> None:
        for group in (g for g in self.param_groups if g["training"] is not training):
            for p in (p for p in group["params"] if "average" in self.state[p]):
                other = self.state[p]["average"]
                kept = p.detach().clone()
                p.copy_(other)
                other.copy_(kept)
            group["training"] = training

    def train(self) -> None:
        self.exchange(True)

    def eval(self) -> None:
        self.exchange(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            assert group["training"], "call train() first"
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", p.detach().clone())
                p.sub_(group["lr"] * p.grad)
                average.lerp_(p, 1 / group["k"])
        return loss


class Both(Optimizer):
    """Holds two optimizers of torch over parts of its parameters, and steps both."""

    def __init__(self, params: Any):
        super().__init__(list(params), {"lr": 0.05})
        held = self.param_groups[0]["params"]
        self.first = torch.optim.SGD([p for p in held if p.ndim > 1], lr=0.05, momentum=0.9)
        self.second = torch.optim.RMSprop([p for p in held if p.ndim < 2], lr=0.01)

    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        self.first.step()
        self.second.step()
        return loss


class Decoupled(torch.optim.AdamW):
    """AdamW of torch with the gradient centralised before its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None and p.ndim > 1):
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        super().step()
        return loss


class Noisy(Optimizer):
    """Adds noise from torch's generator to its gradients: what it draws must be what it draws in a plain run."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluate(closure)
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.sub_(0.1 * (p.grad + 0.01 * torch.randn_like(p)))
        return loss
