"""The primary record of a run: JSON lines, written by the controlling process only and flushed per result.

The first line says what was planned and where, then comes one line per result, then an end line. A run that was
killed has no end line; everything up to then is there. Every report is derived from this file.
"""

from __future__ import annotations

import datetime
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from conformance.errors import ConformanceError

SCHEMA = 1


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Recorder:
    """Writes one architecture's record file and keeps the counts that the summary needs."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self.run = run
        self.started = time.monotonic()
        self.states: Counter[str] = Counter()
        self.by_kernel: dict[str, Counter[str]] = {name: Counter() for name in run["planned"]}
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.write_error: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConformanceError(f"cannot write records to {path}: {error.strerror}") from None
        self._write({"type": "run", "schema": SCHEMA, "started": _now(), **run})

    def add(self, result: Mapping[str, Any]) -> None:
        """Write one result line and count it."""
        self.states[result["state"]] += 1
        self.by_kernel.setdefault(result["kernel"], Counter())[result["state"]] += 1
        if result["state"] == "not-run":
            self.reasons[result["kernel"], result["message"]] += 1
        self._write(result)

    @property
    def done(self) -> int:
        return sum(self.states.values())

    @property
    def planned(self) -> int:
        return sum(self.run["planned"].values())

    def problems(self) -> list[str]:
        """What makes the whole run untrustworthy, beside single failures."""
        found: list[str] = []
        for kernel, planned in self.run["planned"].items():
            states = self.by_kernel.get(kernel, Counter())
            missing = planned - sum(states.values())
            if planned and sum(states.values()) == states["not-run"]:
                why = "; ".join(sorted({reason for (of, reason) in self.reasons if of == kernel})[:3])
                found.append(f"{kernel} executed nothing" + (f": {why}" if why else ""))
            elif missing > 0:
                found.append(f"{kernel}: {missing} of {planned} planned cases have no result")
        if not self.run["planned"]:
            found.append("no case was planned")
        if self.write_error:
            found.append(self.write_error)
        return found

    def close(self, failed: bool) -> None:
        """Write the end line."""
        problems = self.problems()
        self._write({"type": "end", "finished": _now(), "seconds": round(time.monotonic() - self.started, 2),
                     "counts": dict(self.states), "problems": problems, "exit": int(failed or bool(problems))})
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:  # disk full: the run goes on, and says at its end that records are missing
            self.write_error = f"records are incomplete: {self.path}: {error.strerror}"


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
