"""The decorator ``@kernel``, and the kernels that it has registered in this process."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import DEVICES, LEVELS, ROLES, Kernel, code_of

_REGISTRY: dict[tuple[str, str], Kernel] = {}

_FUNCTIONS = ("supports", "requires", "prepare", "route", "lower")
_NAMES = ("devices", "configs", "native")
_SWITCHES = ("strided", "graph_safe")
_OPTIONS = ("about", "role", "repeatable", *_FUNCTIONS, *_NAMES, *_SWITCHES)
_NAME = re.compile(r"[\w.+-]+")  # what node ids, --kernels and file names carry as it is


def kernel(operator: str, *, promise: str = "within-budget", name: str | None = None, **options: Any
           ) -> Callable[[Callable[..., Any]], Kernel]:
    """Register the decorated function as a kernel of ``operator``; see `Kernel` for the options.

    Raises ConformanceError for an unknown option or promise, a value of the wrong type, a name that node ids cannot
    carry, or when the name is taken by another function.
    """
    if not isinstance(operator, str):  # as when it is written without brackets, and gets the function
        raise ConformanceError("@kernel needs its operator, as in @kernel('OPERATOR'); it was given "
                               f"{getattr(operator, '__name__', operator)!r:.200}")
    if promise not in LEVELS:
        raise unknown_name("promise", str(promise), LEVELS)
    options = _checked(options)
    if name is not None:
        _check_name(name)

    def register(function: Callable[..., Any]) -> Kernel:
        if not callable(function):
            raise ConformanceError(f"@kernel({operator!r}) decorates a function, not {function!r:.200}")
        label = name or getattr(function, "__name__", None)
        if label is None:  # a partial function, or an object that can be called
            raise ConformanceError(f"a kernel of {operator} is a {type(function).__name__}, which has no name of its "
                                   "own: give it name=")
        _check_name(label)
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


def _check_name(name: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConformanceError(f"@kernel: {name!r} is no name for a kernel: give name= letters, digits, _ . + -")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``@kernel``, lists as tuples. Raises ConformanceError for an unknown one or a wrong value: found
    later, it would be read letter by letter, or only when a report is made."""
    found = dict(options)
    for option, value in options.items():
        if option not in _OPTIONS:
            raise unknown_name("option of @kernel", option, _OPTIONS)
        wanted = ""
        if option in _FUNCTIONS and not (value is None or callable(value)):
            wanted = "a function or None"
        elif option in _SWITCHES and not isinstance(value, bool):
            wanted = "True or False"
        elif option == "repeatable" and not (isinstance(value, bool) or callable(value)):
            wanted = "True, False, or a function of the case's parameters"
        elif option in ("about", "role") and not isinstance(value, str):
            wanted = "a string"
        elif option in _NAMES:
            if isinstance(value, (tuple, list)) and all(isinstance(one, str) and one for one in value):
                found[option] = tuple(value)
            else:
                wanted = f"a tuple of strings, as in {option}=('cpu',)" if option == "devices" else "a tuple of strings"
        if wanted:
            raise ConformanceError(f"@kernel: {option}={value!r:.200} is not {wanted}")
    if found.get("role", ROLES[0]) not in ROLES:
        raise unknown_name("role of @kernel", found["role"], ROLES)
    for device in found.get("devices", ()):
        if device not in DEVICES:
            raise unknown_name("device of @kernel", device, DEVICES)
    return found


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
