"""The pages of a run, made in a process of their own: what 100 000 results take there is not held by the controller."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.registry import ROOT

_OF_RECORDS, _OF_TIMINGS = (".html", ".md"), (".html", ".md", ".txt", ".json")


def remove_pages(directory: Path, records: Iterable[Path], timings: Iterable[Path]) -> None:
    """Away with the pages of an earlier run in the same places: beside records that are being written they would speak
    of results that are there no more, for good if this run is killed. One that cannot be removed cannot be replaced
    either, which is told when the pages are made: results are worth more than that."""
    for paths, suffixes in ((records, _OF_RECORDS), (timings, _OF_TIMINGS)):
        for path in paths:
            for suffix in suffixes:
                _remove(path.with_suffix(suffix))
    _remove(directory / "index.html")


def _remove(page: Path) -> None:
    with contextlib.suppress(OSError):
        page.unlink()


@dataclass(frozen=True)
class Made:
    """Paths of pages; by architecture in sentences what failures have in common; and whether something went wrong."""

    pages: Sequence[Path] = ()
    common: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failed: bool = False


def make_pages(directory: Path, records: Iterable[Path], timings: Iterable[Path]) -> Made:
    """Pages of record files and of timings, and an overview of several, below ``directory``. What goes wrong is told on
    standard error. The reports folder reads record files only."""
    files = [str(path.resolve()) for path in records]
    timed = [str(path.resolve()) for path in timings]
    command = [sys.executable, "-m", "reports", "--out", str(directory.resolve()), *files]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run([*command, *(["--bench", *timed] if timed else [])], cwd=ROOT, capture_output=True,
                              text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
        said, code = done.stderr.strip(), done.returncode
        told = [line.partition(" ") for line in done.stdout.splitlines()]
    except OSError as error:
        said, code, told = str(error), 1, []
    if code:
        again = f"'python -m conformance report {' '.join(files)}'" + (
            f", 'python -m conformance bench {' '.join(timed)}'" if timed else "")
        print(f"no page was written ({_last_lines(said)}); {again} tries again", file=sys.stderr)
    common: dict[str, list[str]] = {}
    for what, _, text in told:
        if what == "common":
            arch, _, sentence = text.partition(" ")
            common.setdefault(arch, []).append(sentence)
    return Made([Path(text) for what, _, text in told if what == "page"], common, code != 0)


def _last_lines(text: str) -> str:
    return "; ".join(text.splitlines()[-3:]) or "its process died"
