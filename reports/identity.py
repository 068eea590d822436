"""The identity of a run as labelled facts, the same in HTML and Markdown."""

from __future__ import annotations

from reports.records import Records, Run
from reports.text import duration


def facts(records: Records) -> list[tuple[str, str]]:
    """(label, value) pairs in reading order; what a run did not state is said to be unknown or none."""
    run, end = records.run, records.end
    return [
        ("device", run.device or "unknown"),
        *([("visible devices", run.visible_devices)] if run.visible_devices else []),
        ("arch", run.arch),
        ("driver", run.driver or "none"),
        ("torch", run.torch or "unknown"),
        ("tilelang", run.tilelang or "not installed"),
        ("compiler", run.compiler or "none"),
        ("python", run.python or "unknown"),
        ("platform", run.platform or "unknown"),
        ("commit", commit(run)),
        ("tier", ", ".join(run.tiers) or "unknown"),
        ("sizes", run.sizes or "unknown"),
        ("data", run.data or "unknown"),
        ("workers", str(run.workers)),
        ("started", run.started or "unknown"),
        ("duration", duration(end.seconds) if end else "unknown: the run did not finish"),
        ("command", run.command or "unknown"),
    ]


def commit(run: Run) -> str:
    if not run.commit:
        return "unknown"
    return f"{run.commit} + uncommitted changes" if run.dirty else run.commit


def sizes_notice(run: Run) -> str:
    """What must be said when the sizes are not the official ones; empty otherwise."""
    if run.sizes == "official":
        return ""
    return f"{run.sizes or 'unknown'} sizes: not the official result"
