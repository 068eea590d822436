"""``conformance expectations``: the rules in force, what each governs, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

from conformance.cases.options import Selection
from conformance.console import print_table
from conformance.errors import ConformanceError
from conformance.expectations.check import every_point, governed, problems
from conformance.expectations.proposal import propose
from conformance.expectations.rule_set import RuleSet, load_rule_set, runnable
from conformance.registry import arch, archs, kernels, rule_set_file


def print_rules(selection: Selection) -> bool:
    """Print the rules of each architecture (default: all that have a table); False when something is wrong."""
    names = _names(selection.archs)
    rules_of = {name: (*arch(name).rules, *selection.expectations) for name in names}
    said = [rule for name, rules in rules_of.items() for rule in (*rules, *arch(name).skips)]
    points = every_point(said, selection.kernels)
    found = [problem for of in selection.matrices() for problem in of.stale_skips()]
    rows, skipped = [], []
    for name, rules in rules_of.items():
        table = arch(name)
        rows += [(name, str(entry.rule), entry.points, entry.rule.until, entry.rule.reason, entry.rule.where)
                 for entry in governed(rules, [table], points)]
        skipped += [(name, entry.points, entry.rule.reason, entry.rule.where)
                    for entry in governed(table.skips, [table], points)]
        found += [f"{name}: {problem}" for problem in problems(table, rules, points)]
    print_table(("architecture", "expected", "cases", "until", "why", "rule"), rows, "rules; all else runs natively")
    if skipped:
        print_table(("architecture", "cases", "why", "skip"), skipped, "left out there, on whatever kernel")
    if not rows:
        print("no rule: everything is expected to run natively")
    for problem in found:
        print(problem, file=sys.stderr)
    return not found


def _names(chosen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(archs()) if not chosen or chosen == ("all",) else chosen


def print_update(records: Path, selection: Selection) -> bool:
    """Print what a run asks to change, as a unified diff; True when there is nothing to change."""
    for name in selection.operators or ():  # as everywhere: an unknown name is an error
        kernels(name)
    diff, remarks = propose(records)
    for remark in remarks:
        print(remark, file=sys.stderr)
    print(diff, end="")
    if not diff and not remarks:
        print("nothing to change: the run agrees with the rules", file=sys.stderr)
    return not (diff or remarks)


def print_rule_set(name: str, chosen: tuple[str, ...]) -> bool:
    """Print a published rule set over its own cells, by revision and architecture; False when a rule governs none of
    them."""
    rules = load_rule_set(rule_set_file(name))
    print(f"{rules.name}: {rules.about}\n  {rules.source}\n")
    fine = True
    for revision in rules.revisions.values():
        known = [entry for entry in revision.archs if not chosen or chosen == ("all",) or entry in chosen]
        rows = []
        for arch_name in known:
            for cells in revision.cells:
                outcomes = rules.outcomes(revision, cells, arch(arch_name))
                told = ", ".join(f"{count} {text}" for text, count in outcomes.most_common())
                rows.append((arch_name, cells, sum(outcomes.values()), runnable(outcomes), told))
        print_table(("architecture", "cells", "number", "runnable", "expected"), rows,
                    f"revision {revision.name}: {revision.about}")
        stale = _stale(rules, revision.name)
        for where in stale:
            print(f"{where}: stale: it matches no cell on any architecture of its revision", file=sys.stderr)
        fine = fine and not stale
    if chosen and chosen != ("all",) and not any(set(chosen) & set(r.archs) for r in rules.revisions.values()):
        spoken = sorted({entry for revision in rules.revisions.values() for entry in revision.archs})
        raise ConformanceError(f"{name} says nothing of {', '.join(chosen)}; it speaks of {', '.join(spoken)}")
    return fine


def _stale(rules: RuleSet, revision_name: str) -> list[str]:
    """Where the rules stand that match no cell on any architecture of their revision."""
    revision = rules.revisions[revision_name]
    counts: dict[str, int] = {}
    for entry in governed(revision.rules, [arch(name) for name in revision.archs], rules.points(revision)):
        counts[entry.rule.where] = counts.get(entry.rule.where, 0) + entry.points
    return [where for where, count in counts.items() if not count]
