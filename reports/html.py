"""The self-contained HTML pages: Jinja for what is read first, embedded columns and script for the rest."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from reports import columnar, failures, text
from reports.architecture import architecture
from reports.digest import Digest
from reports.identity import facts, sizes_notice
from reports.overview import MOST_DIFFERENCES, Overview
from reports.records import STATES, Records

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = (
    "dom.js",
    "data.js",
    "heatmap.js",
    "marginals.js",
    "detail.js",
    "failures.js",
    "table.js",
    "main.js",
)


def render(records: Records, digest: Digest) -> str:
    """The page of one architecture as text; a few hundred KB for 22 000 results."""
    return environment().get_template("report.html.j2").render(
        run=records.run,
        end=records.end,
        digest=digest,
        code=architecture(records),
        facts=facts(records),
        sizes_notice=sizes_notice(records.run),
        replaced=records.replaced,
        causes=failures.causes(records.results),
        common=failures.in_common(records.results),
        timings=records.run.bench and records.path.with_name(f"{records.run.arch}.bench.jsonl").exists(),
        states=text.labels(STATES, records.run.here),
        signs=text.signs(records.run.here),
        style=verbatim("report.css"),
        script=Markup("\n").join(verbatim(name) for name in _SCRIPTS),
        data=Markup(text.embedded(columnar.payload(records, digest))),
    )


def render_overview(view: Overview) -> str:
    """The page of several architectures as text; it links to theirs by name and needs no script."""
    executed = [row.arch for row in view.rows if any(kernel.executed for kernel in row.digest.kernels)]
    passed = all(row.digest.verdict.passed for row in view.rows)
    return environment().get_template("overview.html.j2").render(
        view=view,
        word="FAIL" if not passed else "PASS" if executed else "NOT EXECUTED",
        executed=executed,
        signs=text.SIGNS | {"assemble": "A", "lower": "L", "route": "R"},
        most=MOST_DIFFERENCES,
        style=verbatim("report.css"),
    )


def environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": text.number, "fraction": text.fraction, "duration": text.duration}
    return environment


def verbatim(name: str) -> Markup:
    """A file of this package, trusted as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))
