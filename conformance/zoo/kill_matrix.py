"""The kill matrix of a run on mutants: which check kills which mutant, in which tier, on which case first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.zoo.mutants import Mutant

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


@dataclass
class Killed:
    """What the records say of one mutant. checks: failures by kind and tier. causes: failures by the key of their
    diagnosis, over those that have one. cases: those that kill it, in the order of the records."""

    executed: int = 0
    cases: list[str] = field(default_factory=list)
    first_message: str = ""
    reason: str = ""
    checks: dict[str, Counter[str]] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def first(self) -> str:
        return self.cases[0] if self.cases else ""


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


def collect(results: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Killed]:
    """Per kernel of ``names`` what happened to it."""
    found = {name: Killed() for name in names}
    for result in results:
        if result["kernel"] not in found:
            continue
        entry = found[result["kernel"]]
        if result["state"] == "not-run":
            entry.reason = entry.reason or result["message"]
            continue
        entry.executed += 1
        if result["state"] not in FAILING:
            continue
        if not entry.cases:
            entry.first_message = result["message"]
        entry.cases.append(result["case"])
        by_tier = entry.checks.setdefault(result["kind"] or result["state"], Counter())
        by_tier.update(result["tiers"])
        cause = cause_of(result)
        if cause:
            entry.causes[cause] += 1
    return found


def cause_of(result: Mapping[str, Any]) -> str | None:
    """The key of a failure's explanation, None where none was looked for."""
    diagnosis = (result.get("details") or {}).get("diagnosis")
    return diagnosis["key"] if diagnosis else _SELF_EVIDENT.get(result["kind"] or result["state"])


@dataclass(frozen=True)
class Row:
    """One mutant in the matrix. ``differs_on``: a case on which it gives another result than its twin. ``diagnosed``:
    the explanation that most of its failures name is an expected one; None where nothing was diagnosed."""

    name: str
    fault: str
    wrong: str
    twin: str
    killed: bool
    failed: int
    executed: int
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
    ``idle``: checks that kill no mutant."""

    operator: str
    arch: str
    tiers: tuple[str, ...]
    data: str
    seconds: float
    rows: tuple[Row, ...]
    controls: dict[str, tuple[int, int, str]]
    checks: dict[str, int]
    idle: tuple[str, ...]

    @property
    def killed(self) -> int:
        return sum(row.killed for row in self.rows)

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


def matrix_of(found: Mapping[str, Killed], mutants: Mapping[str, Mutant], controls: Iterable[str],
              differs_on: Mapping[str, str], **facts: Any) -> KillMatrix:
    """Join the records with what is known of each mutant. ``facts``: operator, arch, tiers, data, seconds."""
    rows = tuple(_row(found[name], known, differs_on.get(name, "")) for name, known in mutants.items())
    totals = Counter(check for row in rows for check in row.checks)
    checks = {check: totals[check] for check in (*CHECKS, *sorted(set(totals) - set(CHECKS)))}
    judged = {name: (found[name].executed, len(found[name].cases), found[name].first) for name in controls}
    idle = tuple(check for check, count in checks.items() if not count)
    return KillMatrix(rows=rows, controls=judged, checks=checks, idle=idle, **facts)


def _row(entry: Killed, known: Mutant, differs_on: str) -> Row:
    causes = dict(entry.causes.most_common())
    diagnosed = next(iter(causes)) in known.diagnosis if causes else None
    return Row(
        known.name, known.fault, known.wrong, known.twin, bool(entry.cases), len(entry.cases), entry.executed,
        entry.first, entry.first_message, {kind: dict(tiers) for kind, tiers in entry.checks.items()},
        known.diagnosis, causes, diagnosed, differs_on, "" if entry.executed else entry.reason,
    )
