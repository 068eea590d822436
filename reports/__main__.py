"""``python -m reports --out DIR RECORDS... [--bench TIMINGS...]``: all pages of one run; prints their paths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from reports import write_bench, write_overview, write_report


def main() -> int:
    """0 when every page was made; else 1 and a line of error for each that was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--bench", nargs="*", type=Path, default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    steps: list[Callable[[], list[Path]]] = [
        *(partial(write_report, path, given.out) for path in given.records),
        *(partial(write_bench, path, given.out) for path in given.bench),
        partial(write_overview, given.records, given.out),
    ]
    failed = False
    for step in steps:
        try:
            print(*step(), sep="\n", end="\n", flush=True)
        except Exception as error:  # whatever is wrong with one page, the others are wanted
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
