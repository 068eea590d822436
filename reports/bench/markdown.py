"""Timings as a summary to post: GitHub's Markdown, bounded."""

from __future__ import annotations

from reports.bench import spelling, text
from reports.bench.ratios import rows, summaries
from reports.bench.records import BenchRun
from reports.markdown import escaped, table
from reports.text import clip

MOST_ROWS = 60
_LONGEST = 300


def render(run: BenchRun) -> str:
    """The whole summary, ending in a newline."""
    found = rows(run)
    remarks = [f"- {escaped(clip(remark, _LONGEST))}" for remark in spelling.remarks(run)]
    named = [(one.workload, *text.summary_cells(one)) for one in summaries(found, by_workload=True) if one.workload]
    parts = [
        f"## Timings on {escaped(run.arch)}: {len(run.timed)} of {len(run.timings)} timed",
        f"{escaped(run.device)}; {escaped(spelling.kind(run))}",
        " · ".join(f"{escaped(name)} {escaped(value)}" for name, value in spelling.ceilings(run)),
        "\n".join(remarks),
        _table("By variant", text.SUMMARY_HEAD, [text.summary_cells(one) for one in summaries(found)]),
        _table("By workload", ("workload", *text.SUMMARY_HEAD), named),
        _table("Each case", text.ROW_HEAD, [text.row_cells(row) for row in found]),
        _table("Not timed", ("cases", "kernel", "why"),
               [(str(count), *map(str, why)) for why, count in spelling.reasons(run).items()]),
        f"Protocol: {escaped(spelling.protocol(run))}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, head: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    if not cells:
        return ""
    lines = [[escaped(clip(cell, _LONGEST)) for cell in row] for row in cells]
    return f"### {title}\n\n{table(head, lines, 'l' * len(head), MOST_ROWS)}"
