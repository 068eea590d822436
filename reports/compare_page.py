"""A comparison as a self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from reports import text
from reports.compare import Comparison, levels
from reports.compare_text import remarks, spelled, verdict
from reports.fields import ReportError
from reports.html import environment, verbatim
from reports.write import replace

MOST = 500  # results listed in one table: a page of two very different runs stays usable
OPEN = 10  # of them at once, so that the other sections are near
_LONGEST = 300


def render(found: Comparison) -> str:
    """The page as text; it needs no script."""
    jinja = environment()
    jinja.filters |= {
        "spread": spelled,
        "clip": lambda message: text.clip(message, _LONGEST),
        "per_kernel": lambda changes: Counter(change.kernel for change in changes).most_common(),
    }
    word, _, reason = verdict(found).partition(": ")
    return jinja.get_template("diff.html.j2").render(
        found=found, word=word, reason=reason, remarks=list(remarks(found)), alike=levels(found.changed), most=MOST,
        open=OPEN, style=verbatim("report.css"),
    )


def write_diff(found: Comparison, target: Path) -> Path:
    """Write the page in one step and return its path. Raises ReportError when it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return replace(target, render(found))
    except OSError as error:
        raise ReportError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from None
