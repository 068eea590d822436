"""From what a user types to a case, its kernels and the settings to run it with; shared by show and repro."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.case import Case, parse_case
from conformance.cases.matrix import Matrix
from conformance.cases.options import DATA, Selection, with_data
from conformance.cases.plan import parse_nodeid
from conformance.environment import chosen_archs
from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import Kernel
from conformance.registry import ROOT, kernels, matrices, matrix, selector
from conformance.result import Settings, rerun_command


@dataclass(frozen=True)
class Wanted:
    """A case that exists, with every tier that holds it, and the kernel that its name carried, if any."""

    case: Case
    kernel: str | None = None


@functools.cache
def every_case(operator: str) -> dict[str, Case]:
    """Every case of an operator by id, with all tiers that hold it; takes about a second the first time."""
    of = matrix(operator)
    return {case.id: case for case in of.plan(of.tier_names)}


def find_case(text: str, data: str = "real") -> Wanted:
    """The case behind an id, or behind one of pytest's node ids (which name the kernel too).

    The parameters may stand in any order; the case has them in the matrix's, on which its seed depends.
    Raises ConformanceError for a malformed id, an unknown operator, and a point that no tier holds.
    """
    kernel = None
    if "::" in text:
        planned = parse_nodeid(text.strip())
        if planned is None:
            raise ConformanceError(f"{text!r} is the node id of no case: expected matrices/OPERATOR.toml::KERNEL[CASE]")
        text, kernel = planned.case.id, planned.kernel
    if re.fullmatch(r"\w+", text.strip()):
        raise unknown_name("operator", text.strip(), matrices())
    wanted = parse_case(text)
    of = matrix(wanted.operator)
    known = list(every_case(wanted.operator).values())
    for case in known:
        if case == wanted:
            return Wanted(with_data(case, data) if data == "exact" else case, kernel)
    for regime in DATA:
        for case in known:
            if with_data(case, regime) == wanted:
                return Wanted(with_data(case, regime), kernel)
    raise ConformanceError(_not_held(of, wanted, known))


def _not_held(of: Matrix, wanted: Case, known: Sequence[Case]) -> str:
    if wanted.family and wanted.family not in of.families:
        return str(unknown_name(f"edge family of {of.operator}", wanted.family, of.families))
    same = [case for case in known if case.family == wanted.family] or known
    nearest = max(same, key=lambda case: len(set(case.params.items()) & set(wanted.params.items())))
    other = [f"{key}:{value}" for key, value in nearest.params.items() if wanted.params.get(key) != value]
    return (
        f"no tier of {of.operator} holds the case {wanted.id!r}. The nearest is {nearest.id!r} (it has "
        f"{', '.join(other) or 'fewer parameters'}); 'python -m conformance list --tier {','.join(of.tier_names)}' "
        "prints all"
    )


def find_kernels(operator: str, words: Sequence[str], name: str | None = None) -> list[Kernel]:
    """Kernels chosen by ``--kernels`` words (names or modules) and, of these, the one called ``name``.

    Raises ConformanceError when there is none, or when a name is unknown.
    """
    found = kernels(operator, words or ((name,) if name else ()))
    if words and name:
        found = [kernel for kernel in found if kernel.name == name] or _raise_unknown(name, found)
    if not found:
        raise ConformanceError(f"no kernel of {operator} is chosen by --kernels {','.join(words) or name}")
    return found


def _raise_unknown(name: str, found: Sequence[Kernel]) -> list[Kernel]:
    raise unknown_name("kernel", name, [kernel.name for kernel in found])


def settings_of(selection: Selection) -> list[Settings]:
    """What each architecture asked for would run with. Raises ConformanceError for one that is not here."""
    return [
        Settings(device, selection.sizes or ("reduced" if device == "cpu" else "official"), arch)
        for arch, device in chosen_archs(selection.archs).items()
    ]


def pytest_line(case: Case, chosen: Sequence[Kernel], settings: Settings) -> str:
    """One shell line that reruns the case on these kernels, from the current directory."""
    words = list(dict.fromkeys(selector(kernel) for kernel in chosen))
    selected = {kernel.name for kernel in kernels(case.operator, words)}
    nodes = []
    if len(chosen) == 1 and len(selected) > 1:  # a module's kernels come together: pick the item by its node id
        nodes = [shlex.quote(f"matrices/{matrix(case.operator).path.name}::{chosen[0].name}[{case.name}]")]
    line = rerun_command(case.id, chosen, settings, *nodes)
    return line if Path.cwd().resolve() == ROOT else f"cd {shlex.quote(str(ROOT))} && {line}"
