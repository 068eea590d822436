"""Record files and files of timings of earlier runs as they stand, line by line: for what goes on from them or joins
them.

The pages read records into typed ones (``reports``); here a result stays the bytes that were written, so that it is
handed on unchanged and 100 000 of them stay small.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.bench.record import TIMED
from conformance.errors import ConformanceError

SCHEMA = 1
_MOST = 2.0**63  # seconds
_LONGEST = 40  # of what is shown of a wrong line


@dataclass(frozen=True)
class Form:
    """What a kind of file is called, and the types of its first line and of those that it is there for."""

    name: str
    first: str
    line: str


RECORDS = Form("record file", "run", "result")
TIMINGS = Form("file of timings", "bench-run", "timing")
_FIRST: tuple[tuple[str, ...], dict[str, Any]] = (
    ("arch",), {"arch": str, "planned": dict, "shard": dict, "resumed": list, "workers": int, "roles": dict})
_KINDS: dict[str, Any] = {"case": str, "kernel": str, "state": str, "lane": str, "message": str,
                          "seconds": (int, float), "spread": (int, float), "expected": dict, "details": dict}
# Type of a line -> what it must have, and the types of what is read here of it
_MEMBERS = {"run": _FIRST, "bench-run": _FIRST, "result": (("case", "kernel", "state", "lane", "message"), _KINDS),
            "timing": (("case", "kernel", "state"), _KINDS),
            "end": ((), {"seconds": (int, float), "notes": list, "problems": list})}


@dataclass(frozen=True)
class Earlier:
    """One file. ``lines``: the last whole line of each result, or timing, by `key`. ``end``: None when the run was
    killed. ``truncated``: the last line was cut off, and is not among them."""

    path: Path
    run: Mapping[str, Any]
    lines: Mapping[str, bytes]
    end: Mapping[str, Any] | None
    truncated: bool

    @property
    def arch(self) -> str:
        return str(self.run["arch"])

    def results(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in self.lines.values())


def _wrong(line: Any, form: Form) -> str:
    """What keeps a JSON value from being a line of the file, as far as it is read here; empty for nothing."""
    if not isinstance(line, dict) or not isinstance(line.get("type"), str):
        return f"it must be an object with a 'type', is {_shown(line)}"
    needed, types = _MEMBERS.get(line["type"], ((), {}))
    figures = ("seconds", "spread") if line["type"] == TIMINGS.line and line.get("state") == TIMED else ()
    for name in (*needed, *figures):
        if line.get(name) is None:
            return f"{name!r} is missing"
    for name, kind in types.items():
        if line.get(name) is not None and not isinstance(line[name], kind):
            return f"{name!r} is {_shown(line[name])}, of a wrong type"
        if kind == (int, float) and not abs(line.get(name) or 0) < _MOST:
            return f"{name!r} is {_shown(line[name])}, no number of seconds"
    counts = line.get("planned") or {}
    if not all(type(count) is int for count in counts.values()):
        return f"'planned' must be numbers of results, is {_shown(counts)}"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def key(case: str, kernel: str) -> str:
    """What a result is known by within one architecture."""
    return f"{case} on {kernel}"


def read_earlier(path: Path, form: Form = RECORDS) -> Earlier:
    """Read one file. Raises ConformanceError (file, line, what is wrong), except on a cut-off last line."""
    try:
        content = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be read: {error.strerror or error}") from None
    run: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    lines: dict[str, bytes] = {}
    truncated = False
    for number, line in enumerate(content, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(content):  # no newline after it: the writer was killed here
                truncated = True
                break
            raise ConformanceError(f"{path}:{number}: no line of a {form.name}: {error}") from None
        if isinstance(value, dict) and value.get("type") == form.first and value.get("schema") != SCHEMA:
            raise ConformanceError(f"{path}:{number}: schema {_shown(value.get('schema'))} is not the {SCHEMA} that "
                                   "this version reads")
        if wrong := _wrong(value, form):
            raise ConformanceError(f"{path}:{number}: no line of a {form.name}: {wrong}")
        kind = value["type"]
        if kind == form.line:
            lines[key(value["case"], value["kernel"])] = line
        elif kind == form.first:
            run = value
        elif kind == "end":
            end = value
    if run is None:
        raise ConformanceError(f"{path}: no '{form.first}' line: no {form.name}, or killed at its "
                               "very start")
    return Earlier(path, run, lines, end, truncated)


def earlier_runs(flag: str, place: Path, archs: Iterable[str]) -> dict[str, Earlier]:
    """The runs in a record file, or in a directory's ``ARCH.jsonl``, by architecture.

    Raises ConformanceError for a file of another architecture, a file where there are several, and a directory that
    has none of them.
    """
    names = list(archs)
    if place.is_dir():
        found = {name: read_earlier(place / f"{name}.jsonl") for name in names if (place / f"{name}.jsonl").exists()}
        for name, earlier in found.items():
            if earlier.arch != name:
                raise ConformanceError(f"{flag} {earlier.path}: holds results of {earlier.arch}, not of {name}")
        if not found:
            raise ConformanceError(f"{flag} {place}: no record file there is called {' or '.join(names)}.jsonl")
        return found
    earlier = read_earlier(place)
    if earlier.arch not in names:
        raise ConformanceError(
            f"{flag} {place}: holds results of {earlier.arch}, and this run is on {', '.join(names)}; "
            f"give --arch {earlier.arch}, or the records of this one"
        )
    if len(names) > 1:
        raise ConformanceError(f"{flag} {place}: this run is on {', '.join(names)}; give the directory of the records")
    return {earlier.arch: earlier}
