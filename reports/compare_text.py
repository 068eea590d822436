"""A comparison as plain tables for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.compare import Change, Comparison, levels
from reports.digest import digest
from reports.text import aligned, fraction, number, plural
from reports.timing import Spread

MOST = 20  # lines of one table; the page has more


def tables(found: Comparison, most: int = MOST) -> str:
    """The whole comparison, ending in a newline; sections without content say that there is nothing."""
    first, second = found.first, found.second
    parts = [
        f"{verdict(found)}\nfirst:  {first.path} ({first.run.arch}, {len(first.results)} results)\n"
        f"second: {second.path} ({second.run.arch}, {len(second.results)} results)"
        + "".join(f"\nnote: {remark}" for remark in remarks(found)),
        _changes("new failures", found.failures, most),
        _changes("lost results", found.lost, most),
        _changes("fixed", found.fixed, most),
        _section("changed in level, path, lane or kind", len(found.changed), None, aligned(
            ("results", "kernel", "first", "second"),
            [(str(count), *way) for way, count in list(levels(found.changed).items())[:most]])),
        _section(f"budget fraction moved by more than {found.threshold:g}", len(found.drift), most, aligned(
            ("kernel", "first", "second", "by", "case"),
            [(d.kernel, fraction(d.first), fraction(d.second), f"{d.by:+.3g}", d.case) for d in found.drift[:most]])),
        _section("added results", len(found.added), None, aligned(
            ("results", "kernel", "how they went"),
            [(str(count), way[0], way[2]) for way, count in list(levels(found.added).items())[:most]])),
        _section("seconds per case, with judging: median [quartiles]", len(found.timing), None, aligned(
            ("kernel", "cases", "first", "second", "second / first", ""),
            [(t.kernel, str(t.cases), spelled(t.first), spelled(t.second), spelled(t.ratio), t.word)
             for t in found.timing])),
        _section("environment", len(found.environment), None, aligned(
            ("fact", "first", "second"), [(name, *values) for name, values in found.environment.items()])),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(found: Comparison) -> str:
    """The comparison in one line."""
    word = "WORSE" if found.worse else "NOT WORSE"
    return (
        f"{word}: {plural(len(found.failures), 'new failure')}, {plural(len(found.lost), 'lost result')}, "
        f"{len(found.fixed)} fixed, {len(found.changed)} changed, {len(found.added)} added; "
        f"{plural(found.common, 'result')} in both"
    )


def remarks(found: Comparison) -> Iterator[str]:
    """What keeps the runs from being compared without more ado."""
    for name, records in (("first", found.first), ("second", found.second)):
        verdict_of_run = digest(records).verdict
        if records.end is None:
            yield f"the {name} run did not finish"
        yield from (f"the {name} run: {note}" for note in verdict_of_run.notes)
    differing = [name for name in ("sizes", "data") if name in found.environment]
    if differing:
        yield f"the runs differ in {' and '.join(differing)}: their numbers are of different inputs"
    for name, own, other in (("first", found.first, found.second), ("second", found.second, found.first)):
        if alone := [kernel for kernel in own.run.kernels if kernel not in other.run.kernels]:
            yield f"only the {name} run has {', '.join(alone)}: nothing of {'these' if alone[1:] else 'it'} is compared"
    if not found.common:
        yield "the runs have no result in common"


def spelled(spread: Spread) -> str:
    return f"{number(spread.median)} [{number(spread.low)}, {number(spread.high)}]"


def _changes(title: str, changes: Sequence[Change], most: int) -> str:
    rows = [(change.kernel, change.first, change.second, change.case) for change in changes[:most]]
    return _section(title, len(changes), most, aligned(("kernel", "first", "second", "case"), rows))


def _section(title: str, count: int, most: int | None, table: Sequence[str]) -> str:
    """``most``: lines after which the table was cut, None where a line stands for several results."""
    lines = [f"{title}: {count or 'none'}", *(table if count else ())]
    return "\n".join([*lines, f"  ... and {count - most} more, in the page"] if most and count > most else lines)
