"""Matrices: tables of axes, constraints and tiers in TOML that expand to cases.

A file ``matrices/<operator>.toml`` holds ``[tier.NAME]`` tables and ``[[edge]]`` families. A tier is a list of
blocks (``expand``), each a product of axes, or is taken from another tier (``from``) by ``select`` (parameter
values) or ``cover`` (a covering subset, which also covers the combinations of the ``spread`` parameters). ``[[skip]]``
tables name cases that are listed and not run, with the reason. No code stands in these files, and every key is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.arch import Arch
from conformance.case import Case
from conformance.cases.coverage import covering_subset
from conformance.cases.matrix_file import EDGE, REQUIRE, check_number, read_matrix_file, words
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.files import read_skips
from conformance.expectations.rule import Expectation, matches

_ANY = Arch("any")  # skips of a matrix hang on no architecture


@dataclass(frozen=True)
class Family:
    """An edge family: what it is for, the reports it comes from, and the devices it needs (empty = any)."""

    name: str
    about: str
    source: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """All tiers of one operator, read from ``path``.

    ``group`` names the parameters that decide a case's inputs: cases that agree in them share data and should
    meet in one worker; those that agree in ``order`` as well follow one another there. ``default_tiers`` run when
    no tier is asked for, ``bench_tiers`` when cases are to be timed. ``slots`` names the argument whose negative
    entries mark slots without a row, if any. ``skips``: cases that are not run; the first that matches says why.
    """

    path: Path
    operator: str
    group: tuple[str, ...]
    order: tuple[str, ...]
    default_tiers: tuple[str, ...]
    about: Mapping[str, str]
    families: Mapping[str, Family]
    tables: Mapping[str, Mapping[str, Any]]
    edges: tuple[Mapping[str, Any], ...]
    slots: str = ""
    bench_tiers: tuple[str, ...] = ()
    skips: tuple[Expectation, ...] = ()
    _known: dict[str, list[Case]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tier_names(self) -> tuple[str, ...]:
        return (*self.tables, *((EDGE,) if self.edges else ()))

    def group_of(self, case: Case) -> str:
        """Key of the data that a case shares with others; edge cases share by family and shape."""
        return "/".join((case.family, *(case.params.get(key, "") for key in self.group)))

    def grouped(self, cases: Iterable[Case]) -> list[Case]:
        """The cases with each group together, in order of first appearance."""
        groups: dict[str, dict[tuple[str, ...], list[Case]]] = {}
        for case in cases:
            within = groups.setdefault(self.group_of(case), {})
            within.setdefault(tuple(case.get(key) for key in self.order), []).append(case)
        return [case for within in groups.values() for alike in within.values() for case in alike]

    def devices(self, case: Case) -> tuple[str, ...]:
        """Device types a case is meant for; empty when it runs on all."""
        family = self.families.get(case.family)
        return family.devices if family else ()

    def left_out(self, case: Case) -> str | None:
        """Why a case is not run, whatever the architecture and the kernel; None when it is."""
        point = {**case.params, "family": case.family}
        for skip in self.skips:
            if matches(skip, point, _ANY):
                return f"left out by the matrix: {skip.reason} ({skip.where})"
        return None

    def stale_skips(self) -> list[str]:
        """What is wrong with the skips: each must match a case of some tier, and so must each of its values."""
        left = list(self.skips)
        values = {(skip.where, key, value) for skip in left for key, condition in skip.match.items()
                  if isinstance(condition, tuple) for value in condition}
        for tier in (*(name for name, table in self.tables.items() if "expand" in table), EDGE):
            if (left or values) and (tier != EDGE or self.edges):  # edge families take longest to expand
                cases = self.cases(EDGE) if tier == EDGE else self._declared(tier)
                points = [{**case.params, "family": case.family} for case in cases]
                values = {(where, key, value) for where, key, value in values
                          if not any(point.get(key) == value for point in points)}
                left = [skip for skip in left if not any(matches(skip, point, _ANY) for point in points)]
        return [*(f"{skip.where}: stale: it matches no case of {self.operator}; remove or mend it" for skip in left),
                *(f"{where}: match: no case of {self.operator} has {key} = {value!r}; remove or mend it"
                  for where, key, value in sorted(values) if where not in {skip.where for skip in left})]

    def cases(self, tier: str) -> list[Case]:
        """The cases of one tier, in declared order, each marked with every tier it was declared in here.

        Raises ConformanceError for an unknown tier.
        """
        if tier not in self._known:
            self._known[tier] = self._cases(tier)
        return list(self._known[tier])

    def _cases(self, tier: str) -> list[Case]:
        if tier == EDGE and self.edges:
            return list(itertools.chain.from_iterable(self._edge_cases(edge) for edge in self.edges))
        if tier not in self.tables:
            raise unknown_name(f"tier of {self.operator}", tier, self.tier_names)
        cases = self._declared(tier)
        for other, table in self.tables.items():
            if table.get("mark") and table.get("from") == tier:
                marked = {case.id for case in self._declared(other)}
                cases = [replace(c, tiers=c.tiers | {other}) if c.id in marked else c for c in cases]
        return cases

    def plan(self, tiers: Iterable[str]) -> list[Case]:
        """The union of several tiers without repeats; the tiers of a repeated case are joined."""
        found: dict[str, Case] = {}
        for tier in tiers:
            for case in self.cases(tier):
                known = found.get(case.id)
                found[case.id] = replace(known, tiers=known.tiers | case.tiers) if known else case
        return list(found.values())

    def _declared(self, tier: str) -> list[Case]:
        table = self.tables[tier]
        where = f"{self.path.name}: tier {tier!r}"
        if "expand" in table:
            own = frozenset({tier})
            cases = [case for block in table["expand"] for case in self._expand(block, where, tiers=own)]
        else:
            own = frozenset({tier})
            cases = [replace(case, tiers=own) for case in self._declared(table["from"])]
            select = table.get("select", {})
            self._check_axes(cases, table, where)
            cases = [case for case in cases if all(case.get(k) in words(v, k, where) for k, v in select.items())]
            check_number(table, "cover", len(cases), where)
            if "cover" in table:
                chosen = covering_subset([case.params for case in cases], table["cover"], table.get("spread", ()))
                cases = [cases[index] for index in chosen]
        if not cases:
            raise ConformanceError(f"{where}: no case is left")
        return cases

    def _check_axes(self, cases: Iterable[Case], table: Mapping[str, Any], where: str) -> None:
        """Parameters by which cases are chosen must be theirs, and values some case's."""
        known: dict[str, set[str]] = {}
        for case in cases:
            for axis, value in case.params.items():
                known.setdefault(axis, set()).add(value)
        for key in ("select", "spread"):
            for axis in table.get(key, ()):
                if axis not in known:
                    raise unknown_name(f"parameter in {where}, key {key!r}:", axis, known)
        for axis, values in table.get("select", {}).items():
            for value in words(values, axis, where):
                if value not in known[axis]:
                    raise unknown_name(f"value of {axis} in {where}, key 'select':", value, known[axis])

    def _edge_cases(self, edge: Mapping[str, Any]) -> list[Case]:
        where = f"{self.path.name}: edge family {edge['family']!r}"
        own = frozenset({EDGE})
        cases = [case for block in edge["expand"] for case in self._expand(block, where, edge["family"], own)]
        if not cases:
            raise ConformanceError(f"{where}: no case is left")
        check_number(edge, "cover", len(cases), where)
        if "cover" in edge:
            cases = [cases[index] for index in covering_subset([case.params for case in cases], edge["cover"])]
        check_number(edge, "smoke", len(cases), where)
        chosen = set(covering_subset([case.params for case in cases], edge.get("smoke", 0)))
        return [replace(c, tiers=c.tiers | {"smoke"}) if i in chosen else c for i, c in enumerate(cases)]

    def _expand(self, block: Mapping[str, Any], where: str, family: str = "", tiers: frozenset[str] = frozenset()
                ) -> Iterable[Case]:
        """The product of a block's axes, less the points that ``require`` forbids.

        A value ``=key`` copies another parameter; ``require`` lists ``["a", "divides", "b"]`` triples.
        """
        axes = {key: words(values, key, where) for key, values in block.items() if key != REQUIRE}
        rules = block.get(REQUIRE, [])
        for rule in rules:
            fits = isinstance(rule, list) and len(rule) == 3 and rule[1] == "divides"
            if not fits or rule[0] not in [*axes] or rule[2] not in [*axes]:
                raise ConformanceError(f"{where}: rule {rule!r} is not [axis, 'divides', axis]")
        for values in itertools.product(*axes.values()):
            params = dict(zip(axes, values, strict=True))
            for key, value in params.items():
                if value.startswith("="):
                    if params.get(value[1:], "=").startswith("="):
                        raise ConformanceError(f"{where}: {key} = {value!r} refers to no axis of its block")
                    params[key] = params[value[1:]]
            try:
                kept = all(int(params[b]) % int(params[a]) == 0 for a, _, b in rules)
            except (ValueError, ZeroDivisionError) as error:
                raise ConformanceError(f"{where}: key 'require': {rules} with {params}: {error}") from None
            if kept:
                yield Case(self.operator, params, family, tiers)


def load_matrix(path: Path) -> Matrix:
    """Read and check one matrix file. Raises ConformanceError with file name and key."""
    data = read_matrix_file(path)
    tables: dict[str, Mapping[str, Any]] = data.get("tier", {})
    edges = tuple(data.get("edge", ()))
    return Matrix(
        path=path,
        operator=data["operator"],
        group=tuple(data.get("group", ())),
        order=tuple(data.get("order", ())),
        default_tiers=tuple(data.get("default_tiers", tables)),
        about={name: table.get("about", "") for name, table in tables.items()},
        families={
            edge["family"]: Family(edge["family"], edge["about"], edge["source"], tuple(edge.get("devices", ())))
            for edge in edges
        },
        tables=tables,
        edges=edges,
        slots=data.get("slots", ""),
        bench_tiers=tuple(data.get("bench_tiers", ())),
        skips=read_skips(path, data.get("skip", []), data["operator"]),
    )
