"""Read a record file (JSON lines, one run) into frozen records.

Line 1 describes the run, then comes one line per (case, kernel), and last an ``end`` line. A killed run has
no ``end`` and may stop in the middle of a line; both are read and marked, anything else malformed is
an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.fields import Fields, ReportError

SCHEMA = 1
STATES = ("pass", "expected", "fail", "error", "crash", "timeout", "not-run")
FAILING = frozenset({"fail", "error", "crash", "timeout"})
# Kinds of failure in which a case did something else than the architecture's rules expect; shown first.
CONTRADICTIONS = ("silent-fallback", "unexpected-native", "wrong-fallback", "unexpected-pass", "other-failure",
                  "path-unknown")
LEVELS = ("bit-exact", "within-budget", "published")  # best first


@dataclass(frozen=True)
class Kernel:
    """What the run says of an implementation under test; ``promise`` is one of LEVELS or empty."""

    name: str
    operator: str
    promise: str
    module: str
    about: str


@dataclass(frozen=True)
class Run:
    """The first line: what ran, where, and by which rules. Absent facts are None or empty."""

    started: str
    command: str
    arch: str
    device: str
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES, where it was set
    driver: str | None
    python: str
    platform: str
    torch: str
    tilelang: str | None
    compiler: str | None
    commit: str | None
    dirty: bool
    operators: tuple[str, ...]
    kernels: Mapping[str, Kernel]
    tiers: tuple[str, ...]
    sizes: str
    data: str
    workers: int
    planned: Mapping[str, int]  # results expected per kernel
    tier_counts: Mapping[str, int]  # cases per tier
    policies: Mapping[str, Mapping[str, str]]  # operator -> name of the special value -> rule
    tolerances: Mapping[str, Mapping[str, float]]  # operator -> dtype -> atol = rtol
    budget: Mapping[str, str]  # operator -> formula
    here: bool  # whether the architecture was: on one that was not, nothing can have been executed
    facts: Mapping[str, Any]  # what the architecture's table says: name -> value and source
    probe: Mapping[str, Any]  # what the device said: fact -> table's and device's value
    rules: tuple[Mapping[str, Any], ...]  # expectations that differ from "native", each with the cases it governs
    resumed: tuple[Mapping[str, Any], ...] = ()  # the runs whose results these go on from, the latest last
    shard: Mapping[str, Any] | None = None  # which part of a plan this is: index, count, whole
    merged: Mapping[str, Any] | None = None  # the shards that were joined: files, identity, differs
    bench: bool = False  # whether its cases were timed, in a file beside it


@dataclass(frozen=True, slots=True)
class Result:
    """One (case, kernel). ``level`` is the level reached, None when nothing was compared; ``seconds`` is wall
    time; ``wrong`` counts elements out of ``elements``; ``budget_fraction`` is the largest error / budget."""

    case: str
    operator: str
    variant: str
    kernel: str
    family: str
    tiers: tuple[str, ...]
    params: Mapping[str, str]
    state: str
    promised: str | None
    level: str | None
    kind: str | None
    message: str
    budget_fraction: float | None
    max_error: float | None
    wrong: int
    elements: int
    first: Mapping[str, Any] | None
    path: str | None
    lane: str
    stopped: str  # why no further lane was reached
    expected: Mapping[str, Any] | None  # the rule of expectation, None for the default
    resources: Mapping[str, Any] | None  # what the generated code uses
    seconds: float | None
    worker: str | None
    rerun: str
    details: Mapping[str, Any] | None
    trace: str | None

    @property
    def failing(self) -> bool:
        return self.state in FAILING


@dataclass(frozen=True)
class Summary:
    """The ``end`` line: the run's own account. ``exit`` is None when the line does not state it."""

    finished: str
    seconds: float | None
    counts: Mapping[str, int]
    problems: tuple[str, ...]
    exit: int | None


@dataclass(frozen=True)
class Records:
    """A whole file. ``results`` hold one entry per (case, kernel), in order of first appearance; ``replaced``
    counts lines that a later one replaced; ``truncated`` says that the last line was cut off."""

    path: Path
    run: Run
    results: tuple[Result, ...]
    end: Summary | None
    truncated: bool
    replaced: int

    @property
    def missing(self) -> dict[str, int]:
        """Planned results per kernel that have no line."""
        seen: dict[str, int] = {}
        for result in self.results:
            seen[result.kernel] = seen.get(result.kernel, 0) + 1
        gaps = {name: count - seen.get(name, 0) for name, count in self.run.planned.items()}
        return {name: gap for name, gap in gaps.items() if gap > 0}


def read_records(path: Path) -> Records:
    """The records of one file. Raises ReportError (file, line, what is wrong) except on a cut-off end."""
    run: Run | None = None
    end: Summary | None = None
    found: dict[tuple[str, str], Result] = {}
    truncated, replaced = False, 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):  # the writer was killed here
                truncated = True
                break
            raise ReportError(f"{where}: not a JSON line: {error}") from None
        fields = Fields(value, where)
        kind = fields.text("type")
        if kind == "bench-run":
            raise ReportError(f"{where}: this is a file of timings, whose pages 'conformance bench' makes")
        if (kind == "run") != (run is None):
            raise ReportError(
                f"{where}: {_ORDER[run is None]}; a record file holds one run, described by its first line"
            )
        if kind == "run":
            run = _run(fields)
        elif kind == "result":
            result = _result(fields)
            key = (result.case, result.kernel)
            replaced += key in found
            found[key] = result
        elif kind == "end":
            end = _end(fields)
        else:
            raise ReportError(f"{where}: unknown type {kind!r:.60}; known: run, result, end")
    if run is None:
        raise ReportError(
            f"{path}:1: no complete 'run' line; the run was killed before it began, or this is no record file"
        )
    return Records(path, run, tuple(found.values()), end, truncated, replaced)


def _lines(path: Path) -> Iterator[bytes]:
    """One at a time: 100 000 results are 90 MB."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from None


_ORDER = {True: "a line stands before the 'run' line", False: "a second 'run' line"}


def _run(fields: Fields) -> Run:
    schema = fields.integer("schema")
    if schema != SCHEMA:
        raise ReportError(f"{fields.where}: schema {schema} is not the {SCHEMA} that this version reads")
    kernels = {
        name: Fields(value, f"{fields.where}: kernels.{name}")
        for name, value in fields.table("kernels").items()
    }
    return Run(
        started=fields.text("started", ""),
        command=fields.text("command", ""),
        arch=fields.text("arch"),
        device=fields.text("device", ""),
        visible_devices=fields.optional("visible_devices"),
        driver=fields.optional("driver"),
        python=fields.text("python", ""),
        platform=fields.text("platform", ""),
        torch=fields.text("torch", ""),
        tilelang=fields.optional("tilelang"),
        compiler=fields.optional("compiler"),
        commit=fields.optional("commit"),
        dirty=fields.flag("dirty"),
        operators=fields.texts("operators"),
        kernels={
            name: Kernel(
                name, k.text("operator", ""), k.text("promise", ""), k.text("module", ""), k.text("about", "")
            )
            for name, k in kernels.items()
        },
        tiers=fields.texts("tiers"),
        sizes=fields.text("sizes", ""),
        data=fields.text("data", ""),
        workers=fields.integer("workers", 1),
        planned=fields.counts("planned"),
        tier_counts=fields.counts("tier_counts"),
        policies={
            op: fields.strings(rules, f"policies.{op}") for op, rules in fields.table("policies").items()
        },
        tolerances={
            op: fields.numbers(by, f"tolerances.{op}") for op, by in fields.table("tolerances").items()
        },
        budget=fields.strings(fields.table("budget"), "budget"),
        here=fields.flag("here", True),
        facts=_facts(fields, "facts"),
        probe=_facts(fields, "probe"),
        rules=_rules(fields),
        resumed=fields.tables("resumed"),
        shard=fields.table("shard") or None,
        merged=fields.table("merged") or None,
        bench=fields.flag("bench"),
    )


def _rules(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    found = fields.tables("rules")
    for number, rule in enumerate(found):
        Fields(rule, f"{fields.where}: rules.{number}").integer("cases", 0)
    return found


def _facts(fields: Fields, key: str) -> Mapping[str, Any]:
    found = fields.table(key)
    for name, fact in found.items():
        Fields(fact, f"{fields.where}: {key}.{name}")
    return found


def _result(fields: Fields) -> Result:
    state = fields.text("state")
    if state not in STATES:
        raise ReportError(f"{fields.where}: unknown state {state!r:.60}; known: {', '.join(STATES)}")
    case = fields.text("case")
    return Result(
        case=case,
        operator=fields.text("operator", case.partition("/")[0]),
        variant=fields.text("variant", ""),
        kernel=fields.text("kernel"),
        family=fields.text("family", ""),
        tiers=fields.texts("tiers"),
        params=fields.strings(fields.table("params"), "params"),
        state=state,
        promised=fields.optional("promised"),
        level=fields.optional("level"),
        kind=fields.optional("kind"),
        message=fields.text("message", ""),
        budget_fraction=fields.number("budget_fraction"),
        max_error=fields.number("max_error"),
        wrong=fields.integer("wrong", 0),
        elements=fields.integer("elements", 0),
        first=fields.table("first") or None,
        path=fields.optional("path"),
        lane=fields.text("lane", ""),
        stopped=fields.text("stopped", ""),
        expected=fields.table("expected") or None,
        resources=fields.table("resources") or None,
        seconds=fields.number("seconds"),
        worker=fields.optional("worker"),
        rerun=fields.text("rerun", ""),
        details=fields.table("details") or None,
        trace=fields.optional("trace"),
    )


def _end(fields: Fields) -> Summary:
    return Summary(
        finished=fields.text("finished", ""),
        seconds=fields.number("seconds"),
        counts=fields.counts("counts"),
        problems=fields.texts("problems"),
        exit=fields.integer("exit", None),
    )
