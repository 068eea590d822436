"""The kill matrix of a run on mutants: which check kills which mutant, in which tier, on which case first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.cases.rounds import CASE_SECONDS
from conformance.errors import ConformanceError
from conformance.mutants import DIFFERS, Mutant

FAILING = frozenset({"fail", "error", "crash", "timeout"})
# Every kind of failure that a kernel can be given.
CHECKS = (
    "form", "guard", "input-changed", "poison", "repeat", "nan-map", "inf-map", "exact", "bits", "budget", "published",
    "exception", "crash", "timeout",
)
# What these failures are is their own explanation.
_SELF_EVIDENT = {
    "guard": "overrun", "input-changed": "input-changed", "repeat": "not-repeatable", "exception": "exception",
    "form": "form", "crash": "crash", "timeout": "timeout",
}
FATAL = frozenset({"crash", "timeout"})  # failures that end the process
# A twin that was so quick on a case would have ended in time on any machine on which its mutant was ended.
_QUICK = CASE_SECONDS / 10


@dataclass
class Killed:
    """What the records say of one mutant or twin. checks: failures by kind and tier. causes: failures by the key of
    their diagnosis, over those that have one. cases: those that kill it, in the order of the records. passed: seconds
    of those that it passes. timeouts: results that ended by the time limit, which stand in none of these yet.
    differs_on: the first case on which it was seen to differ from its twin. seconds: of all its cases."""

    executed: int = 0
    differs_on: str = ""
    seconds: float = 0.0
    cases: list[str] = field(default_factory=list)
    first_message: str = ""
    reason: str = ""
    checks: dict[str, Counter[str]] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    passed: dict[str, float] = field(default_factory=dict)
    timeouts: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def first(self) -> str:
        return self.cases[0] if self.cases else ""

    def add(self, result: Mapping[str, Any]) -> None:
        """Count a failure."""
        if not self.cases:
            self.first_message = result["message"]
        self.cases.append(result["case"])
        self.checks.setdefault(result["kind"] or result["state"], Counter()).update(result["tiers"])
        if not self.differs_on and (result.get("details") or {}).get(DIFFERS):
            self.differs_on = result["case"]
        if cause := cause_of(result):
            self.causes[cause] += 1


def read_results(path: Path) -> Iterable[Mapping[str, Any]]:
    """The result lines of a record file. Raises ConformanceError when the run did not come to its end."""
    ended = False
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            ended = ended or record["type"] == "end"
            if record["type"] == "result":
                yield record
    if not ended:
        raise ConformanceError(f"{path} has no end line: the run on the mutants was cut short")


def collect(results: Iterable[Mapping[str, Any]], operator: str, known: Mapping[str, Mutant],
            twins: Iterable[str]) -> dict[str, Killed]:
    """Per mutant of ``known`` and twin, of one operator, what happened to it.

    A time limit shows a fault only where it is the mutant's own, or where its twin was quick on the same case in the
    same run: a loaded machine ends right kernels too. Other timeouts of mutants stay in ``timeouts``.
    """
    found = {name: Killed() for name in (*known, *twins)}
    for result in results:
        if result["kernel"] not in found or not result["case"].startswith(f"{operator}/"):
            continue
        entry = found[result["kernel"]]
        entry.seconds += result.get("seconds") or 0.0
        if result["state"] == "not-run":
            entry.reason = entry.reason or result["message"]
            continue
        entry.executed += 1
        if result["state"] == "timeout" and result["kernel"] in known:
            entry.timeouts.append(result)
        elif result["state"] in FAILING:
            entry.add(result)
        elif result["state"] == "pass":
            entry.passed[result["case"]] = result.get("seconds") or 0.0
    for name, one in known.items():
        entry, waiting, twin = found[name], found[name].timeouts, found[one.twin].passed
        entry.timeouts = []
        for result in waiting:
            if "timeout" in one.diagnosis or twin.get(result["case"], CASE_SECONDS) <= _QUICK:
                entry.add(result)
            else:
                entry.timeouts.append(result)
    return found


def cause_of(result: Mapping[str, Any]) -> str | None:
    """The key of a failure's explanation, None where none was looked for."""
    diagnosis = (result.get("details") or {}).get("diagnosis")
    return diagnosis["key"] if diagnosis else _SELF_EVIDENT.get(result["kind"] or result["state"])


@dataclass(frozen=True)
class Row:
    """One mutant in the matrix. ``failed`` of the ``executed`` cases kill it; the ``shown`` ones are all that show it,
    and those left out were not needed to kill it. ``undecided``: cases that ended by a time limit which says nothing of
    the mutant. ``differs_on``: a case on which it gives another result than its
    twin. ``diagnosed``: the explanation that most of its failures name is an expected one; None where nothing was
    diagnosed."""

    name: str
    fault: str
    wrong: str
    twin: str
    killed: bool
    undecided: int
    failed: int
    executed: int
    shown: int
    first: str
    message: str
    checks: dict[str, dict[str, int]]
    expected: tuple[str, ...]
    causes: dict[str, int]
    diagnosed: bool | None
    differs_on: str
    reason: str


@dataclass(frozen=True)
class KillMatrix:
    """All of it, as written to JSON. ``controls``: name -> (executed, failed, first case that flags it).
    ``idle``: checks that kill no mutant. ``complete``: every mutant was run on every case that shows it; otherwise
    a killed one's further cases were left out as not needed. ``seconds``: of all cases, of all processes together.
    ``elsewhere``: mutants of kernels for another kind of device."""

    operator: str
    arch: str
    tiers: tuple[str, ...]
    data: str
    seconds: float
    complete: bool
    elsewhere: tuple[str, ...]
    rows: tuple[Row, ...]
    controls: dict[str, tuple[int, int, str]]
    checks: dict[str, int]
    idle: tuple[str, ...]

    @property
    def killed(self) -> int:
        return sum(row.killed for row in self.rows)

    @property
    def undecided(self) -> list[str]:
        """Mutants of which nothing is known but that they, or the machine, were too slow."""
        return [row.name for row in self.rows if row.undecided and not row.killed]

    @property
    def flagged(self) -> list[str]:
        """Controls that failed somewhere, or ran nowhere."""
        return [name for name, (executed, failed, _) in self.controls.items() if failed or not executed]

    @property
    def sound(self) -> bool:
        applied = all(row.differs_on for row in self.rows)
        return self.killed == len(self.rows) and not self.flagged and applied and bool(self.rows)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"killed": self.killed, "sound": self.sound}

    @property
    def executed(self) -> int:
        return sum(row.executed for row in self.rows)

    @property
    def not_needed(self) -> int:
        """Cases that would show a mutant and were left out, as it was killed without them."""
        return 0 if self.complete else sum(row.shown - row.executed for row in self.rows if row.killed)


def matrix_of(found: Mapping[str, Killed], mutants: Mapping[str, Mutant], controls: Iterable[str],
              shown: Mapping[str, int], **facts: Any) -> KillMatrix:
    """Join the records with what is known of each mutant. shown: the number of cases that show it. ``facts``:
    operator, arch, tiers, data, complete, elsewhere."""
    rows = tuple(_row(found[name], known, shown[name], found[known.twin]) for name, known in mutants.items())
    totals = Counter(check for row in rows for check in row.checks)
    checks = {check: totals[check] for check in (*CHECKS, *sorted(set(totals) - set(CHECKS)))}
    judged = {name: (found[name].executed, len(found[name].cases), found[name].first) for name in controls}
    idle = tuple(check for check, count in checks.items() if not count)
    seconds = round(sum(entry.seconds for entry in found.values()), 1)
    return KillMatrix(rows=rows, controls=judged, checks=checks, idle=idle, seconds=seconds, **facts)


def _row(entry: Killed, known: Mutant, shown: int, twin: Killed) -> Row:
    differs_on = entry.differs_on
    if entry.checks and set(entry.checks) <= FATAL:  # not to be repeated, and no more is to be shown: its twin passes
        differs_on = next((case for case in entry.cases if case in twin.passed), "")
    causes = dict(entry.causes.most_common())
    diagnosed = next(iter(causes)) in known.diagnosis if causes else None
    checks = {kind: dict(tiers) for kind, tiers in entry.checks.items()}
    return Row(
        known.name, known.fault, known.wrong, known.twin, bool(entry.cases), len(entry.timeouts), len(entry.cases),
        entry.executed, shown, entry.first, entry.first_message, checks, known.diagnosis, causes, diagnosed, differs_on,
        "" if entry.executed else entry.reason,
    )
