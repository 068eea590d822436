"""The pages of a run, made in a process of their own: what 100 000 results take there is not held by the controller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from conformance.registry import ROOT

_OF_RECORDS, _OF_TIMINGS = (".html", ".md"), (".html", ".md", ".txt", ".json")


def remove_pages(directory: Path, records: Iterable[Path], timings: Iterable[Path]) -> None:
    """Away with the pages of an earlier run in the same places: beside records that are being written they would speak
    of results that are there no more, for good if this run is killed."""
    for paths, suffixes in ((records, _OF_RECORDS), (timings, _OF_TIMINGS)):
        for path in paths:
            for suffix in suffixes:
                path.with_suffix(suffix).unlink(missing_ok=True)
    (directory / "index.html").unlink(missing_ok=True)


def make_pages(directory: Path, records: Iterable[Path], timings: Iterable[Path]) -> tuple[list[Path], bool]:
    """Pages of record files and of timings, and an overview of several, below ``directory``: their paths, and whether
    something went wrong, which is told on standard error. The reports folder reads record files only."""
    files = [str(path.resolve()) for path in records]
    timed = [str(path.resolve()) for path in timings]
    command = [sys.executable, "-m", "reports", "--out", str(directory.resolve()), *files]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run([*command, *(["--bench", *timed] if timed else [])], cwd=ROOT, capture_output=True,
                              text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
        said, code = done.stderr.strip(), done.returncode
        pages = [Path(line) for line in done.stdout.splitlines() if line]
    except OSError as error:
        said, code, pages = str(error), 1, []
    if code:
        again = f"'python -m conformance report {' '.join(files)}'" + (
            f", 'python -m conformance bench {' '.join(timed)}'" if timed else "")
        print(f"no page was written ({_last_lines(said)}); {again} tries again", file=sys.stderr)
    return pages, code != 0


def _last_lines(text: str) -> str:
    return "; ".join(text.splitlines()[-3:]) or "its process died"
