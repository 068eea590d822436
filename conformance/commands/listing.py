"""``conformance list``: an overview, or the cases of a selection as ids, a count, JSON, or measured coverage."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from conformance.case import Case
from conformance.cases.applies import meant
from conformance.cases.coverage import coverage
from conformance.cases.matrix import EDGE, Matrix
from conformance.cases.options import Selection
from conformance.console import print_table
from conformance.environment import archs_here, chosen_archs
from conformance.errors import ConformanceError, NoAnswer
from conformance.kernel import Kernel
from conformance.registry import arch as table_of
from conformance.registry import kernels, operator

COMPILE_KEYS = ("in", "out", "weights", "xsf")  # parameters that decide which code a kernel compiles
_BASE = "official"


def print_ids(selection: Selection) -> None:
    """One id a line. Imports no torch, unless architectures are named."""
    for _, cases in _selected(selection):
        for case in cases:
            print(case.id)


def print_count(selection: Selection) -> None:
    """The number of cases; ``operator: number`` lines where several operators are selected, ``arch: ...`` where
    several architectures are. Of those that the matrix or an architecture leaves out number and reason go to stderr."""
    names = tuple(chosen_archs(selection.archs)) if selection.archs else ("",)
    for name in names:
        counts = {of.operator: len(cases) for of, cases in _selected(replace(selection, archs=(name,) if name else ()))}
        for operator_name, count in counts.items():
            words = [name] * (len(names) > 1) + [operator_name] * (len(counts) > 1) + [str(count)]
            print(": ".join(words))


def print_json(selection: Selection) -> None:
    """A JSON array with one case per line. ``tiers`` are all that hold the case, not only those selected. Unless
    architectures are named it holds those as well that the matrix leaves out: ``skip`` says why."""
    from conformance.commands.lookup import every_case  # imports torch

    separator = "["
    for of, cases in _selected(selection):
        cases = cases if selection.archs else selection.cases_of(of)
        known = every_case(of.operator)
        for case in cases:
            same = known.get(case.id) or known.get(case.id.removesuffix("-data:exact")) or case
            print(separator + json.dumps(_as_json(of, replace(case, tiers=same.tiers))), end="")
            separator = ",\n "
    print("[]" if separator == "[" else "]")


def _as_json(of: Matrix, case: Case) -> dict[str, Any]:
    return {
        "id": case.id,
        "operator": case.operator,
        "family": case.family or None,
        "params": dict(case.params),
        "tiers": sorted(case.tiers),
        "variant": operator(case.operator).variant(case),
        "group": of.group_of(case),
        "devices": list(of.devices(case)),
        "skip": of.left_out(case),
    }


def print_coverage(selection: Selection) -> None:
    """Measured coverage of the selected tiers (default: smoke) against official, and their spread over compile
    configurations. Imports no torch. Raises ConformanceError for a tier that the matrix lacks."""
    for of in selection.matrices():
        base = _BASE if _BASE in of.tier_names else of.default_tiers[0]
        whole = of.cases(base)
        for tier in selection.tiers or ("smoke" if "smoke" in of.tier_names else base,):
            _print_coverage(f"{of.operator}: tier {tier}", of.cases(tier), f"tier {base}", whole)


def _print_coverage(name: str, cases: Sequence[Case], base: str, whole: Sequence[Case]) -> None:
    rows = []
    for strength in (2, 3, 4):
        covered, possible = coverage([c.params for c in cases], [c.params for c in whole], strength)
        share = f"{_percent(covered, possible)} %"
        rows.append((f"{strength}-way", covered, possible, share))
    print_table(("combinations", "covered", "possible", "share"), rows,
                f"{name} ({len(cases)} cases) against {base} ({len(whole)} cases)")
    keys = [key for key in COMPILE_KEYS if any(key in case.params for case in cases)]
    spread, possible_configs = _configurations(cases, keys), _configurations(whole, keys)
    if not keys:
        return
    title = f"compile configurations: {len(spread)}, of which {len(spread.keys() & possible_configs.keys())} of the "
    title += f"{len(possible_configs)} in {base}; {min(spread.values())} to {max(spread.values())} cases each"
    print_table((*keys, "cases"), [(*values, count) for values, count in sorted(spread.items())], title)


def _percent(part: int, whole: int) -> str:
    """One decimal, rounded down: 100.0 stands for all of them only."""
    return f"{part * 1000 // whole / 10 if whole else 100.0:.1f}"


def _configurations(cases: Sequence[Case], keys: Sequence[str]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(case.get(key, "-") for key in keys) for case in cases)


def print_overview(selection: Selection) -> None:
    """Operators, their tiers, edge families and kernels: what there is, and what each is for."""
    for of in selection.matrices():
        contract = operator(of.operator)
        print(f"{of.operator}: {contract.about}")
        print(f"  variants: {', '.join(contract.variants)}")
        timed = f"; timed by --conformance-bench: {', '.join(of.bench_tiers)}" if of.bench_tiers else ""
        print(f"  {of.path.name}; tiers run by default: {', '.join(of.default_tiers)}{timed}\n")
        edge = of.cases(EDGE) if of.edges else []
        marked = sum("smoke" in case.tiers for case in edge)
        tiers = [(t, len(of.cases(t)), _purpose(of, t, marked)) for t in of.tier_names]
        print_table(("tier", "cases", "what it is for"), tiers, "tiers (--tier NAME)")
        counts = Counter(case.family for case in edge)
        families = [
            (f.name, counts[f.name], f"{f.about} [{' or '.join(f.devices)} only]" if f.devices else f.about)
            for f in of.families.values()
        ]
        print_table(("family", "cases", "what goes wrong"), families, "edge families (--tier edge)")
        found = [
            (k.name, k.promise, k.about, _here(k))
            for k in kernels(of.operator, selection.kernels)
        ]
        print_table(("kernel", "promises", "about", "runs here"), found, "kernels (--kernels NAME)")
    print("'python -m conformance list --tier NAME' prints case ids, 'python -m conformance show CASE' all about one, "
          "'python -m pytest -n auto' runs them.")


def _purpose(of: Matrix, tier: str, marked: int) -> str:
    if tier == EDGE:
        return f"families of faults from public bug reports; {marked} of these cases belong to smoke too"
    return of.about.get(tier, "")


def _here(kernel: Kernel) -> str:
    """Where on this machine a kernel can run, and why not elsewhere."""
    remarks = []
    for arch, device in archs_here().items():
        reason = f"runs on {', '.join(kernel.devices)}" if device not in kernel.devices else None
        try:
            reason = reason or kernel.lacks(device)
        except NoAnswer as error:
            reason = str(error)
        remarks.append(f"not on {arch}: {reason}" if reason else f"on {arch}")
    return "; ".join(remarks)


def _selected(selection: Selection) -> Iterator[tuple[Matrix, list[Case]]]:
    """The cases of each matrix that it does not leave out, and where architectures are named that are meant for any of
    them; on stderr how many are not, and why. Raises ConformanceError where a skip of the matrix is about nothing."""
    for of in selection.matrices():
        if remark := selection.lacking(of):
            print(remark, file=sys.stderr)
        if stale := of.stale_skips():
            raise ConformanceError("; ".join(stale))
        cases = selection.cases_of(of)
        found: set[str] = set()
        for name in chosen_archs(selection.archs) if selection.archs else ("",):
            kept, reasons = meant(cases, table_of(name) if name else None)
            found |= {case.id for case in kept}
            for reason, count in reasons.items():
                where = f"{of.operator} on {name}" if name else of.operator
                print(f"{where}: {count} of {len(cases)} cases are not run: {reason}", file=sys.stderr)
        yield of, [case for case in cases if case.id in found]
