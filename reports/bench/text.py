"""Timings as plain tables for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from reports.bench import spelling
from reports.bench.ratios import Row, Summary, rows, summaries
from reports.bench.records import BenchRun
from reports.text import DASH, aligned

MOST_REASONS = 10
SUMMARY_HEAD = ("operator", "variant", "candidate", "cases", "over baseline", "over PyTorch", "baseline over PyTorch",
                "noise", "slower", "of copy: lowest, median")
ROW_HEAD = ("operator", "variant", "workload", "candidate", "baseline", "PyTorch", "over baseline", "over PyTorch",
            "baseline over PyTorch", "moved", "bandwidth", "of copy", "of roof")


def tables(run: BenchRun, cases: bool = True) -> str:
    """The whole of it, ending in a newline; without the rows of single ``cases`` where these are not wanted."""
    found = rows(run)
    parts = [
        f"timings on {run.arch}: {run.device}; {spelling.kind(run)}; {len(run.timed)} of {len(run.timings)} timed",
        "\n".join(f"  {name}: {value}" for name, value in spelling.ceilings(run)),
        "\n".join(f"  ! {remark}" for remark in spelling.remarks(run)),
        _section("by variant: geometric mean [lowest, highest] of the ratios", SUMMARY_HEAD,
                 [summary_cells(one) for one in summaries(found)]),
        _section("by named workload", ("workload", *SUMMARY_HEAD),
                 [(one.workload, *summary_cells(one)) for one in summaries(found, by_workload=True) if one.workload]),
        _section("each case; * marks a doubtful trial", ROW_HEAD, [row_cells(row) for row in found] if cases else ()),
        _section("not timed", ("cases", "kernel", "why"),
                 [(str(count), *why) for why, count in list(spelling.reasons(run).items())[:MOST_REASONS]]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_cells(one: Summary) -> tuple[str, ...]:
    """The cells of `SUMMARY_HEAD`."""
    shares = DASH if one.of_copy is None else ", ".join(map(spelling.percent, one.of_copy))
    return (one.operator, one.variant, one.candidate or DASH, str(one.cases), spelling.span(one.over_baseline),
            spelling.span(one.over_pytorch), spelling.span(one.baseline_over_pytorch),
            *((DASH, DASH) if one.over_baseline is None else (str(one.noise), str(one.slower))), shares)


def row_cells(row: Row) -> tuple[str, ...]:
    """The cells of `ROW_HEAD`; the last four are the candidate's, or else the baseline's."""
    one = row.candidate or row.baseline or row.timings[0]
    return (
        row.operator, row.variant, " ".join(filter(None, (row.workload, row.point))), spelling.time(row.candidate),
        spelling.time(row.baseline), spelling.time(row.pytorch), spelling.times(row.over_baseline),
        spelling.times(row.over_pytorch), spelling.times(row.baseline_over_pytorch), spelling.size(row.moved),
        spelling.per_second(one.bandwidth, "B"), spelling.percent(one.of_copy), spelling.percent(one.of_roof),
    )


def _section(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"{title}:", *aligned(head, cells)]) if cells else ""
