"""Read a file of timings (JSON lines, one run) into frozen records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reports.fields import Fields, ReportError

SCHEMA = 1
TIMED, NOT_TIMED = "timed", "not-timed"
KINDS = {"device": "device time", "cpu": "CPU time"}
BASELINE, PYTORCH = "baseline", "pytorch"
_SMALLEST, _LARGEST = 1e-30, 1e30  # of figures; what lies beyond was never measured
_NAMED = ("model", "shape")  # parameters that name a workload


@dataclass(frozen=True)
class Timing:
    """One kernel on one case. seconds: the figure; spread: relative, how far its trials lie apart. bandwidth and rate
    per second; of_copy, of_product, of_roof: fractions of the ceilings measured beside it; of_copy_at_size: of a copy
    that moves as many bytes. Everything from ``seconds`` on is meaningless where ``state`` is not TIMED."""

    case: str
    operator: str
    variant: str
    kernel: str
    params: Mapping[str, str]
    tiers: tuple[str, ...]
    path: str | None
    verdict: str
    state: str
    reason: str
    kind: str = ""
    clock: str = ""
    clock_note: str = ""
    watched: str = ""
    remarks: tuple[str, ...] = ()
    exchanged: bool = False
    seconds: float = 0.0
    spread: float = 0.0
    bytes: int = 0
    flops: int = 0
    arithmetic: str = ""
    copy: float = 0.0
    product: float | None = None
    bandwidth: float = 0.0
    rate: float = 0.0
    intensity: float = 0.0
    bound: str = ""
    of_copy: float = 0.0
    of_copy_at_size: float = 0.0
    of_product: float | None = None
    of_roof: float = 0.0

    @property
    def timed(self) -> bool:
        return self.state == TIMED

    @property
    def workload(self) -> str:
        """The named workload, or "" for a point of a matrix."""
        return next((self.params[name] for name in _NAMED if name in self.params), "")

    @property
    def point(self) -> str:
        """The parameters that are no name: "tokens 512, topk 8, ..."."""
        return ", ".join(f"{key} {value}" for key, value in self.params.items() if key not in _NAMED)


@dataclass(frozen=True)
class BenchRun:
    """A whole file. roles: kernel -> "baseline", "pytorch" or "candidate". ended: whether the run wrote its last line.
    timings: one per case and kernel, in order of first appearance. resumed: the runs that it goes on from, the latest
    last; merged: what is known of the shards that it was joined from."""

    path: Path
    started: str
    arch: str
    device: str
    facts: Mapping[str, str]
    sizes: str
    protocol: Mapping[str, Any]
    roles: Mapping[str, str]
    timings: tuple[Timing, ...]
    ended: bool
    problems: tuple[str, ...]
    resumed: tuple[Mapping[str, Any], ...] = ()
    merged: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> tuple[Timing, ...]:
        return tuple(timing for timing in self.timings if timing.timed)

    @property
    def kind(self) -> str:
        """Kind of time of the whole file, "" when nothing was timed."""
        return next((timing.kind for timing in self.timed), "")


def read_bench(path: Path) -> BenchRun:
    """The timings in a file. Raises ReportError (file, line, what is wrong), but for a last line that was cut off."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from None
    run: Fields | None = None
    ended = False
    problems: tuple[str, ...] = ()
    found: dict[tuple[str, str], Timing] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = Fields(json.loads(line.decode("utf-8")), where)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ReportError(f"{where}: not a JSON line: {error}") from None
        kind = fields.text("type")
        if kind == "bench-run" and run is None:
            run = fields
        elif kind == "timing" and run is not None:
            timing = _timing(fields)
            found[timing.case, timing.kernel] = timing
        elif kind == "end" and run is not None:
            ended, problems = True, fields.texts("problems")
        else:
            raise ReportError(f"{where}: a line of type {kind!r:.60} does not belong here; a file of timings begins "
                              "with 'bench-run' and holds 'timing' lines ('conformance report' reads records)")
    if run is None:
        raise ReportError(f"{path}:1: no 'bench-run' line; this is no file of timings (ARCH.bench.jsonl)")
    return _run(path, run, tuple(found.values()), ended, problems)


def _run(path: Path, fields: Fields, timings: tuple[Timing, ...], ended: bool, problems: tuple[str, ...]) -> BenchRun:
    if (schema := fields.integer("schema")) != SCHEMA:
        raise ReportError(f"{fields.where}: schema {schema} is not the {SCHEMA} that this version reads")
    kinds = {timing.kind for timing in timings if timing.timed}
    if len(kinds) > 1:
        raise ReportError(f"{path}: holds {' and '.join(sorted(kinds))} time, which are never mixed")
    dirty = " + uncommitted changes" if fields.flag("dirty") else ""
    facts = {name: fields.text(name, "") for name in ("driver", "torch", "tilelang", "python", "platform", "command")}
    facts |= {"commit": (fields.text("commit", "") or "unknown") + dirty, "workers": str(fields.integer("workers", 1))}
    return BenchRun(
        path, fields.text("started", ""), fields.text("arch"), fields.text("device", ""), facts,
        fields.text("sizes", ""), _protocol(fields),
        fields.strings(fields.table("roles"), "roles"), timings, ended, problems, fields.tables("resumed"),
        fields.table("merged"),
    )


def _protocol(fields: Fields) -> Mapping[str, Any]:
    table = fields.table("protocol")
    for name, value in table.items():
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
            raise ReportError(f"{fields.where}: protocol: {name!r} must be a finite number or a string, is "
                              f"{value!r:.60}")
    return table


def _timing(fields: Fields) -> Timing:
    state = fields.text("state")
    if state not in (TIMED, NOT_TIMED):
        raise ReportError(f"{fields.where}: unknown state {state!r}; known: {TIMED}, {NOT_TIMED}")
    common: dict[str, Any] = {
        "case": fields.text("case"), "operator": fields.text("operator"), "variant": fields.text("variant", ""),
        "kernel": fields.text("kernel"), "params": fields.strings(fields.table("params"), "params"),
        "tiers": fields.texts("tiers"), "path": fields.optional("path"), "verdict": fields.text("verdict", ""),
        "state": state, "reason": fields.text("reason", ""),
    }
    if state != TIMED:
        return Timing(**common)
    figures = Fields(fields.table("figures"), f"{fields.where}: figures")
    ceilings = Fields(fields.table("ceilings"), f"{fields.where}: ceilings")
    kind = fields.text("kind")
    if kind not in KINDS:
        raise ReportError(f"{fields.where}: unknown kind of time {kind!r}; known: {', '.join(KINDS)}")
    return Timing(
        **common, kind=kind, clock=fields.text("clock", ""), clock_note=fields.text("clock_note", ""),
        watched=fields.text("watched", ""), remarks=fields.texts("remarks"), exchanged=fields.flag("exchanged"),
        seconds=_number(fields, "seconds", zero=False), spread=_number(fields, "spread"),
        bytes=_count(fields, "bytes"), flops=_count(fields, "flops"), arithmetic=fields.text("arithmetic", ""),
        copy=_number(ceilings, "copy", zero=False), product=_optional(ceilings, "product", zero=False),
        bandwidth=_number(figures, "bandwidth"), rate=_number(figures, "rate"),
        intensity=_number(figures, "intensity"), bound=figures.text("bound", ""), of_copy=_number(figures, "of_copy"),
        of_copy_at_size=_number(figures, "of_copy_at_size"), of_product=_optional(figures, "of_product"),
        of_roof=_number(figures, "of_roof"),
    )


def _number(fields: Fields, key: str, zero: bool = True) -> float:
    value = _optional(fields, key, zero)
    if value is None:
        raise ReportError(f"{fields.where}: {key!r} is missing")
    return value


def _optional(fields: Fields, key: str, zero: bool = True) -> float | None:
    """A number that a measurement can have, so that pages can calculate with it; 0 only where it may be ``zero``."""
    value = fields.number(key)
    if value is None or _SMALLEST <= value <= _LARGEST or (zero and value == 0):
        return value
    bound = "0 or more than 0" if zero else "more than 0"
    raise ReportError(f"{fields.where}: {key!r} must be a finite number, {bound}, is {value}")


def _count(fields: Fields, key: str) -> int:
    value = fields.integer(key)
    if not 0 <= value <= _LARGEST:
        raise ReportError(f"{fields.where}: {key!r} must be 0 or more and no more than {_LARGEST:g}")
    return value
