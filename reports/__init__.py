"""Pages from record files: one HTML page and one Markdown summary per architecture, an overview of several, and two
runs side by side.

It reads record files only and imports no other part of the suite, so that pages can be made anywhere from a
copied file.
"""

from reports.compare import compare
from reports.compare_page import write_diff
from reports.compare_text import tables
from reports.fields import ReportError
from reports.records import Records, Result, Run, Summary, read_records
from reports.write import write_overview, write_report

__all__ = [
    "Records", "ReportError", "Result", "Run", "Summary", "compare", "read_records", "tables", "write_diff",
    "write_overview", "write_report",
]
