"""Rules of expectation as a whole: none may be out of date, about nothing, or in conflict with another one."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conformance.arch import Arch
from conformance.environment import version
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.rule import Expectation, expected, matches
from conformance.expectations.until import PACKAGES, over
from conformance.registry import archs, kernels, matrices, operator

Point = Mapping[str, str]
SUBJECT = ("operator", "variant", "family", "kernel")  # what a rule may match beside a case's parameters


class Governed(NamedTuple):
    """A rule on one architecture, and how many points it matches."""

    arch: str
    rule: Expectation
    points: int


@dataclass(frozen=True)
class Points:
    """Many points, as far as some rules can tell them apart. ``names``: of everything that any point says. ``counts``:
    how many points have these values of the ``keys`` that the rules ask for."""

    names: frozenset[str]
    keys: tuple[str, ...]
    counts: Mapping[tuple[str, ...], int]

    @classmethod
    def of(cls, points: Iterable[Point], rules: Iterable[Expectation]) -> Points:
        keys = _keys(rules)
        names: dict[str, None] = {}
        counts: Counter[tuple[str, ...]] = Counter()
        for point in points:
            names.update(dict.fromkeys(point))
            counts[tuple([point.get(key, "") for key in keys])] += 1
        return cls(frozenset(names), keys, counts)

    def counted(self, keys: Sequence[str]) -> Mapping[tuple[str, ...], int]:
        """The same by some of the keys."""
        places = [self.keys.index(key) for key in keys]
        found: Counter[tuple[str, ...]] = Counter()
        for values, count in self.counts.items():
            found[tuple([values[place] for place in places])] += count
        return found


def every_point(rules: Sequence[Expectation], words: Sequence[str] = ()) -> Points:
    """Everything that these rules (or skips) can be about: each case of any tier on each kernel of this checkout, and
    on those that ``words`` (of ``--kernels``) add. A rule is stale when it is about none of them, whatever a run
    selects."""
    return Points.of(_points(rules, words), rules)


def _points(rules: Sequence[Expectation], words: Sequence[str]) -> Iterator[Point]:
    named = [rule.match.get("operator", ()) for rule in rules]
    wanted = {name for names in named if isinstance(names, tuple) for name in names}
    for of in matrices().values():
        if all(named) and of.operator not in wanted:
            continue  # no rule is about this operator: its cases need not be planned
        contract = operator(of.operator)
        names = dict.fromkeys(kernel.name for kernel in (*kernels(of.operator), *kernels(of.operator, words)))
        for case in of.plan(of.tier_names):
            subject = {"operator": of.operator, "variant": contract.variant(case), "family": case.family}
            for name in names:
                yield {**case.params, **subject, "kernel": name}


def governed(rules: Sequence[Expectation], archs: Sequence[Arch], points: Iterable[Point] | Points) -> list[Governed]:
    """For each architecture and rule, the number of points that the rule matches there."""
    keys = _keys(rules)
    counted = _as_points(points, rules).counted(keys)
    found = []
    for arch in archs:
        for rule in rules:
            if rule.archs and arch.name not in rule.archs:
                continue
            count = sum(n for values, n in counted.items() if matches(rule, _point(keys, values), arch) is not False)
            found.append(Governed(arch.name, rule, count))
    return found


def problems(arch: Arch, rules: Sequence[Expectation], points: Iterable[Point] | Points,
             today: datetime.date | None = None) -> list[str]:
    """What is wrong with the rules of one architecture, over every point that there is (not only those of a run):
    unknown keys, rules past their end, rules that match nothing, and points that two rules of one rank match."""
    found = []
    points = _as_points(points, (*rules, *arch.skips))
    known = {*SUBJECT, *points.names}
    versions = {name: text for name in PACKAGES if (text := version(name))}
    for rule in (*rules, *arch.skips):
        found += _unknown_in_match(rule, points, known)
    for rule in rules:
        found += _unknown_names(rule, arch)
        reason = over(rule, arch, today or datetime.date.today(), versions)
        if reason:
            found.append(f"{rule.where}: past its end (until = {rule.until!r}): {reason}; check it on {arch.name}, "
                         "then remove the rule or move the date")
    for entry in governed((*rules, *arch.skips), [arch], points):
        if not entry.points:
            found.append(f"{entry.rule.where}: stale: it matches no case on {arch.name}; remove or mend it")
    keys = _keys(rules)
    for values in points.counted(keys):
        try:
            expected(rules, _point(keys, values), arch)
        except ConformanceError as error:
            found.append(f"ambiguous: {error}")
    return list(dict.fromkeys(found))


def _as_points(points: Iterable[Point] | Points, rules: Iterable[Expectation]) -> Points:
    return points if isinstance(points, Points) else Points.of(points, rules)


def _unknown_in_match(rule: Expectation, points: Points, known: Collection[str]) -> list[str]:
    """Keys that are not ``known``; operators, kernels, dtypes and other values that no point has. Beside a value that
    some point has, a misspelt one would never be missed."""
    operators = rule.match.get("operator")
    if isinstance(operators, tuple) and (wrong := [name for name in operators if name not in matrices()]):
        return [str(unknown_name(f"operator in {rule.where}: match:", name, matrices())) for name in wrong]
    found = [str(unknown_name(f"key in {rule.where}: match:", key, known)) for key in rule.match if key not in known]
    for key, condition in rule.match.items():
        if key != "operator" and key in points.names and isinstance(condition, tuple):
            keys = (key, "operator") if operators else (key,)
            there = {values[0] for values in points.counted(keys)
                     if not isinstance(operators, tuple) or values[1] in operators}
            found += [str(unknown_name(f"{key} in {rule.where}: match:", value, there - {""}))
                      for value in condition if value not in there]
    return found


def _unknown_names(rule: Expectation, arch: Arch) -> list[str]:
    """Architectures and entries of facts that no table has: a rule with a misspelt one would hold nowhere, or be
    "unknown" everywhere."""
    tables = {**archs(), arch.name: arch}
    found = [str(unknown_name(f"architecture in {rule.where}:", name, tables))
             for name in rule.archs if name not in tables]
    for name in rule.facts:
        table, _, entry = name.partition(".")
        entries = {key for each in tables.values() if entry and table in each.facts for key in each.facts[table].value}
        if entry and entry not in entries:
            found.append(str(unknown_name(f"entry of {table} in {rule.where}: facts:", entry, entries)))
    return found


def _keys(rules: Iterable[Expectation]) -> tuple[str, ...]:
    """The keys that any rule asks for: points that agree in them are the same to all rules."""
    return tuple(dict.fromkeys(key for rule in rules for key in rule.match))


def _point(keys: Sequence[str], values: Sequence[str]) -> Point:
    return {key: value for key, value in zip(keys, values, strict=True) if value}
