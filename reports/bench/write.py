"""Write the pages of a file of timings, each in one step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reports.bench import markdown, page, text
from reports.bench.ratios import Ratio, Row, rows, summaries
from reports.bench.records import BenchRun, Timing, read_bench
from reports.fields import ReportError
from reports.write import replace


def write_bench(path: Path, out_dir: Path) -> list[Path]:
    """Write ``<out_dir>/<arch>.bench.html``, ``.md``, ``.txt`` and ``.json`` for a file of timings; return the paths.

    Raises ReportError when the file cannot be read as timings or the pages cannot be written.
    """
    run = read_bench(Path(path))
    pages = {
        "html": page.render(run), "md": markdown.render(run), "txt": text.tables(run),
        "json": json.dumps(as_json(run), indent=1) + "\n",
    }
    stem = Path(path).name.removesuffix(".jsonl")
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        return [replace(Path(out_dir) / f"{stem}.{suffix}", content) for suffix, content in pages.items()]
    except OSError as error:
        raise ReportError(f"{error.filename or out_dir}: cannot be written: {error.strerror or error}") from None


def as_json(run: BenchRun) -> dict[str, Any]:
    """The three-way table and its summaries for programs: seconds, ratios (above 1: the first is faster), noise."""
    found = rows(run)
    return {
        "arch": run.arch, "device": run.device, "kind": run.kind, "started": run.started, "facts": dict(run.facts),
        "sizes": run.sizes, "protocol": dict(run.protocol),
        "variants": [asdict(one) for one in summaries(found)],
        "workloads": [asdict(one) for one in summaries(found, by_workload=True) if one.workload],
        "cases": [_row(row) for row in found],
        "not_timed": [{"kernel": timing.kernel, "case": timing.case, "reason": timing.reason}
                      for timing in run.timings if not timing.timed],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "case": row.case, "operator": row.operator, "variant": row.variant, "workload": row.workload,
        "candidate": _timing(row.candidate), "baseline": _timing(row.baseline), "pytorch": _timing(row.pytorch),
        "over_baseline": _ratio(row.over_baseline), "over_pytorch": _ratio(row.over_pytorch),
        "baseline_over_pytorch": _ratio(row.baseline_over_pytorch),
    }


def _timing(timing: Timing | None) -> dict[str, Any] | None:
    if timing is None:
        return None
    names = ("kernel", "seconds", "spread", "bytes", "flops", "bandwidth", "rate", "of_copy", "of_copy_at_size",
             "of_product", "of_roof", "bound", "clock", "verdict")
    return {**{name: getattr(timing, name) for name in names}, "remarks": list(timing.remarks)}


def _ratio(found: Ratio | None) -> dict[str, Any] | None:
    return None if found is None else {"value": found.value, "noise": found.noise}
