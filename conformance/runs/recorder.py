"""The primary record of a run: JSON lines, written by the controlling process only and flushed per result.

The first line says what was planned and where, then comes one line per result, then an end line. A run that was
killed has no end line; everything up to then is there. Every report is derived from this file.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.result import NOT_LOOKED_FOR

SCHEMA = 1
_TOLD = ("form", "exception")  # kinds of failure whose message is the cause
_LAUNCH = re.compile(r"^[^:]{1,80}\): ")
_LONGEST = 200  # characters of such a message


def now() -> str:
    """The time in UTC, as it stands in every file."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _cause(result: Mapping[str, Any]) -> str:
    """The sentence that a diagnosis found for a failure, or that it found none; `NOT_LOOKED_FOR` where others of the
    kernel were diagnosed in its stead; of a form or an exception, which needs none, the message; else ""."""
    if result.get("kind") in _TOLD:
        text = str(result["message"]).partition(f" on {result['kernel']}: ")[2].partition("\n")[0]
        return _LAUNCH.sub("", text)[:_LONGEST]
    details = result.get("details") or {}
    found = details.get("diagnosis")
    if result["state"] != "fail" or not found:
        return NOT_LOOKED_FOR if details.get("cause") == NOT_LOOKED_FOR else ""
    return str(found["sentence"]) if found.get("explained") else "no known fault explains it"


class Recorder:
    """Writes one architecture's record file and keeps the counts that the summary needs.

    ``carried`` are result lines of an earlier run that belong to this one. Raises ConformanceError when the file
    cannot be written, or when another run is writing it.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], carried: Iterable[bytes] = ()) -> None:
        self.path = path
        self.run = run
        self.started = time.monotonic()
        self.states: Counter[str] = Counter()
        self.by_kernel: dict[str, Counter[str]] = {name: Counter() for name in run["planned"]}
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.causes: Counter[tuple[str, str]] = Counter()  # of the failures that were diagnosed
        self._counted: dict[bytes, tuple[str, str, str]] = {}  # by digest: of 100 000 results nothing else is kept
        self._alike: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        self._lanes: Counter[tuple[str, str, str]] = Counter()  # kernel, state, lane
        self._size = 0  # bytes of whole lines in the file
        self._lost = 0
        self._error = ""
        self._notes: list[str] = []
        lines = list(carried)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._held = path.open("ab", buffering=0)
            lock(self._file.fileno(), path)
            if lines:  # they may be this very file's: it is replaced when all of them are in the new one
                part = path.with_name(f".{path.name}.part")
                self._file = part.open("ab", buffering=0)
                lock(self._file.fileno(), part)
            self._file.truncate(0)
        except OSError as error:
            raise ConformanceError(f"cannot write records to {path}: {error.strerror}") from None
        self._write({"type": "run", "schema": SCHEMA, "started": now(), **run})
        for line in lines:
            self.add(json.loads(line))
        self.carried = len(lines)
        if lines and self._lost:
            part.unlink()
            raise ConformanceError(f"cannot write records to {path}: {self._error}; the earlier ones are untouched")
        if lines:
            part.replace(path)

    def add(self, result: Mapping[str, Any]) -> None:
        """Write one result line and count it; a later result of the same case and kernel replaces the earlier."""
        kernel, state = result["kernel"], result["state"]
        name = f"{result['case']} on {kernel}".encode("utf-8", "backslashreplace")
        key = hashlib.blake2b(name, digest_size=12).digest()
        counted = state, result["message"] if state == "not-run" else _cause(result), result["lane"]
        counted = self._alike.setdefault(counted, counted)
        if key in self._counted:
            self._count(kernel, *self._counted[key], -1)
        self._counted[key] = counted
        self._count(kernel, *counted, 1)
        self._write(result)

    def counts_of(self, kernel: str) -> list[str]:
        """A kernel's results in words, as "3 fail": by state, and by lane where they were not executed: no pass."""
        not_run, found = self.by_kernel[kernel]["not-run"], []
        for (name, state, lane), count in sorted(self._lanes.items()):
            below = lane not in ("", "execute")
            word = f"reached lane {lane} (not executed)" if state == "pass" else f"{state} in lane {lane}"
            found += [f"{count} {word if below else state}"] if name == kernel and count else []
        return [*found, *([f"{not_run} not-run"] if not_run else [])]

    def _count(self, kernel: str, state: str, why: str, lane: str, by: int) -> None:
        self.states[state] += by
        self.by_kernel.setdefault(kernel, Counter())[state] += by
        if state == "not-run":
            self.reasons[kernel, why] += by
            return
        self._lanes[kernel, state, lane] += by
        if why:
            self.causes[kernel, why] += by

    def note(self, problem: str) -> None:
        """Something beside single results that makes the run fail."""
        if problem not in self._notes:
            self._notes.append(problem)

    @property
    def done(self) -> int:
        return sum(self.states.values())

    @property
    def planned(self) -> int:
        return sum(self.run["planned"].values())

    def problems(self) -> list[str]:
        """What makes the whole run untrustworthy, beside single failures."""
        found = list(self._notes)
        for kernel, planned in self.run["planned"].items():
            states = self.by_kernel.get(kernel, Counter())
            missing = planned - sum(states.values())
            # what a kernel executes is a question to all shards together
            judged = planned and self.run.get("here", True) and not self.run.get("shard")
            if judged and sum(states.values()) == states["not-run"]:
                reasons = sorted(reason for (of, reason), count in self.reasons.items() if of == kernel and count)
                why = "; ".join(reasons[:3])
                found.append(f"{kernel} executed nothing" + (f": {why}" if why else ""))
            elif missing > 0:
                found.append(f"{kernel}: {missing} of {planned} planned cases have no result")
        if not self.run["planned"]:
            found.append("no case was planned")
        if self._lost:
            found.append(f"records are incomplete: {self._lost} lines were not written to {self.path}: {self._error}")
        return found

    @property
    def failing(self) -> int:
        """Results that make a run fail."""
        return sum(self.states[state] for state in ("fail", "error", "crash", "timeout"))

    def close(self, failed: bool, **other: Any) -> None:
        """Write the end line; ``other`` replaces members of it."""
        problems = self.problems()
        self._write({"type": "end", "finished": now(), "seconds": round(time.monotonic() - self.started, 2),
                     "counts": dict(self.states), "problems": problems, "notes": self._notes,
                     "exit": int(failed or bool(problems)), **other})
        self._file.close()
        self._held.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a whole line or nothing. With the disk full the run goes on, and says so at its end."""
        data = memoryview((json.dumps(line, separators=(",", ":")) + "\n").encode())
        size = len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._lost += 1
            self._error = error.strerror or str(error)
            with contextlib.suppress(OSError):  # no half line before the next one
                self._file.truncate(self._size)
        else:
            self._size += size


def lock(descriptor: int, path: Path, option: str = "--report-dir") -> None:
    """Lock a file until its process ends, where the file system can lock. Raises ConformanceError, which names the
    ``option`` that makes another run write elsewhere."""
    try:
        with contextlib.suppress(PermissionError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConformanceError(f"another run is writing {path}; wait for its end, or give {option}=DIR") from None


def run_line(
    identity: Mapping[str, Any], nodes: Sequence[Any], kernels: Mapping[str, Mapping[str, Any]], **facts: Any
) -> dict[str, Any]:
    """The first line's content: identity, and the planned cases counted by kernel and by tier.

    ``nodes`` are planned (case, kernel name) pairs.
    """
    planned = Counter(kernel for _, kernel in nodes)
    cases = {case.id: case for case, _ in nodes}
    tiers = Counter(tier for case in cases.values() for tier in case.tiers)
    return {**identity, "kernels": dict(kernels), "planned": dict(planned), "cases": len(cases),
            "tier_counts": dict(tiers), **facts}
