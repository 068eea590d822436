"""The overview: architectures x kernels, how far each was taken, and what differs between any two architectures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.digest import Digest, digest
from reports.records import CONTRADICTIONS, FAILING, Records, Result

LANES = ("execute", "assemble", "lower", "route")
MOST_DIFFERENCES = 12  # listed of one pair
_IDENTITY = ("commit", "dirty", "torch", "tilelang", "tiers", "data")


@dataclass(frozen=True)
class Cell:
    """One kernel on one architecture. ``lanes``: lane -> results that passed there; ``fallbacks``: path -> results on
    a declared other path; ``sign``: what the colour shows, a state, or the highest lane where nothing was executed."""

    total: int
    lanes: Mapping[str, int]
    failing: int
    contradictions: int
    not_run: int
    expected: int
    fallbacks: Mapping[str, int]
    sign: str


@dataclass(frozen=True)
class Row:
    """One architecture: its record file's run, verdict, and cells by kernel."""

    records: Records
    digest: Digest
    cells: Mapping[str, Cell]

    @property
    def arch(self) -> str:
        return self.records.run.arch


@dataclass(frozen=True)
class Difference:
    """What one kernel does otherwise on the second architecture, with the number of cases."""

    kernel: str
    first: str
    second: str
    cases: int


@dataclass(frozen=True)
class Overview:
    rows: tuple[Row, ...]
    kernels: tuple[str, ...]
    pairs: Mapping[tuple[str, str], tuple[Difference, ...]]
    remarks: tuple[str, ...]


def overview(runs: Sequence[Records]) -> Overview:
    """Everything that the overview page says, from the record files of several architectures."""
    rows = tuple(_row(records) for records in runs)
    kernels = tuple(dict.fromkeys(name for row in rows for name in row.cells))
    pairs = {(a.arch, b.arch): found for a, b in itertools.combinations(rows, 2) if (found := _differences(a, b))}
    return Overview(rows, kernels, pairs, _remarks(rows))


def _row(records: Records) -> Row:
    by_kernel: dict[str, list[Result]] = {name: [] for name in records.run.planned}
    for result in records.results:
        by_kernel.setdefault(result.kernel, []).append(result)
    return Row(records, digest(records), {name: _cell(found) for name, found in by_kernel.items()})


def _cell(results: Sequence[Result]) -> Cell:
    passed = Counter(r.lane or "execute" for r in results if r.state == "pass")
    states = Counter(r.state for r in results)
    failing = sum(states[state] for state in FAILING)
    best = next((lane for lane in LANES if passed[lane]), "")
    if failing:
        sign = "fail"
    elif best:
        sign = "pass" if best == "execute" else best
    else:
        sign = "expected" if states["expected"] else "not-run"
    return Cell(
        total=len(results),
        lanes={lane: passed[lane] for lane in LANES if passed[lane]},
        failing=failing,
        contradictions=sum(r.failing and r.kind in CONTRADICTIONS for r in results),
        not_run=states["not-run"],
        expected=states["expected"],
        fallbacks=Counter(
            str(r.path) for r in results if r.state == "pass" and r.expected and r.expected.get("kind") == "fallback"
        ),
        sign=sign,
    )


def _differences(first: Row, second: Row) -> tuple[Difference, ...]:
    """Cases that both have and that went another way, in state, path or, where both were compared, level; alike ones
    counted together. How far each went is in the grid."""
    known = {(r.case, r.kernel): r for r in second.records.results}
    counts: Counter[tuple[str, str, str]] = Counter()
    for result in first.records.results:
        other = known.get((result.case, result.kernel))
        if other is None:
            continue
        compared = bool(result.level and other.level)
        first_way, second_way = _way(result, compared), _way(other, compared)
        if first_way != second_way:
            counts[result.kernel, first_way, second_way] += 1
    return tuple(Difference(*key, cases) for key, cases in counts.most_common())


def _way(result: Result, compared: bool) -> str:
    """How a case went, in words that can be compared: "pass, path h_tiled/bits, bit-exact"."""
    if result.state == "not-run":
        return "not run"
    path = f", path {result.path}" if result.path else ""
    return result.state + path + (f", {result.level}" if compared else "")


def _remarks(rows: Sequence[Row]) -> tuple[str, ...]:
    """What keeps two rows from being compared without more ado."""
    found = []
    for name in _IDENTITY:
        values = {row.arch: getattr(row.records.run, name) for row in rows}
        if len(set(values.values())) > 1:
            told = "; ".join(f"{arch}: {_spelled(value)}" for arch, value in values.items())
            found.append(f"the runs differ in {name}: {told}")
    idle = [row.arch for row in rows if not any(kernel.executed for kernel in row.digest.kernels)]
    if idle:
        found.insert(0, f"nothing was executed on {', '.join(idle)}")
    return tuple(found)


def _spelled(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
