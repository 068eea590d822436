"""The commands over record files: pages of one run, one run out of shards, and two runs side by side.

The reports folder reads records only and is found by name, as pytest's plugin does.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.cases import options
from conformance.errors import ConformanceError
from conformance.registry import ROOT
from conformance.runs.bench_recorder import path_beside

OK, FAILED = 0, 1
DRIFT = 0.05

_REPORT = """\
Reads records (reports/ARCH.jsonl, or all that a directory holds), writes ARCH.html and ARCH.md and prints their paths;
for several record files also an overview, index.html. Exit code 1 when the records hold failures or problems, or have
no end line because the run was killed.
"""
_MERGE = """\
Joins the record files that 'pytest --shard I/N' left on several machines into one record file per architecture and its
pages, and the timings beside them, if there are any. Nothing is written when a shard is missing, doubled, unfinished,
or differs in commit, versions, device, sizes or plan. Exit code 1 when there are failures, or when the cases that every
shard repeats come out otherwise somewhere.
"""
_DIFF = """\
Holds a second run against a first, of two commits or of two architectures: new failures, lost results (without a line,
not run any more, or taken to a lower lane), fixed ones, changed levels and paths, budget fractions that moved, times,
environment. Prints tables and writes a page. Exit code 1 when there are new failures or lost results.
"""
_FLEET = """\
Runs all shards of a plan as tasks of a Ray cluster, goes on with the records of tasks that are lost, and joins
everything as 'merge' does. Without --address it starts Ray on this machine. What follows -- goes to pytest. Needs the
extra 'ray'. Exit code as 'merge'.
"""


def add_to(add: Callable[[str, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]) -> None:
    """Declare the commands with the command line's own ``add``."""
    report = add("report", "make the HTML and Markdown pages of record files again", _report, _REPORT)
    report.add_argument("records", metavar="RECORDS", type=Path, nargs="+",
                        help="record files of runs, JSON lines, or directories of them")
    report.add_argument("--out", metavar="DIR", type=Path, help="where the pages go (default: beside the first)")

    merge = add("merge", "one run from the records of all its shards", _merge, _MERGE)
    merge.add_argument("records", metavar="SHARD", type=Path, nargs="+",
                       help="record files of 'pytest --shard I/N', or directories of them")
    merge.add_argument("--out", metavar="DIR", type=Path, help="where records and pages go (default: reports)")
    merge.add_argument("--allow", metavar="NAME[,NAME]", help="facts that may differ, as device,driver")

    diff = add("diff", "two runs side by side: what failed anew, was lost, changed", _diff, _DIFF)
    diff.add_argument("first", metavar="A", type=Path, help="record file of the run to compare with, or its directory")
    diff.add_argument("second", metavar="B", type=Path, help="record file of the run in question, or its directory")
    diff.add_argument("--drift", metavar="X", type=float, default=DRIFT,
                      help=f"list budget fractions that moved by more than this (default {DRIFT:g})")
    diff.add_argument("--out", metavar="FILE", type=Path, help="where the page goes (default: diff.html beside B)")

    fleet = add("fleet", "all shards of a plan on a Ray cluster, as one run", _fleet, _FLEET)
    fleet.add_argument("--shards", metavar="N", type=int, required=True,
                       help="number of tasks; there may be more of them than machines")
    fleet.add_argument("--cpus", metavar="N", type=int, default=2,
                       help="cores of a task (default 2); a GPU comes with it where the architecture needs one")
    fleet.add_argument("--retries", metavar="N", type=int, default=3, help="how often a lost task is begun again (3)")
    fleet.add_argument("--address", metavar="ADDRESS", help="of the cluster, such as auto or ray://host:10001")
    fleet.add_argument("--checkout", metavar="DIR", type=Path, help="where this repository lies on its machines")
    fleet.add_argument("--out", metavar="DIR", type=Path, help="where records and pages go (default: reports/fleet)")
    fleet.add_argument("--allow", metavar="NAME[,NAME]", help="facts that may differ, as device,driver")
    options.add_to_argparse(fleet)
    fleet.add_argument("pytest", metavar="-- ...", nargs="*", help="more options for pytest")


def reports_folder() -> Any:
    """The ``reports`` package. Raises ConformanceError when it cannot be imported."""
    try:
        return importlib.import_module("reports")
    except ImportError as error:
        raise ConformanceError(f"pages cannot be made here: {error} (pip install jinja2)") from None


def pages_of(records: list[Path], directory: Path) -> list[Path]:
    """Write the pages of record files, and their overview when there are several. Raises ConformanceError."""
    reports = reports_folder()
    try:
        pages: list[Path] = [page for path in records for page in reports.write_report(path, directory)]
        pages += reports.write_overview(records, directory)
    except reports.ReportError as error:
        raise ConformanceError(str(error)) from None
    return pages


def record_files(place: Path) -> list[Path]:
    """The record files that a path names: itself, or every ``ARCH.jsonl`` of a directory. Raises ConformanceError for a
    directory without any."""
    if not place.is_dir():
        return [place]
    every = set(place.glob("*.jsonl"))
    found = sorted(every - {path_beside(path) for path in every})  # timings stand beside records
    if not found:
        raise ConformanceError(f"{place}: a directory without record files: ARCH.jsonl is what pytest writes there")
    return found


def record_file(place: Path) -> Path:
    """The one record file that a path names. Raises ConformanceError for a directory with none or several."""
    found = record_files(place)
    if len(found) > 1:
        raise ConformanceError(f"{place}: a directory of several record files: name one of "
                               f"{', '.join(path.name for path in found)}")
    return found[0]


def _report(args: argparse.Namespace) -> int:
    reports = reports_folder()
    files = list(dict.fromkeys(path for place in args.records for path in record_files(place)))
    try:
        read = {path: reports.read_records(path) for path in files}
    except reports.ReportError as error:
        raise ConformanceError(str(error)) from None
    seen: dict[str, Path] = {}
    for path, records in read.items():
        other = seen.setdefault(records.run.arch, path)
        if other != path:
            raise ConformanceError(f"{other} and {path} are both runs on {records.run.arch}, whose pages have one "
                                   "name: make them apart, with --out; 'python -m conformance diff' compares the two")
    for page in pages_of(files, args.out or files[0].parent):
        print(page)
    found = [f"{path}: {complaint}" for path, records in read.items() for complaint in _complaints(records)]
    for complaint in found:
        print(complaint, file=sys.stderr)
    return FAILED if found else OK


def _merge(args: argparse.Namespace) -> int:
    return _joined([path for place in args.records for path in record_files(place)], args.out, args.allow)


def _fleet(args: argparse.Namespace) -> int:
    from conformance.runs import ray_fleet

    shared = [f"{option.flag}={value}" for option in options.OPTIONS
              if (value := getattr(args, option.dest)) is not None]
    selection = options.select(lambda dest: getattr(args, dest))
    records = ray_fleet.command(args, selection, [*shared, *args.pytest])
    return _joined(records, args.out or ROOT / "reports" / "fleet", args.allow)


def _joined(records: list[Path], out: Path | None, allow: str | None) -> int:
    from conformance.runs.merge import merge

    recorders = merge(records, out, options.names_in("--allow", allow))
    for page in pages_of([recorder.path for recorder in recorders], recorders[0].path.parent):
        print(page)
    for recorder in recorders:
        if recorder.run.get("bench") and (timings := path_beside(recorder.path)).exists():
            for page in reports_folder().write_bench(timings, timings.parent):
                print(page)
    for recorder in recorders:
        failed = [f"{recorder.failing} of {recorder.done} results failed"] if recorder.failing else []
        for complaint in (*failed, *recorder.problems()):
            print(f"{recorder.path}: {complaint}", file=sys.stderr)
    return FAILED if any(recorder.failing or recorder.problems() for recorder in recorders) else OK


def _diff(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.drift) and args.drift >= 0):
        raise ConformanceError(f"--drift {args.drift:g}: give a change of the budget fraction, 0 or more, as in 0.05")
    reports = reports_folder()
    try:
        first, second = record_file(args.first), record_file(args.second)
        found = reports.compare(reports.read_records(first), reports.read_records(second), args.drift)
        target = args.out or second.parent / "diff.html"
        if target.is_dir():
            raise ConformanceError(f"--out {target}: is a directory; name a page, such as {target / 'diff.html'}")
        if any(target.exists() and target.samefile(path) for path in (first, second)):
            raise ConformanceError(f"--out {target}: is one of the record files; name a page, such as diff.html")
        page = reports.write_diff(found, target)
    except reports.ReportError as error:
        raise ConformanceError(str(error)) from None
    print(reports.tables(found), end="")
    print(page)
    return FAILED if found.worse else OK


def _complaints(records: Any) -> list[str]:
    """Why a run that left these records did not pass."""
    results, end, missing = records.results, records.end, records.missing
    failing = sum(result.failing for result in results)
    found = [f"{failing} of {len(results)} results failed"] if failing else []
    if end is None:
        found.append(f"no end line: the run was killed; {sum(missing.values())} planned results are missing")
    else:
        found += end.problems
        if end.exit and not found:
            found.append(f"the run ended with exit code {end.exit}")
    return found
