"""Rules of somebody else's published kernels, as data: their cells, and what each revision is expected to do with them.

A file ``matrices/rule_sets/NAME.toml`` holds ``[cells.NAME]`` tables (``expand``, as in a matrix) and, for each
``[revision.NAME]``, its rules (``[[revision.NAME.expect]]``) and the numbers that rules ask for
(``[[revision.NAME.derive]]``): an expression is an integer, a parameter's name, a list (the product of its members), or
a table with ``sum``, ``max``, or ``of`` and ``to`` (a parameter's value looked up in a table).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.arch import Arch
from conformance.cases.matrix import Matrix
from conformance.cases.matrix_file import check_blocks
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.files import read_rules
from conformance.expectations.rule import Expectation, expected
from conformance.toml_file import check_table, parse_toml

_TOP = {"name": str, "about": str, "source": str, "operator": str, "parts": list, "cells": dict, "revision": dict}
_REVISION = {"about": str, "cells": list, "archs": list, "derive": list, "expect": list}
Point = dict[str, str]
Expression = Any


@dataclass(frozen=True)
class Revision:
    """One state of the published kernels: the names of its cells, its rules, and its derived numbers as (name,
    condition on parameters, expression). ``archs``: the architectures that it speaks of."""

    name: str
    about: str
    cells: tuple[str, ...]
    archs: tuple[str, ...]
    rules: tuple[Expectation, ...]
    derived: tuple[tuple[str, Mapping[str, str], Expression], ...]


@dataclass(frozen=True)
class RuleSet:
    """``parts``: parameters that split a cell into the kernels it runs, such as the stage."""

    name: str
    about: str
    source: str
    parts: tuple[str, ...]
    cells: Mapping[str, tuple[Point, ...]]
    revisions: Mapping[str, Revision]

    def points(self, revision: Revision, cells: Sequence[str] = ()) -> list[Point]:
        """The parameters of every part of every cell, with the numbers that the revision derives from them."""
        return [_derived(revision, cell) for name in cells or revision.cells for cell in self.cells[name]]

    def outcomes(self, revision: Revision, cells: str, arch: Arch) -> Counter[str]:
        """How many whole cells are expected to run natively, to fall back, to be refused and so on: of a cell's parts
        the one that goes worst counts. Keys as `word` spells them."""
        worst: dict[tuple[tuple[str, str], ...], str] = {}
        derived = {name for name, _, _ in revision.derived}
        for point in self.points(revision, [cells]):
            key = tuple((k, v) for k, v in point.items() if k not in self.parts and k not in derived)
            found = word(expected(revision.rules, point, arch))
            worst[key] = max(worst.get(key, found), found, key=_badness)
        return Counter(worst.values())


def _derived(revision: Revision, cell: Point) -> Point:
    """The cell with the derived numbers that its parameters call for, each of which later ones may use."""
    point = dict(cell)
    for name, when, expression in revision.derived:
        if all(point.get(key) == value for key, value in when.items()):
            point[name] = str(value_of(expression, point))
    return point


def word(rule: Expectation | None) -> str:
    """An expectation in one word and, for fallbacks and failures, which."""
    return "unknown" if rule is None else str(rule)


def runnable(outcomes: Mapping[str, int]) -> int:
    """Cells that are not refused before compilation: those that a harness would start."""
    return sum(count for text, count in outcomes.items() if not text.startswith("unsupported = refused ")
               and text != "unsupported = refused")


def _badness(text: str) -> int:
    order = ("native", "fallback", "known-failure", "unsupported")
    return next((i for i, kind in enumerate(order) if text.startswith(kind)), len(order)) + text.endswith("= refused")


def value_of(expression: Expression, cell: Mapping[str, str]) -> int:
    """The value of an expression for a cell. Raises KeyError or ValueError for what the cell lacks."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return int(cell[expression])
    if isinstance(expression, list):
        return math.prod(value_of(part, cell) for part in expression)
    if "of" in expression:
        return int(expression["to"][cell[expression["of"]]])
    fold = sum if "sum" in expression else max
    return fold(value_of(part, cell) for part in expression["sum" if "sum" in expression else "max"])


def load_rule_set(path: Path) -> RuleSet:
    """Read and check one file. Raises ConformanceError with file and key."""
    data = parse_toml(path)
    check_table(data, _TOP, str(path), ("name", "about", "source", "operator", "cells", "revision"))
    for name, table in data["cells"].items():
        check_table(table, {"about": str, "expand": list}, f"{path}: cells {name!r}", ("about", "expand"))
        check_blocks(table, f"{path}: cells {name!r}")
    matrix = Matrix(path, data["operator"], (), (), (), {}, {}, data["cells"], ())
    cells = {name: tuple(dict(case.params) for case in matrix.cases(name)) for name in data["cells"]}
    revisions = {name: _revision(path, name, table, cells) for name, table in data["revision"].items()}
    return RuleSet(data["name"], data["about"], data["source"], tuple(data.get("parts", ())), cells, revisions)


def _revision(path: Path, name: str, table: dict[str, Any], cells: Mapping[str, Any]) -> Revision:
    where = f"{path}: revision {name!r}"
    check_table(table, _REVISION, where, ("about", "cells", "archs", "expect"))
    for each in table["cells"]:
        if each not in cells:
            raise unknown_name(f"cells in {where}:", each, cells)
    for entry in table.get("derive", []):
        check_table(entry, {"name": str, "when": dict, "value": object}, where, ("name", "value"))
    derived = tuple((e["name"], {k: str(v) for k, v in e.get("when", {}).items()}, e["value"])
                    for e in table.get("derive", []))
    rules = read_rules(path, table["expect"], header=f"revision.{name}.expect", needs_arch=False)
    found = Revision(name, table["about"], tuple(table["cells"]), tuple(table["archs"]), rules, derived)
    try:
        for each in found.cells:
            for cell in cells[each]:
                _derived(found, cell)
    except (KeyError, ValueError, TypeError) as error:
        raise ConformanceError(f"{where}: derive: {type(error).__name__}: {error} is not in cells {each!r}") from None
    return found
