"""The commands over files of timings: their pages again, and two of them side by side."""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.commands.records import reports_folder
from conformance.errors import ConformanceError

OK, FAILED = 0, 1
_THRESHOLD = 0.05

_BENCH = """\
Reads a file of timings (reports/ARCH.bench.jsonl, written by 'pytest --conformance-bench'), makes its pages again and
prints the three-way table: candidates, baseline and PyTorch on each case. Exit code 1 when nothing was timed.
"""
_DIFF = """\
Holds the timings of a second run against those of a first. A kernel is slower when its time grew by more than the
threshold and by more than the trials of either run lie apart. Exit code 1 when something is slower, or was timed in the
first run and is not any more, or when nothing can be compared. Where there is no first file, there is no baseline yet:
that is said, and is no failure.
CPU time and device time are never compared, nor times behind different flushes of the cache.
"""


def add_to(add: Callable[[str, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]) -> None:
    """Declare the commands with the command line's own ``add``."""
    bench = add("bench", "the three-way table and the pages of a file of timings", _bench, _BENCH)
    bench.add_argument("timings", metavar="TIMINGS", type=Path, help="file of timings, JSON lines, or its directory")
    bench.add_argument("--out", metavar="DIR", type=Path, help="where the pages go (default: beside the file)")

    diff = add("bench-diff", "two runs' timings side by side: what became slower", _diff, _DIFF)
    diff.add_argument("first", metavar="A", type=Path,
                      help="file of timings to compare with, or its directory; may be absent")
    diff.add_argument("second", metavar="B", type=Path, help="file of timings in question, or its directory")
    diff.add_argument("--threshold", metavar="X", type=float, default=_THRESHOLD,
                      help=f"relative change of a time that counts (default {_THRESHOLD:g})")


def _file(place: Path) -> Path:
    """The one file of timings that a path names. Raises ConformanceError for a directory with none or several."""
    found = sorted(place.glob("*.bench.jsonl")) if place.is_dir() else [place]
    if len(found) != 1:
        raise ConformanceError(f"{place}: a directory with {len(found) or 'no'} files of timings (ARCH.bench.jsonl)"
                               + (f": name one of {', '.join(path.name for path in found)}" if found else ""))
    return found[0]


def _read(path: Path) -> Any:
    """The timings in a file. Raises ConformanceError."""
    folder = reports_folder()
    try:
        return folder.read_bench(path)
    except folder.ReportError as error:
        raise ConformanceError(str(error)) from None


def _bench(args: argparse.Namespace) -> int:
    timings, folder = _file(args.timings), reports_folder()
    run = _read(timings)
    try:
        pages = folder.write_bench(timings, args.out or timings.parent)
    except folder.ReportError as error:
        raise ConformanceError(str(error)) from None
    print(importlib.import_module("reports.bench.text").tables(run), end="")
    for page in pages:
        print(page)
    return OK if run.timed else FAILED


def _diff(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.threshold) and args.threshold >= 0):
        raise ConformanceError(f"--threshold {args.threshold:g}: give a relative change, 0 or more, as in 0.05")
    second = _read(_file(args.second))
    if not os.path.lexists(args.first):
        print(f"no baseline: {args.first} is not there; {len(second.timed)} timings in {args.second} stand "
              "for themselves")
        return OK if second.timed else FAILED
    first = _read(_file(args.first))
    if first.kind and second.kind and first.kind != second.kind:
        raise ConformanceError(f"{args.first} holds {first.kind} time and {args.second} {second.kind} time: these are "
                               "never compared")
    flushes = [run.protocol.get("flush") for run in (first, second)]
    if first.timed and second.timed and flushes[0] != flushes[1]:
        raise ConformanceError(f"{args.first} was timed behind the flush '{flushes[0]}' and {args.second} behind "
                               f"'{flushes[1]}': these are never compared; time the former again")
    diff = importlib.import_module("reports.bench.diff")
    found = diff.bench_diff(first, second, args.threshold)
    print(diff.tables(found), end="")
    return FAILED if found.worse else OK
