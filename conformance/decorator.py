"""The decorator ``@kernel``, and the kernels that it has registered in this process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import DEVICES, LEVELS, ROLES, Kernel, code_of

_REGISTRY: dict[tuple[str, str], Kernel] = {}


def kernel(operator: str, *, promise: str = "within-budget", name: str | None = None, **options: Any
           ) -> Callable[[Callable[..., Any]], Kernel]:
    """Register the decorated function as a kernel of ``operator``; see `Kernel` for the options.

    Raises ConformanceError for an unknown option or promise, or when the name is taken by another function.
    """
    if promise not in LEVELS:
        raise unknown_name("promise", promise, LEVELS)
    known = {"about", "devices", "supports", "requires", "prepare", "configs", "repeatable", "strided",
             "graph_safe", "native", "route", "lower", "role"}
    for option in options:
        if option not in known:
            raise unknown_name("option of @kernel", option, known)
    if options.get("role", ROLES[0]) not in ROLES:
        raise unknown_name("role of @kernel", options["role"], ROLES)
    for device in options.get("devices", ()):
        if device not in DEVICES:
            raise unknown_name("device of @kernel", device, DEVICES)

    def register(function: Callable[..., Any]) -> Kernel:
        label = name or getattr(function, "__name__", None)
        if label is None:  # a partial function, or an object that can be called
            raise ConformanceError(f"a kernel of {operator} is a {type(function).__name__}, which has no name of its "
                                   "own: give it name=")
        signature = inspect.signature(function).parameters.values()
        takes_rest = any(one.kind is one.VAR_KEYWORD for one in signature)
        parameters = frozenset(one.name for one in signature if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
        if options.get("configs") and "config" not in parameters:
            raise ConformanceError(f"kernel {label} declares configs= and has no parameter 'config' to force one")
        record = Kernel(label, operator, function, promise, parameters=parameters, takes_rest=takes_rest,
                        home=_module_at_work(), **options)
        places = [_place(one) for one in (_REGISTRY.get((operator, label), record), record)]
        if len(set(places)) > 1:  # the same one again: its module was reloaded
            raise ConformanceError(
                f"two kernels of {operator} are called {label!r}: {' and '.join(places)}; "
                "give one of them another name="
            )
        _REGISTRY[operator, label] = record
        return record

    return register


def _module_at_work() -> str:
    """The module whose body is being executed, "" where there is none, as when a program's own functions call."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return name if name in sys.modules and name != "__main__" else ""


def _place(record: Kernel) -> str:
    code = code_of(record.function)
    made = f"{code.__module__}.{code.__qualname__}"
    return made if len(record.modules) == 1 else f"{made} (in {record.module})"


def registered(operator: str) -> dict[str, Kernel]:
    """Kernels of one operator by name, in order of registration."""
    return {label: record for (of, label), record in _REGISTRY.items() if of == operator}


def all_registered() -> list[Kernel]:
    """Kernels of every operator, also of operators that do not exist."""
    return list(_REGISTRY.values())
