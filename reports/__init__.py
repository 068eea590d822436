"""Pages from record files: one HTML page and one Markdown summary per architecture, an overview of several, two
runs side by side, and the timings of one.

It reads record files only and imports no other part of the suite, so that pages can be made anywhere from a
copied file.
"""

from reports.bench.records import read_bench
from reports.bench.write import write_bench
from reports.compare import compare
from reports.compare_page import write_diff
from reports.compare_text import tables
from reports.fields import ReportError
from reports.records import Records, Result, Run, Summary, read_records
from reports.write import write_overview, write_report

__all__ = [
    "Records", "ReportError", "Result", "Run", "Summary", "compare", "read_bench", "read_records", "tables",
    "write_bench", "write_diff", "write_overview", "write_report",
]
