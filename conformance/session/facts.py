"""The first line of a record file: what is planned, on what, by which contracts and rules, and as part of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.case import Case
from conformance.errors import ConformanceError, NoAnswer
from conformance.expectations.check import Points, governed
from conformance.formats import FORMATS
from conformance.kernel import Kernel
from conformance.registry import arch as table_of
from conformance.registry import kernels, operator
from conformance.runs.earlier import Earlier
from conformance.runs.portion import Division
from conformance.runs.recorder import run_line
from conformance.runs.same_run import FACTS, differences, listed, plan_digest, source_digest
from conformance.runs.sharding import Shard
from conformance.session.run import Run

Pairs = Sequence[tuple[Case, str]]  # planned (case, kernel name)


def describe(
    run: Run, arch: str, pairs: Pairs, points: Points, identity: Mapping[str, Any], **facts: Any
) -> dict[str, Any]:
    """The line for these planned pairs on one architecture; ``points``: every point that rules can match."""
    names = list(dict.fromkeys(case.operator for case, _ in pairs))
    used = {kernel for _, kernel in pairs}
    contracts = [operator(name) for name in names]
    described = {
        kernel.name: {"operator": name, "promise": kernel.promise, "module": kernel.module, "about": kernel.about,
                      "source": "+".join(filter(None, map(source_digest, kernel.modules))) or None}
        for name in names
        for kernel in kernels(name, run.selection.kernels)
        if kernel.name in used
    }
    table, rules = table_of(arch), run.rules(arch)
    return run_line(
        identity, pairs, described,
        operators=names, sizes=run.settings(arch).sizes, data=run.selection.data, vacuity=run.vacuity,
        bench=run.selection.bench,
        plan=plan_digest((case.id, kernel) for case, kernel in pairs),
        tiers=sorted({tier for case, _ in pairs for tier in case.tiers}),
        policies={c.name: dict(c.policies) for c in contracts},
        tolerances={c.name: {f.name: c.published or f.published for f in FORMATS.values()} for c in contracts},
        budget={c.name: c.budget for c in contracts},
        facts={name: {"value": fact.value, "source": fact.source} for name, fact in table.facts.items()},
        rules=[{"where": entry.rule.where, "text": str(entry.rule), "reason": entry.rule.reason,
                "source": entry.rule.source, "until": entry.rule.until, "cases": entry.points}
               for entry in governed(rules, [table], points)],
        **facts,
    )


def shard_facts(
    shard: Shard, line: Mapping[str, Any], whole: Mapping[str, Any], identity: Pairs, division: Division,
    costs: str | None,
) -> dict[str, Any]:
    """What the line of one shard says of all of them. ``whole``: the line that a run of the whole plan would have;
    ``loose``: identity results whose numbers may differ, because the kernel does not repeat its bits."""
    known = {(k.operator, k.name): k for case, _ in identity for k in kernels(case.operator)}
    return {
        "index": shard.index,
        "count": shard.count,
        "identity": [[case.id, kernel] for case, kernel in identity],
        "loose": [[case.id, kernel] for case, kernel in identity
                  if (found := known.get((case.operator, kernel))) and _is_loose(found, case)],
        "seconds": division.seconds,
        "known": division.known,
        "costs": costs,
        "whole": {name: value for name, value in whole.items() if line.get(name) != value},
    }


def _is_loose(kernel: Kernel, case: Case) -> bool:
    try:
        return not kernel.repeats(case.params)
    except NoAnswer:  # which the case itself reports
        return False


def resumed_facts(earlier: Earlier, line: Mapping[str, Any], taken: int, anyway: bool) -> list[dict[str, Any]]:
    """What the line of a resumed run says of the runs it goes on from, the latest last; ``taken``: how many of its
    results are those of the latest.

    Raises ConformanceError when that run differs from this one, unless its results are to be taken ``anyway``.
    """
    found = differences(earlier.run, line, (*FACTS, "plan", "bench"))
    before, now = earlier.run.get("shard") or {}, line.get("shard") or {}
    if (before.get("index"), before.get("count")) != (now.get("index"), now.get("count")):
        found["shard"] = f"{_shard(before)} there, {_shard(now)} here"
    if "plan" in found and not any(name.startswith("kernel ") for name in found):
        found["plan"] = "other cases or kernels are planned; give the options of that run"
    if found and not anyway:
        raise ConformanceError(
            f"--resume={earlier.path}: that run differs from this one in {listed(found)}. It was '"
            f"{earlier.run.get('command', '')}'. Run all of it again without --resume, or take its results as they are "
            "with --resume-anyway"
        )
    return [*earlier.run.get("resumed", ()), {
        "from": str(earlier.path), "started": earlier.run.get("started", ""), "results": taken,
        "truncated": earlier.truncated, "ended": earlier.end is not None, "differs": found,
    }]


def _shard(facts: Mapping[str, Any]) -> str:
    return f"{facts['index']}/{facts['count']}" if facts else "none"
