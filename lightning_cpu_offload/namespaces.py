"""The two namespaces Lightning is published under, and one source of ours for both.

`lightning.pytorch` and `pytorch_lightning` are the same code under two names, with separate classes and
separate registries. Everything Lightning-facing here is written once, as a mixin of hooks; `in_each_namespace`
makes one class of it per installed namespace. Each of these classes derives from its own namespace first and from
the other one second, so either Trainer accepts an instance; `join` then moves the instance to the class whose
namespace really drives it.
"""

from __future__ import annotations

import importlib
import types
from functools import partial
from typing import TYPE_CHECKING, Any

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _import_installed() -> tuple[types.ModuleType, ...]:
    """Every namespace that can be imported, the preferred one first."""
    found = []
    for name in NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            # Only the absence of Lightning itself is an answer; a Lightning that is there but broken must say so.
            if (error.name or "").split(".")[0] not in ("lightning", "pytorch_lightning"):
                raise
    if not found:
        raise ModuleNotFoundError(
            "lightning_cpu_offload needs PyTorch Lightning: pip install lightning, or pip install pytorch-lightning."
        )
    return tuple(found)


INSTALLED = _import_installed()

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = INSTALLED[0]


def _resolve(namespace: types.ModuleType, path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{namespace.__name__}.{module}"), name)


def in_each_namespace(name: str, hooks: type, base: str) -> Any:
    """The class `name` made of `hooks` and Lightning's `base`, for the preferred namespace.

    Args:
        name: Name of the class; the result must be bound to it in the module of `hooks` so that it can be pickled.
        hooks: The mixin that holds all behaviour.
        base: Lightning's class by its path below the namespace, such as `"strategies.SingleDeviceStrategy"`.
    """
    if "__init__" in vars(hooks):
        vars(hooks)["__init__"].__qualname__ = f"{name}.__init__"  # what Python's own errors call it
    bases = [_resolve(namespace, base) for namespace in INSTALLED]
    variants: dict[str, type] = {}
    for own, namespace in zip(bases, INSTALLED, strict=True):
        body = {
            "__module__": hooks.__module__,
            "__doc__": hooks.__doc__,
            "_variants": variants,
            "_namespace": namespace.__name__,
        }
        order = (hooks, own, *(other for other in bases if other is not own))
        variants[namespace.__name__] = types.new_class(name, order, exec_body=partial(_fill, body))
    preferred, *others = variants.values()
    for other in others:
        # Reachable from the preferred class, so that pickle finds it by its qualified name.
        setattr(preferred, f"_{other._namespace}", other)  # type: ignore[attr-defined]
        other.__qualname__ = f"{name}._{other._namespace}"  # type: ignore[attr-defined]
    return preferred


def _fill(body: dict[str, Any], attributes: dict[str, Any]) -> None:
    attributes.update(body)


def namespace_of(instance: object) -> str:
    """The namespace whose code comes first in the class of `instance`, or the preferred one for foreign classes."""
    for cls in type(instance).__mro__:
        for name in (namespace.__name__ for namespace in INSTALLED):
            if cls.__module__ == name or cls.__module__.startswith(name + "."):
                return name
    return INSTALLED[0].__name__


def join(instance: Any, namespace: str) -> None:
    """Make `instance` an object of `namespace`; its attributes stay."""
    instance.__class__ = instance._variants[namespace]


def rank_zero(namespace: str, function: str) -> Any:
    """`rank_zero_info` or `rank_zero_warn` of a namespace, so that messages reach the logger the user configured."""
    return getattr(importlib.import_module(f"{namespace}.utilities.rank_zero"), function)
