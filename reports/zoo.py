"""The page of a kill matrix: which check kills which mutant, on which case first. Reads the JSON file only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reports.fields import ReportError, clean_tree
from reports.write import replace

_TEMPLATES = Path(__file__).parent / "templates"
_NEEDED = ("operator", "arch", "tiers", "data", "seconds", "complete", "elsewhere", "rows", "controls", "checks",
           "idle", "killed", "sound")


def write_zoo(path: Path) -> Path:
    """Write ``kill-matrix.html`` beside the JSON file ``path`` and return its path. Raises ReportError."""
    try:
        value: Any = clean_tree(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: cannot be read as a kill matrix: {error}") from None
    absent = [key for key in _NEEDED if key not in value] if isinstance(value, dict) else list(_NEEDED)
    if absent:
        raise ReportError(f"{path}: no kill matrix: {', '.join(absent)} missing")
    return replace(path.with_suffix(".html"), render(value))


def render(matrix: dict[str, Any]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    used = [check for check, count in matrix["checks"].items() if count]
    return environment.get_template("zoo.html.j2").render(
        zoo=matrix,
        checks=used,
        faults=_by_fault(matrix["rows"]),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
    )


def _by_fault(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Fault kind -> (killed, all)."""
    kinds = dict.fromkeys(row["fault"] for row in rows)
    return {kind: (sum(row["killed"] for row in rows if row["fault"] == kind),
                   sum(row["fault"] == kind for row in rows)) for kind in kinds}
