"""The three-way table: candidate, baseline and PyTorch on each case, their ratios, and which of these are noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from reports.bench.records import BASELINE, PYTORCH, BenchRun, Timing


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the one kernel is as the other (their times, other / one)."""

    value: float
    noise: bool


def ratio(one: Timing | None, other: Timing | None) -> Ratio | None:
    """None where one of both was not timed. Noise: their times differ by no more than the trials of either do."""
    if one is None or other is None:
        return None
    difference = abs(one.seconds - other.seconds) / min(one.seconds, other.seconds)
    return Ratio(other.seconds / one.seconds, difference <= max(one.spread, other.spread))


@dataclass(frozen=True)
class Row:
    """One candidate on one case beside what it is compared with. ``candidate`` is None where an operator has none, or
    none was timed."""

    operator: str
    variant: str
    workload: str
    point: str
    case: str
    candidate: Timing | None
    baseline: Timing | None
    pytorch: Timing | None

    @property
    def timings(self) -> tuple[Timing, ...]:
        return tuple(filter(None, (self.candidate, self.baseline, self.pytorch)))

    @property
    def over_baseline(self) -> Ratio | None:
        return ratio(self.candidate, self.baseline)

    @property
    def over_pytorch(self) -> Ratio | None:
        return ratio(self.candidate, self.pytorch)

    @property
    def baseline_over_pytorch(self) -> Ratio | None:
        return ratio(self.baseline, self.pytorch)

    @property
    def moved(self) -> int:
        return max(timing.bytes for timing in self.timings)


@dataclass(frozen=True)
class Summary:
    """Geometric means over the cases of one variant (or workload) and candidate; lowest and highest of a ratio.
    noise: cases whose ratio to the baseline is noise; slower: those in which the baseline is faster beyond noise."""

    operator: str
    variant: str
    workload: str
    candidate: str
    cases: int
    over_baseline: tuple[float, float, float] | None
    over_pytorch: tuple[float, float, float] | None
    baseline_over_pytorch: tuple[float, float, float] | None
    noise: int
    slower: int
    of_copy: tuple[float, float] | None  # lowest and median, of the candidate


def rows(run: BenchRun) -> tuple[Row, ...]:
    """One row for each case and candidate, variant by variant; one per case where no candidate was timed."""
    by_case: dict[tuple[str, str], dict[str, list[Timing]]] = {}
    for timing in run.timed:
        by_case.setdefault((timing.operator, timing.variant), {}).setdefault(timing.case, []).append(timing)
    return tuple(row for cases in by_case.values() for timings in cases.values() for row in _of_case(run, timings))


def _of_case(run: BenchRun, timings: Sequence[Timing]) -> Iterable[Row]:
    def with_role(role: str) -> list[Timing]:
        return [timing for timing in timings if run.roles.get(timing.kernel, "candidate") == role]

    first = timings[0]
    baseline, pytorch = (next(iter(with_role(role)), None) for role in (BASELINE, PYTORCH))
    candidates: list[Timing | None] = [*with_role("candidate")]
    for candidate in candidates or [None]:
        yield Row(first.operator, first.variant, first.workload, first.point, first.case, candidate, baseline, pytorch)


def summaries(found: Iterable[Row], by_workload: bool = False) -> tuple[Summary, ...]:
    """One per operator, variant and candidate, or one per named workload as well."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in found:
        name = row.candidate.kernel if row.candidate else ""
        workload = row.workload if by_workload else ""
        groups.setdefault((row.operator, row.variant, workload, name), []).append(row)
    return tuple(_summary(key, members) for key, members in groups.items())


def _summary(key: tuple[str, str, str, str], members: Sequence[Row]) -> Summary:
    shares = [row.candidate.of_copy for row in members if row.candidate]
    baselines = [row.over_baseline for row in members if row.over_baseline]
    return Summary(
        *key, len(members),
        _spread([found.value for found in baselines]),
        _spread([row.over_pytorch.value for row in members if row.over_pytorch]),
        _spread([row.baseline_over_pytorch.value for row in members if row.baseline_over_pytorch]),
        sum(found.noise for found in baselines),
        sum(found.value < 1 and not found.noise for found in baselines),
        (min(shares), median(shares)) if shares else None,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Lowest, geometric mean, highest."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    return (min(finite), geometric_mean(finite), max(finite)) if finite else None
