"""Mutants: kernels that are wrong on purpose, and their unmutated twins, kept to prove that the suite sees each fault.

They are ordinary kernels of the package ``kernels.mutants``, which no run loads unless it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.decorator import kernel
from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import Kernel

FAULTS = (
    "SENTINEL", "EMPTY", "STALE", "TAIL", "OVERFLOW", "LAYOUT", "MAP", "NONFINITE", "SCALE", "CASTROUND", "ROUTING",
    "SEMANTIC", "PRECISION", "RACE", "STATE", "CONFIG",
)
DIFFERS = "differs"  # in a result's details: whether the mutant was seen to differ from its twin on this case
Shown = Callable[[Mapping[str, str]], bool]
_MUTANTS: dict[tuple[str, str], Mutant] = {}
_CONTROLS: dict[tuple[str, str], Kernel] = {}
_SHOWN: dict[tuple[str, str], Shown] = {}


@dataclass(frozen=True)
class Mutant:
    """One small change to a right kernel.

    fault: its kind in the fault catalogue, one of FAULTS. wrong: what is wrong, in one sentence. twin: the name of
    the control it was made from. diagnosis: keys of the explanations of which a failure must name one; with several,
    no data tells them apart. shown_on(params): whether it is run on a case; None: on all.
    """

    kernel: Kernel
    fault: str
    wrong: str
    twin: str
    diagnosis: tuple[str, ...]
    shown_on: Shown | None = None

    @property
    def name(self) -> str:
        return self.kernel.name


def control(operator: str, name: str, function: Callable[..., Any], about: str, *, shown_on: Shown | None = None,
            **options: Any) -> Kernel:
    """Register an unmutated twin; ``options`` are those of ``@kernel``. ``shown_on``: as of a mutant."""
    record = kernel(operator, name=name, about=about, **options)(function)
    _CONTROLS[operator, name] = record
    _show(record, shown_on)
    return record


def mutant(operator: str, name: str, function: Callable[..., Any], *, fault: str, wrong: str, twin: str,
           diagnosis: tuple[str, ...], shown_on: Shown | None = None, **options: Any) -> Mutant:
    """Register a mutant. Raises ConformanceError for a fault kind or a twin that does not exist."""
    if fault not in FAULTS:
        raise unknown_name(f"fault kind of mutant {name}:", fault, FAULTS)
    if (operator, twin) not in _CONTROLS:
        raise unknown_name(f"twin of mutant {name}:", twin, [label for _, label in _CONTROLS])
    if not diagnosis:
        raise ConformanceError(f"mutant {name} names no diagnosis")
    record = Mutant(kernel(operator, name=name, about=wrong, **options)(function), fault, wrong, twin, diagnosis,
                    shown_on)
    _MUTANTS[operator, name] = record
    _show(record.kernel, shown_on)
    return record


def _show(record: Kernel, shown_on: Shown | None) -> None:
    if shown_on is not None:
        _SHOWN[record.operator, record.module + record.name] = shown_on


def is_mutant(kernel: Kernel) -> bool:
    known = _MUTANTS.get((kernel.operator, kernel.name))
    return known is not None and known.kernel is kernel


def is_control(kernel: Kernel) -> bool:
    return _CONTROLS.get((kernel.operator, kernel.name)) is kernel


def twin_of(kernel: Kernel) -> Kernel | None:
    """The unmutated twin of a mutant, None for every other kernel."""
    return _CONTROLS[kernel.operator, _MUTANTS[kernel.operator, kernel.name].twin] if is_mutant(kernel) else None


def is_shown(kernel: Kernel, params: Mapping[str, str]) -> bool:
    """Whether a case with these parameters may be planned for a kernel: all may, but of mutants and their twins only
    those that show something. What is wrong in one dtype is wrong in the others, and hundreds of mutants are many."""
    shown_on = _SHOWN.get((kernel.operator, kernel.module + kernel.name))
    return shown_on is None or shown_on(params)


def mutants(operator: str) -> dict[str, Mutant]:
    """The loaded mutants of one operator by name."""
    return {name: record for (of, name), record in _MUTANTS.items() if of == operator}


def controls(operator: str) -> dict[str, Kernel]:
    """The loaded unmutated twins of one operator by name."""
    return {name: record for (of, name), record in _CONTROLS.items() if of == operator}
