"""The launches of one case on one kernel, each compared with the reference and with one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import Allowance
from conformance.diagnosis.inquiry import explain
from conformance.formats import bits
from conformance.guards import checksum, checksums, shares_memory, unwritten
from conformance.kernel import LEVELS
from conformance.launch import Launched, Launcher
from conformance.operator import Call, Reference, Shared
from conformance.verdict import Verdict, check_form, golden_fraction, judge


@dataclass(frozen=True)
class Subject:
    """One case made ready: its call, its reference, and the checksums of inputs and golden before any kernel ran."""

    call: Call
    reference: Reference
    sums: dict[str, int]
    golden_sum: int
    golden_fraction: Callable[[], float]

    def intact(self) -> bool:
        return checksum(self.reference.golden) == self.golden_sum


def launch_and_compare(launcher: Launcher, subject: Subject, allowance: Allowance) -> tuple[Verdict, str | None]:
    """Launch in the case's mode. Every launch must hold, and the weakest one counts; launches of the same call and
    configuration must agree bit by bit. What fails is explained as long as ``allowance`` grants it."""
    kernel, call = launcher.kernel, launcher.call
    passed: list[Verdict] = []
    paths: dict[str | None, None] = {}  # what ran where no configuration was forced, in order
    firsts: dict[str | None, tuple[Launched, Tensor]] = {}
    for launched in launcher.launch(call.case.get("launch", "plain")):
        if launched.config is None:
            paths[launched.path] = None
        problem = check_form(launched.result, call.output, launcher.device, kernel.fills_out)
        if launched.overrun or problem:
            kind, what = ("guard", launched.overrun) if launched.overrun else ("form", problem)
            return Verdict(None, kind, f"{launched.label}: {what}"), launched.path
        if launched.result.numel() and (name := shares_memory(launched.result, launched.call.arguments)):
            return Verdict(None, "form", f"{launched.label}: the result is a view of the input {name}"), launched.path
        first = firsts.get(launched.config) if launched.call is call else None
        if first is not None:
            if torch.equal(bits(launched.result), bits(first[1])):
                continue
            if kernel.repeats(call.case.params):
                found = _blamed(_disagreement(launcher, first, launched), subject)
                found = explain(found, launcher, launched, subject.reference, subject.reference, allowance)
                return found, launched.path
        same = launched.call is call
        reference = subject.reference if same else launcher.operator.reference(launched.call, Shared())
        fraction = subject.golden_fraction() if same else golden_fraction(reference)
        found = judge(launched.result, launched.call, reference, kernel.promise, fraction)
        if not found.passed:
            found = _blamed(_explained(found, launched), subject)
            return explain(found, launcher, launched, reference, subject.reference, allowance), launched.path
        passed.append(found)
        if launched.call is call:
            # its own buffer when the kernel fills one; what a kernel returns it may write to again
            kept = launched.result if kernel.fills_out else launched.result.clone()
            firsts.setdefault(launched.config, (launched, kept))
    verdict = max(passed, key=lambda one: (LEVELS.index(one.level or ""), one.budget_fraction or 0.0))
    fallbacks = [path for path in paths if path not in kernel.native_paths]  # None too: a launch that did not say
    return _blamed(verdict, subject), next(iter([*fallbacks, *paths]), None)


def _blamed(verdict: Verdict, subject: Subject) -> Verdict:
    """The verdict, or that the kernel wrote to its inputs: what follows from them, later results and the oracle,
    is wrong then as well."""
    call = subject.call
    call.set_poison(1)
    now = checksums({name: call.arguments[name] for name in subject.sums})
    changed = [name for name, value in subject.sums.items() if now[name] != value]
    if not changed:
        return verdict
    message = f"wrote to its input {', '.join(changed)}"
    if verdict.passed:
        return replace(verdict, kind="input-changed", message=message)
    return Verdict(None, "input-changed", f"{message}; after that, {verdict.message}")


def _explained(verdict: Verdict, launched: Launched) -> Verdict:
    """The verdict with the launch it belongs to and, where elements still hold poison, that they were not written."""
    left = unwritten(launched.result, launched.poison)
    count = int(left.sum())
    if count and count == left.numel():
        note = "; no element was written"
    elif count:
        note = f"; {count} elements still hold the poison of the output, first at {left.nonzero()[0].tolist()}"
    else:
        note = ""
    return replace(verdict, message=f"{launched.label}: {verdict.message}{note}")


def _disagreement(launcher: Launcher, first: tuple[Launched, Tensor], second: Launched) -> Verdict:
    """Two launches of one call differ: run both poisons again to tell poison from chance."""
    result = second.result.clone()
    differs = bits(result) != bits(first[1])
    place = differs.nonzero()[0].tolist()
    by_poison = first[0].poison != second.poison
    # The second one first: a kernel that is wrong on every other call would repeat itself in the old order.
    for launched, before in ((second, result), first):
        again = launcher.once("again", launched.poison, launched.config).result
        well_formed = check_form(again, launcher.call.output, launcher.device, True) is None
        by_poison = by_poison and well_formed and torch.equal(bits(again), bits(before))
    kind = "poison" if by_poison else "repeat"
    what = (
        "depends on what stood in the output, in padding or in rows that no slot refers to"
        if kind == "poison"
        else "is not repeatable"
    )
    one, two = float(first[1][tuple(place)]), float(result[tuple(place)])
    message = f"the result {what}: {int(differs.sum())} elements differ between '{first[0].label}' and "
    message += f"'{second.label}', first at {place}: {one:.9g} and {two:.9g}"
    first_place = {"index": place, "expected": one, "actual": two}
    return Verdict(None, kind, message, wrong=int(differs.sum()), first=first_place)
