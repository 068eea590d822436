"""``python -m reports --out DIR RECORDS... [--bench TIMINGS...]``: all pages of one run.

Prints "page PATH" for each, and "common ARCH KERNEL, KIND: ..." for what failures have in common.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from reports import failures, read_records, write_bench, write_overview
from reports.write import write_pages


def main() -> int:
    """0 when every page was made; else 1 and a line of error for each that was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--bench", nargs="*", type=Path, default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    steps: list[Callable[[], Iterable[str]]] = [
        *(partial(_of_run, path, given.out) for path in given.records),
        *(partial(_pages, partial(write_bench, path, given.out)) for path in given.bench),
        partial(_pages, partial(write_overview, given.records, given.out)),
    ]
    failed = False
    for step in steps:
        try:
            for line in step():
                print(line, flush=True)
        except Exception as error:  # whatever is wrong with one page, the others are wanted
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def _pages(write: Callable[[], list[Path]]) -> Iterator[str]:
    yield from (f"page {path}" for path in write())


def _of_run(path: Path, out: Path) -> Iterator[str]:
    records = read_records(path)
    yield from _pages(partial(write_pages, records, out))
    for kernel, kind, text in failures.in_common(records.results):
        yield f"common {records.run.arch} {kernel}, {kind}: {text}"


if __name__ == "__main__":
    sys.exit(main())
