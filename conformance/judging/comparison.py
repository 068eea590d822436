"""The launches of one case on one kernel, each compared with the reference and with one another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from conformance.diagnosis.diagnose import Allowance
from conformance.diagnosis.inquiry import explain
from conformance.formats import bits
from conformance.kernel import LEVELS
from conformance.launching.guards import differing, sums, unwritten
from conformance.launching.launch import Launched, Launcher
from conformance.launching.reference_guard import ReferenceGuard
from conformance.operator import Call, Reference, Results, Shared
from conformance.verdicts.joint import Joint
from conformance.verdicts.verdict import Verdict, number, spelled


@dataclass(frozen=True)
class Subject:
    """One case made ready: its call, its references, and the checksums of inputs (under poison 1) before any kernel
    ran; ``other_sums``: of inputs under poison 0. ``guard``: watches what is ``shared`` of the references."""

    joint: Joint
    sums: dict[str, Tensor]
    other_sums: dict[str, Tensor]
    guard: ReferenceGuard
    shared: Shared

    @property
    def call(self) -> Call:
        return self.joint.call

    def touched(self) -> str:
        """What of the reference a kernel wrote to, empty when nothing."""
        return self.guard.changed(self.joint.references, self.shared)


def launch_and_compare(launcher: Launcher, subject: Subject, allowance: Allowance) -> tuple[Verdict, str | None]:
    """Launch in the case's mode. Every launch must hold, and the weakest one counts; launches of the same call and
    configuration must agree bit by bit. What fails is explained as long as ``allowance`` grants it."""
    kernel, call = launcher.kernel, launcher.call
    subject.guard.watch(subject.joint.references, subject.shared)
    passed: list[Verdict] = []
    paths: dict[str | None, None] = {}  # what ran where no configuration was forced, in order
    firsts: dict[str | None, tuple[Launched, Results]] = {}
    for launched in launcher.launch(call.case.get("launch", "plain")):
        if launched.config is None:
            paths[launched.path] = None
        same, results = launched.call is call, launched.results
        if same and launched.poison == 0 and not passed and (changed := _changed(call, subject.other_sums)):
            return Verdict(None, "input-changed", f"{launched.label}: wrote to its input {changed}"), launched.path
        joint = subject.joint if same else Joint.of(launched.call, launcher.operator.reference(launched.call, Shared()))
        problem = joint.problem(results, launcher.device, kernel.fills_out)
        if launched.overrun or problem:
            kind, what = ("guard", launched.overrun) if launched.overrun else ("form", problem)
            return Verdict(None, kind, f"{launched.label}: {what}"), launched.path
        first = firsts.get(launched.config) if same else None
        if first is not None:
            differs = joint.difference(first[1], results)
            if differs is None:
                continue
            if kernel.repeats(call.case.params):
                name, mask = differs
                found = _blamed(_disagreement(launcher, joint, name, mask, first, launched), subject)
                return explain(found, launcher, launched, joint, subject.joint, name, allowance), launched.path
        found, name = joint.judge(results, kernel.promise)
        if not found.passed:
            found = _blamed(_explained(found, launched.part(name), joint.references.of[name]), subject)
            return explain(found, launcher, launched, joint, subject.joint, name, allowance), launched.path
        passed.append(found)
        if same:
            firsts.setdefault(launched.config, (launched, _kept(results, joint, found)))
    verdict = max(passed, key=lambda one: (LEVELS.index(one.level or ""), one.budget_fraction or 0.0))
    fallbacks = [path for path in paths if path not in kernel.native_paths]  # None too: a launch that did not say
    return _blamed(verdict, subject), next(iter([*fallbacks, *paths]), None)


def _kept(results: Results, joint: Joint, found: Verdict) -> Results:
    """A copy of the results, which the kernel may write to again: of what has the golden's bits, the golden."""
    if len(results) == 1 and found.level == "bit-exact" and found.max_error is None:
        return {name: joint.references.of[name].golden for name in results}
    return {name: one.clone() for name, one in results.items()}


def _blamed(verdict: Verdict, subject: Subject) -> Verdict:
    """The verdict, or that the kernel wrote to its inputs or to the reference: what follows from them, later results
    and the oracle, is wrong then as well."""
    subject.call.set_poison(1)
    if changed := _changed(subject.call, subject.sums):
        kind, message = "input-changed", f"wrote to its input {changed}"
    elif touched := subject.touched():
        kind, message = "guard", f"wrote to memory of the suite that holds the reference ({touched})"
    else:
        return verdict
    if verdict.passed:
        return replace(verdict, kind=kind, message=message)
    return Verdict(None, kind, f"{message}; after that, {verdict.message}")


def _changed(call: Call, before: dict[str, Tensor]) -> str:
    """The inputs that are not as their checksums were, as the poison now in place has it."""
    return ", ".join(differing(before, {name: sums(call.arguments[name]) for name in before}))


def _explained(verdict: Verdict, part: Launched, reference: Reference) -> Verdict:
    """The verdict with the launch it belongs to and, where elements still hold poison, that they were not written.
    Poison 0 is a NaN that a cast to a format of one or two bytes can give as well, such as torch's to bf16."""
    left = unwritten(part.result, part.poison) & (bits(part.result) != bits(reference.golden))
    if reference.open is not None:
        left &= ~reference.open
    count = int(left.sum())
    if count and count == left.numel():
        note = "; no element was written"
    elif count:
        where = left.nonzero()[0].tolist()
        note = f"; {count} elements still hold what the output was pre-filled with, first at {where}"
    else:
        note = ""
    if count and part.poison == 0 and part.result.is_floating_point() and part.result.element_size() < 4:
        note += ", unless the kernel wrote NaN with the same bits"
    return replace(verdict, message=f"{part.label}: {verdict.message}{note}")


def _disagreement(launcher: Launcher, joint: Joint, name: str, differs: Tensor, first: tuple[Launched, Results],
                  second: Launched) -> Verdict:
    """Two launches of one call differ in one output: run both poisons again to tell poison from chance."""
    results = {key: one.clone() for key, one in second.results.items()}
    place = differs.nonzero()[0].tolist()
    by_poison = first[0].poison != second.poison
    # The second one first: a kernel that is wrong on every other call would repeat itself in the old order.
    for launched, before in ((second, results), first):
        again = launcher.once("again", launched.poison, launched.config).results
        well_formed = joint.problem(again, launcher.device, True) is None
        by_poison = by_poison and well_formed and joint.difference(before, again) is None
    kind = "poison" if by_poison else "repeat"
    what = (
        "depends on what stood in the output, in padding or in rows that no slot refers to"
        if kind == "poison"
        else "is not repeatable"
    )
    one, two = (number(values[name][tuple(place)]) for values in (first[1], results))
    subject = "the result" if len(results) == 1 else f"{name} of the result"
    message = f"{subject} {what}: {int(differs.sum())} elements differ between '{first[0].label}' and "
    message += f"'{second.label}', first at {place}: {spelled(one)} and {spelled(two)}"
    first_place = {**({"output": name} if len(results) > 1 else {}), "index": place, "expected": one, "actual": two}
    return Verdict(None, kind, message, wrong=int(differs.sum()), first=first_place)
