"""Pages from record files: one HTML page and one Markdown summary per architecture, and an overview of several.

It reads record files only and imports no other part of the suite, so that pages can be made anywhere from a
copied file.
"""

from reports.fields import ReportError
from reports.records import Records, Result, Run, Summary, read_records
from reports.write import write_overview, write_report

__all__ = ["Records", "ReportError", "Result", "Run", "Summary", "read_records", "write_overview", "write_report"]
