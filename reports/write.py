"""Write the pages of record files, each in one step, so that no reader ever sees half a page."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from reports import html, markdown
from reports.digest import digest
from reports.fields import ReportError
from reports.overview import overview
from reports.records import Records, read_records

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_report(records_path: Path, out_dir: Path) -> list[Path]:
    """Write ``<out_dir>/<arch>.html`` and ``.md`` for the run in ``records_path``; return both paths.

    Raises ReportError when the file cannot be read as records or the pages cannot be written.
    """
    return write_pages(read_records(Path(records_path)), out_dir)


def write_pages(records: Records, out_dir: Path) -> list[Path]:
    """As `write_report`, of records that were read before."""
    arch = records.run.arch
    if not _FILE_NAME.fullmatch(arch):
        raise ReportError(
            f"{records.path}:1: arch {arch!r} cannot name a file; use letters, digits, '_', '-' and '.'"
        )
    summary = digest(records)
    pages = {".html": html.render(records, summary), ".md": markdown.render(records, summary)}
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        return [replace(Path(out_dir) / f"{arch}{suffix}", text) for suffix, text in pages.items()]
    except OSError as error:
        raise ReportError(
            f"{error.filename or out_dir}: cannot be written: {error.strerror or error}"
        ) from None


def write_overview(records_paths: Sequence[Path], out_dir: Path) -> list[Path]:
    """Write ``<out_dir>/index.html`` over the runs of several architectures, whose pages it links to; return its path
    in a list, empty for fewer than two runs.

    Raises ReportError as `write_report` does.
    """
    if len(records_paths) < 2:
        return []
    view = overview([read_records(Path(path)) for path in records_paths])
    try:
        return [replace(Path(out_dir) / "index.html", html.render_overview(view))]
    except OSError as error:
        raise ReportError(f"{error.filename or out_dir}: cannot be written: {error.strerror or error}") from None


def replace(target: Path, text: str) -> Path:
    """Write a file in one step and return its path. Raises OSError, which names it."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None  # and not the name of the part
    finally:
        part.unlink(missing_ok=True)
    return target
