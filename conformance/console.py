"""Text for people: tables and aligned fields. Plain, greppable lines unless stdout is a terminal and rich is there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows under a heading; a column that holds numbers only is set flush right. Nothing for no rows."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return
    numeric = [all(row[i].isdigit() for row in cells) for i in range(len(columns))]
    if not (sys.stdout.isatty() and _print_rich(columns, cells, numeric, title)):
        if title:
            print(title)
        for line in _aligned([list(columns), *cells], numeric):
            print(f"  {line}")
    print()


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print ``name  value`` lines, the values in one column."""
    for line in _aligned([[name, str(value)] for name, value in fields], [False, False]):
        print(line)


def amount(count: float, unit: str, base: int = 1000) -> str:
    """``count`` with a metric (or, for base 1024, a binary) prefix: 1536 B -> '1.5 KiB'."""
    for prefix in ("", "K" if base == 1024 else "k", "M", "G", "T"):
        if count < base or prefix == "T":
            break
        count /= base
    digits = f"{count:.0f}" if not prefix else f"{count:.1f}"
    return f"{digits} {prefix}{'i' if prefix and base == 1024 else ''}{unit}"


def _aligned(rows: list[list[str]], right: Sequence[bool]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        yield "  ".join(padded).rstrip()


def _print_rich(columns: Sequence[str], rows: list[list[str]], right: Sequence[bool], title: str) -> bool:
    """Print with rich; False when it is not installed (a bare checkout on a GPU machine)."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for name, flush_right in zip(columns, right, strict=True):
        table.add_column(name, justify="right" if flush_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: the brackets in a cell are not markup
    Console().print(table)
    return True
