"""What a run amounts to: the verdict in a sentence, counts per kernel and tier, what was not run and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from reports.origin import origin
from reports.records import FAILING, LEVELS, Records, Result
from reports.text import generalise, plural, sentence, shown

NO_RESULT = "no result was recorded"
NO_REASON = "no reason was given"
EXECUTE = "execute"


@dataclass(frozen=True)
class Verdict:
    """``reason`` completes the word: "3 of 3456 results failed". ``notes`` must be seen too."""

    passed: bool
    reason: str
    notes: tuple[str, ...]
    executed: bool = True

    @property
    def word(self) -> str:
        """PASS stands for executed results only."""
        if not self.passed:
            return "FAIL"
        return "PASS" if self.executed else "NOT EXECUTED"


@dataclass(frozen=True)
class KernelRow:
    """Counts of one kernel. ``levels`` counts the levels that compared results reached, ``lanes`` how far
    cases were taken; ``budget`` is the largest budget fraction; ``missing`` are planned and have no line."""

    name: str
    operator: str
    about: str
    promise: str
    planned: int
    executed: int
    counts: Mapping[str, int]
    missing: int
    levels: Mapping[str, int]
    lanes: Mapping[str, int]
    budget: float | None
    seconds: float

    @property
    def failing(self) -> int:
        return sum(self.counts.get(state, 0) for state in FAILING)

    @property
    def below_promise(self) -> int:
        """Results compared whose level is lower than the kernel promises."""
        if self.promise not in LEVELS:
            return 0
        return sum(count for level, count in self.levels.items() if _rank(level) > _rank(self.promise))


@dataclass(frozen=True)
class NotRun:
    """Results that share a reason, with their number per kernel."""

    reason: str
    count: int
    kernels: Mapping[str, int]


@dataclass(frozen=True)
class Digest:
    verdict: Verdict
    total: int  # results planned or recorded, whichever is more, over all kernels
    counts: Mapping[str, int]  # state -> results, missing ones counted as not-run
    kernels: tuple[KernelRow, ...]
    tiers: Mapping[str, Mapping[str, int]]  # tier -> state -> results; a result counts in each of its tiers
    not_run: tuple[NotRun, ...]

    @property
    def failing(self) -> int:
        return sum(self.counts.get(state, 0) for state in FAILING)


def digest(records: Records) -> Digest:
    """Everything that the first screen of a report says."""
    names = [*records.run.kernels, *records.run.planned, *(result.kernel for result in records.results)]
    by_kernel: dict[str, list[Result]] = {name: [] for name in names}
    tiers: dict[str, Counter[str]] = {tier: Counter() for tier in records.run.tiers}
    for result in records.results:
        by_kernel[result.kernel].append(result)
        for tier in result.tiers:
            tiers.setdefault(tier, Counter())[result.state] += 1
    missing = records.missing
    kernels = tuple(_row(records, name, results, missing.get(name, 0)) for name, results in by_kernel.items())
    counts: Counter[str] = Counter()
    for row in kernels:
        counts.update(row.counts)
    counts["not-run"] += sum(missing.values())
    total = sum(counts.values())
    verdict = _verdict(records, kernels, counts, total)
    return Digest(verdict, total, counts, kernels, tiers, _not_run(records, missing))


def _row(records: Records, name: str, results: list[Result], missing: int) -> KernelRow:
    about = records.run.kernels.get(name)
    fractions = [r.budget_fraction for r in results if r.budget_fraction is not None]
    promised = next((r.promised for r in results if r.promised), "")
    return KernelRow(
        name=name,
        operator=about.operator if about else next((r.operator for r in results), ""),
        about=about.about if about else "",
        promise=about.promise if about and about.promise else promised or "",
        planned=records.run.planned.get(name, len(results)),
        executed=sum(r.state != "not-run" and r.lane in ("", EXECUTE) for r in results),
        counts=Counter(r.state for r in results),
        missing=missing,
        levels=dict(
            sorted(Counter(r.level for r in results if r.level).items(), key=lambda item: _rank(item[0]))
        ),
        lanes=Counter(r.lane for r in results if r.lane and r.state != "not-run"),
        budget=max((f for f in fractions if not math.isnan(f)), default=None),
        seconds=sum(r.seconds for r in results if r.seconds is not None and math.isfinite(r.seconds)),
    )


def _verdict(
    records: Records, kernels: tuple[KernelRow, ...], counts: Mapping[str, int], total: int
) -> Verdict:
    end = records.end
    failing = sum(counts.get(state, 0) for state in FAILING)
    missing = sum(row.missing for row in kernels)
    passed, executed = counts.get("pass", 0), sum(row.executed for row in kernels)
    failed = f"{failing} of {plural(total, 'result')} failed"
    reasons = []
    if end is None:
        recorded = f"{len(records.results)} of {plural(total, 'planned result')} recorded"
        reasons.append(f"run did not finish: {recorded}" + (f", {failing} of them failed" if failing else ""))
    elif failing:
        reasons.append(failed)
    if end is not None and missing:
        reasons.append(f"{plural(missing, 'planned result')} of {total} not recorded")
    here = records.run.here
    if end is not None and not executed and here:
        reasons.append("nothing was executed")
    if end is not None and not reasons and (end.exit or (end.exit is None and end.problems)):
        reasons.append(end.problems[0] if end.problems else f"the run ended with exit code {end.exit}")
    notes = list(origin(records))
    if records.truncated:
        notes.append("the last line of the record file is cut off and was ignored")
    told = " ".join(end.problems) if end else ""
    idle = [row.name for row in kernels if row.planned and not row.executed and row.name not in told]
    if idle and executed and here:
        notes.append(f"executed nothing: {', '.join(idle)}")
    if reasons:
        return Verdict(False, "; ".join(reasons), tuple(notes))
    shallow = Counter(r.lane for r in records.results if r.state == "pass" and r.lane not in ("", EXECUTE))
    if not here:
        lanes = ", ".join(f"{count} to lane {lane}" for lane, count in shallow.items()) or "none to any lane"
        words = [f"nothing was executed, {records.run.arch} was not here: of {plural(total, 'result')} went {lanes}"]
    else:
        words = [f"{passed} of {plural(total, 'result')} passed"]
        words += [f"{count} of them only in lane {lane}, not executed" for lane, count in shallow.items()]
    words += [f"{counts['expected']} failed as declared"] if counts.get("expected") else []
    words += [f"{counts['not-run']} not run"] if counts.get("not-run") else []
    return Verdict(True, ", ".join(words), tuple(notes), bool(executed))


def _not_run(records: Records, missing: Mapping[str, int]) -> tuple[NotRun, ...]:
    reasons: dict[str, Counter[str]] = {}
    for result in records.results:
        if result.state == "not-run":
            general = generalise(sentence(result.message, result), result)
            reason = shown(general) or NO_REASON
            reasons.setdefault(reason, Counter())[result.kernel] += 1
    if missing:
        reasons.setdefault(NO_RESULT, Counter()).update(missing)
    groups = [NotRun(reason, sum(kernels.values()), kernels) for reason, kernels in reasons.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)
