"""The options that pytest and the command line share, in one table, and the plan they select."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case import Case, parse_case
from conformance.cases.matrix import Matrix
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.files import read_rules_file
from conformance.expectations.rule import Expectation
from conformance.registry import importable, matrices, matrix

SIZES = ("official", "reduced")
DATA = ("real", "exact")
VACUITY = ("smoke", "all", "off")


@dataclass(frozen=True)
class Option:
    flag: str
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        return "conformance_" + self.flag.strip("-").replace("-", "_")


OPTIONS = (
    Option("--operator", "NAME", "only this operator (several: comma-separated)"),
    Option("--kernels", "NAME[,NAME]", "only these kernels; a module such as my_package.my_kernels, or a file "
           "such as my_kernels.py, adds its own"),
    Option("--tier", "NAME[,NAME]", "tiers: official, full, edge, smoke, models, ... (default: the matrix's own)"),
    Option("--arch", "NAME[,NAME]|all", "architectures (default: the GPU here, if any, else cpu); on those that are "
           "not here kernels are routed, lowered and assembled"),
    Option("--sizes", "official|reduced", "official sizes (default on a GPU) or reduced ones (default on the CPU)"),
    Option("--data", "real|exact", "data of cases that name none: random values, or sums that are exact in any order"),
    Option("--case", "ID", "only this case (several: separate by spaces)"),
    Option("--expectations", "FILE", "more rules of expectation (TOML, [[expect]]), as for your own kernels"),
)


@dataclass(frozen=True)
class Selection:
    """What the shared options ask for, checked. Empty tuples mean "all" or "the default". ``bench``: cases are timed
    as well, and the default are the tiers that a matrix declares for that."""

    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    sizes: str | None = None
    data: str = "real"
    cases: tuple[str, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    bench: bool = False

    def matrices(self) -> list[Matrix]:
        """The matrices asked for. Raises ConformanceError for an operator that has none."""
        names = self.operators or tuple(matrices())
        wanted = {parse_case(text).operator for text in self.cases}
        return [matrix(name) for name in names if not wanted or name in wanted]

    def cases_of(self, of: Matrix) -> list[Case]:
        """The planned cases of one matrix, grouped so that those which share data follow one another.

        Raises ConformanceError for an unknown tier, or a --case that no tier holds.
        """
        if self.cases:
            cases = [_find(of, text) for text in self.cases if parse_case(text).operator == of.operator]
        else:
            cases = of.plan(self.tiers_of(of))
        if self.data == "exact":
            cases = [with_data(case, "exact") for case in cases]
        return of.grouped({case.id: case for case in cases}.values())

    def tiers_of(self, of: Matrix) -> tuple[str, ...]:
        """Tiers asked for, or the matrix's own; ``TK_FULL_TEST`` puts "full" in the place of "official"."""
        if self.tiers:
            return tuple(tier for tier in self.tiers if tier in of.tier_names)
        if self.bench:
            return of.bench_tiers
        full = os.environ.get("TK_FULL_TEST") in ("1", "true", "True") and "full" in of.tier_names
        return tuple("full" if full and tier == "official" else tier for tier in of.default_tiers)

    def lacking(self, of: Matrix) -> str:
        """That a matrix lacks a tier that is asked for, which is no error where another one has it; or nothing."""
        names = [] if self.cases else [tier for tier in self.tiers if tier not in of.tier_names]
        return f"{of.operator}: has no tier {' or '.join(names)}, only {', '.join(of.tier_names)}" if names else ""


def with_data(case: Case, data: str) -> Case:
    """The case on other data; one that names its own keeps it."""
    if "data" in case.params:
        return case
    return Case(case.operator, {**case.params, "data": data}, case.family, case.tiers)


def _find(of: Matrix, text: str) -> Case:
    wanted = parse_case(text)
    plain = dict(wanted.params)
    for tier in of.tier_names:
        for case in of.cases(tier):
            if case == wanted:
                return case  # with the parameters in the matrix's order: the seed is taken from the id
            if plain.get("data") in DATA and with_data(case, plain["data"]) == wanted:
                return with_data(case, plain["data"])
    raise ConformanceError(
        f"no tier of {of.operator} holds the case {text!r}; 'python -m conformance list --operator {of.operator} "
        f"--tier NAME' prints those of one tier: {', '.join(of.tier_names)}"
    )


def select(get: Callable[[str], Any]) -> Selection:
    """Build the selection from parsed options (``get(dest)``). Raises ConformanceError for unknown values."""
    value = {option.flag: get(option.dest) for option in OPTIONS}
    for flag, known in (("--sizes", SIZES), ("--data", DATA)):
        if value[flag] is not None and value[flag] not in known:
            raise unknown_name(f"value of {flag}", value[flag], known)
    names = {flag: names_in(flag, value[flag]) for flag in ("--operator", "--kernels", "--tier", "--arch")}
    operators, tiers, chosen_kernels = names["--operator"], names["--tier"], tuple(map(importable, names["--kernels"]))
    for name in operators:
        matrix(name)
    chosen = [matrix(name) for name in operators] or list(matrices().values())
    for tier in tiers:
        if not any(tier in of.tier_names for of in chosen):
            raise unknown_name("tier", tier, {name for of in chosen for name in of.tier_names})
    cases = tuple((value["--case"] or "").split())
    if value["--case"] is not None and not cases:
        raise empty("--case")
    for text in cases:
        _find(matrix(parse_case(text).operator), text)
    return Selection(
        operators, chosen_kernels, tiers, names["--arch"], value["--sizes"],
        value["--data"] or "real", cases, _rules(value["--expectations"]),
    )


def selected(args: Any) -> Selection:
    """`select` of what argparse has read; options that a subcommand lacks count as not given."""
    return select(lambda dest: getattr(args, dest, None))


def _rules(text: str | None) -> tuple[Expectation, ...]:
    if text is None:
        return ()
    if not text.strip():
        raise empty("--expectations")
    return read_rules_file(Path(text))


def names_in(flag: str, text: str | None) -> tuple[str, ...]:
    """The names of a comma-separated list, each once; none where the option is not given. Raises ConformanceError for
    an empty name: an option that names nothing, as a script's unset variable makes one, must not mean "all"."""
    if text is None:
        return ()
    names = [part.strip() for part in text.split(",")]
    if not any(names):
        raise empty(flag)
    if not all(names):
        raise ConformanceError(f"{flag} {text!r}: a name is missing beside a comma")
    return tuple(dict.fromkeys(names))


def empty(flag: str) -> ConformanceError:
    """The error of an option whose value is empty."""
    return ConformanceError(f"{flag} is empty: give a value, or leave the option out")


def add_to_argparse(parser: Any, but: tuple[str, ...] = (), **helps: str) -> None:
    """Declare the shared options. ``helps``: what one of them (by its name without dashes) means for this command,
    where that is something else."""
    for option in OPTIONS:
        if option.flag not in but:
            text = helps.get(option.flag.strip("-"), option.help)
            parser.add_argument(option.flag, dest=option.dest, metavar=option.metavar, help=text)
