"""Timings as a self-contained HTML page, without script."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from reports.bench import spelling, svg, text
from reports.bench.ratios import Row, rows, summaries
from reports.bench.records import BenchRun, Timing
from reports.html import environment, verbatim


@dataclass(frozen=True)
class Section:
    """What the page says of one operator."""

    operator: str
    roofline: Markup
    bars: Markup
    rows: tuple[Row, ...]
    timings: tuple[Timing, ...]


def render(run: BenchRun) -> str:
    """The page as text."""
    found = rows(run)
    sections = [
        Section(name, Markup(svg.roofline(timings)), Markup(svg.bars(timings)),
                tuple(row for row in found if row.operator == name), timings)
        for name in dict.fromkeys(timing.operator for timing in run.timed)
        if (timings := tuple(timing for timing in run.timed if timing.operator == name))
    ]
    jinja = environment()
    jinja.filters |= {
        "cells_of_summary": text.summary_cells,
        "cells_of_workload": lambda one: (one.workload, *text.summary_cells(one)),
        "cells_of_row": text.row_cells,
    }
    return jinja.get_template("bench.html.j2").render(
        run=run, sections=sections, say=spelling, summary_head=text.SUMMARY_HEAD, row_head=text.ROW_HEAD,
        summaries=summaries(found), by_workload=[one for one in summaries(found, by_workload=True) if one.workload],
        reasons=spelling.reasons(run), remarks=spelling.remarks(run), style=verbatim("report.css"),
    )
