"""What a run knows before its first case, and how its record files begin: planned cases, rules, what devices say."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from conformance.bench.protocol import protocol_of
from conformance.case import Case
from conformance.cases.plan import Planned, parse_nodeid, remember
from conformance.expectations.check import Points, every_point
from conformance.expectations.rule import Expectation
from conformance.registry import arch as table_of
from conformance.registry import operator, operators
from conformance.runs.earlier import Earlier
from conformance.runs.portion import Division, Portion
from conformance.session.run import Run


class Opening:
    """One per run, in the controlling process. What is slow to find out is found out once, when it is first needed."""

    def __init__(self, run: Run, portion: Portion) -> None:
        self.run = run
        self.portion = portion

    def get_ready(self) -> None:
        """Do ahead what takes `lines` a second or two: torch is imported and the cases are planned."""
        operators()
        self.plan()
        self._probes  # noqa: B018
        if any(map(self._said_of, self.run.archs)):
            self._all_points  # noqa: B018

    def plan(self) -> None:
        """Expand the matrices. Raises ConformanceError for what only that shows to be wrong in one."""
        self._cases  # noqa: B018 - fills the cache

    @functools.cached_property
    def _cases(self) -> dict[str, Case]:
        """The planned cases by id, with the tiers that a node id does not tell."""
        chosen = self.run.selection
        found = {case.id: case for of in chosen.matrices() for case in chosen.cases_of(of)}
        remember(found)
        return found

    @functools.cached_property
    def _all_points(self) -> Points:
        return every_point([rule for arch in self.run.archs for rule in self._said_of(arch)],
                           self.run.selection.kernels)

    def _said_of(self, arch: str) -> tuple[Expectation, ...]:
        """The rules and skips of an architecture."""
        return (*self.run.rules(arch), *table_of(arch).skips)

    @functools.cached_property
    def _probes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What the devices here say of themselves, by architecture."""
        from conformance.expectations.probe import probe

        return {arch: probe(table_of(arch), device) for arch, device in self.run.archs.items()}

    def lines(self, nodeids: Sequence[str], workers: int, division: Division) -> dict[str, dict[str, Any]]:
        """The first line of each architecture's record file, once it is known what will run.

        Raises ConformanceError when a run that is to be resumed differs from this one, and for a matrix whose operator
        nobody defines.
        """
        from conformance.environment import identity as identity_of
        from conformance.runs.timings import check_protocol
        from conformance.session.facts import resumed_facts, shard_facts

        for of in self.run.selection.matrices():
            operator(of.operator)  # without a contract it would run nothing, without a word
        self.plan()  # node ids are parsed faster, and kept smaller, once the cases are known
        elsewhere, identity, carried = map(
            self.by_arch, (division.elsewhere, division.identity, division.recorded))
        found: dict[str, dict[str, Any]] = {}
        for arch, entries in self.by_arch([*nodeids, *division.recorded]).items():
            here = identity_of(arch)
            line = found[arch] = self._line(arch, entries, workers, here)
            if self.portion.shard is not None:
                whole = self._line(arch, [*entries, *elsewhere.get(arch, ())], workers, here)
                line["shard"] = shard_facts(self.portion.shard, line, whole, self._pairs(identity.get(arch, ())),
                                            division, self.portion.costs_digest)
            if earlier := self.portion.earlier.get(arch):
                line["resumed"] = resumed_facts(earlier, line, len(carried.get(arch, ())), self.portion.anyway)
            if timed := self.portion.timings.get(arch):
                check_protocol(timed, protocol_of(self.run.archs[arch]).record())
        return found

    def _line(self, arch: str, entries: Sequence[Planned], workers: int, here: dict[str, Any]) -> dict[str, Any]:
        from conformance.session.facts import describe

        points = self._all_points if self.run.rules(arch) else Points.of((), ())
        return describe(self.run, arch, self._pairs(entries), points, here, workers=workers,
                        probe=self._probes[arch])

    def problems(self, arch: str, earlier: Earlier | None) -> list[str]:
        """What is wrong before a case has run: rules, skips, a device that is not as its table says, and what an
        earlier run met; a worker lost then is lost still."""
        from conformance.expectations.check import problems
        from conformance.expectations.probe import disagreements

        table = table_of(arch)
        return [
            *((earlier.end or {}).get("notes", ()) if earlier else ()),
            *disagreements(table, self._probes[arch]),
            *(problems(table, self.run.rules(arch), self._all_points) if self._said_of(arch) else ()),
            *(problem for of in self.run.selection.matrices() for problem in of.stale_skips()),
        ]

    def by_arch(self, nodeids: Iterable[str]) -> dict[str, list[Planned]]:
        found: dict[str, list[Planned]] = {}
        for planned in filter(None, map(parse_nodeid, nodeids)):
            found.setdefault(self.arch_of(planned), []).append(planned)
        return found

    def _pairs(self, entries: Iterable[Planned]) -> list[tuple[Case, str]]:
        return [(self.with_tiers(entry), entry.kernel) for entry in entries]

    def arch_of(self, planned: Planned) -> str:
        return planned.arch or next(iter(self.run.archs))

    def with_tiers(self, entry: Planned) -> Case:
        return self._cases.get(entry.case.id, entry.case)
