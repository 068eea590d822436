"""The file of timings, beside the records: JSON lines, written by the controlling process, flushed per case."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.bench.record import SCHEMA, TIMED, spelled, timing_line
from conformance.errors import ConformanceError
from conformance.runs.recorder import lock, now

# What the first line shares with that of the records: what one must know to believe or repeat a figure
_IDENTITY = ("arch", "device", "visible_devices", "driver", "python", "platform", "torch", "tilelang", "compiler",
             "commit", "dirty", "changes", "command", "sizes", "data", "tiers", "operators", "kernels", "workers",
             "resumed", "merged")


def path_beside(records: Path) -> Path:
    """``ARCH.bench.jsonl`` beside ``ARCH.jsonl``."""
    return records.with_name(f"{records.stem}.bench{records.suffix}")


class BenchRecorder:
    """Writes the timings of one architecture. ``carried``: lines of an earlier run that belong to this one, maybe from
    the very file, which is replaced when all of them are in the new one. Raises ConformanceError when the file cannot
    be written."""

    def __init__(self, path: Path, run: Mapping[str, Any], protocol: Mapping[str, Any], roles: Mapping[str, str],
                 carried: Iterable[bytes] = ()) -> None:
        self.path = path
        self.states: Counter[str] = Counter()
        self._lost = ""
        part = path.with_name(f".{path.name}.part")
        try:
            self._held = path.open("ab", buffering=0)
            lock(self._held.fileno(), path)
            self._file = part.open("ab", buffering=0)
            lock(self._file.fileno(), part)
            self._file.truncate(0)
        except OSError as error:
            raise ConformanceError(f"cannot write timings to {path}: {error.strerror}") from None
        identity = {name: run[name] for name in _IDENTITY if name in run}
        self._write({"type": "bench-run", "schema": SCHEMA, "started": now(), **identity, "protocol": dict(protocol),
                     "roles": dict(roles)})
        for line in carried:
            self.carry(json.loads(line))
        if self._lost:
            part.unlink()
            raise ConformanceError(f"cannot write timings to {path}: {self._lost}; what it held is untouched")
        part.replace(path)

    def add(self, result: Mapping[str, Any], timing: Mapping[str, Any] | None) -> None:
        """Write the timing of a result, or why it has none."""
        self.carry(timing_line(result, timing))

    def carry(self, line: Mapping[str, Any]) -> None:
        """Write a timing as it is."""
        self.states[line["state"]] += 1
        self._write(line)

    @property
    def counts(self) -> str:
        """"12 timed, 3 not-timed"."""
        return ", ".join(f"{count} {state}" for state, count in sorted(self.states.items(), reverse=True)) or "none"

    def problems(self) -> list[str]:
        """What makes a run with timings fail, beside its results."""
        found = [] if self.states[TIMED] or not self.states else ["--conformance-bench: no case was timed"]
        return [*found, *([f"timings are incomplete: {self.path}: {self._lost}"] if self._lost else [])]

    def close(self) -> None:
        """Write the end line."""
        self._write({"type": "end", "finished": now(), "counts": dict(self.states), "problems": self.problems()})
        self._file.close()
        self._held.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        data = spelled(line) + b"\n"
        try:
            if self._file.write(data) != len(data):
                self._lost = "a line was written in part"
        except OSError as error:
            self._lost = error.strerror or str(error)
