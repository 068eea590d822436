"""The launches of one case on one kernel, each compared with the reference and with one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import Allowance
from conformance.diagnosis.inquiry import explain
from conformance.formats import bits, differs
from conformance.launching.guards import unwritten
from conformance.launching.launch import Launched, Launcher
from conformance.launching.reference_guard import ReferenceGuard
from conformance.launching.snapshot import Snapshot, Watched, changed
from conformance.operator import Call, Reference, Results, Shared
from conformance.verdicts.joint import Joint, weakness
from conformance.verdicts.verdict import Verdict, number, spelled


@dataclass(frozen=True)
class Subject:
    """One case made ready: its call, its references, and what its inputs were (under poison 1) before any kernel ran;
    ``early``: under poison 0, what the next poison is written over. ``guard``: watches what is ``shared`` of the
    references."""

    joint: Joint
    inputs: Mapping[str, Snapshot]
    early: Mapping[str, Snapshot]
    guard: ReferenceGuard
    shared: Shared

    @property
    def call(self) -> Call:
        return self.joint.call

    def touched(self) -> str:
        """What of the reference a kernel wrote to, empty when nothing."""
        (written,) = changed(self.guard.watched(self.joint.references, self.shared))
        return ", ".join(written)

    def written(self) -> tuple[list[str], list[str]]:
        """The inputs, under poison 1, and what of the reference a kernel wrote to."""
        inputs, reference = changed(_watched(self.inputs, self.call.arguments),
                                    self.guard.watched(self.joint.references, self.shared))
        return inputs, reference


def launch_and_compare(launcher: Launcher, subject: Subject, allowance: Allowance) -> tuple[Verdict, str | None]:
    """Launch in the case's mode. Every launch must hold, and the weakest one counts; launches of the same call and
    configuration must agree bit by bit. What fails is explained as long as ``allowance`` grants it."""
    kernel, call = launcher.kernel, launcher.call
    subject.guard.watch(subject.joint.references, subject.shared)
    goldens = {name: one.golden for name, one in subject.joint.references.of.items()}
    passed: list[Verdict] = []
    paths: dict[str | None, None] = {}  # what ran where no configuration was forced, in order
    firsts: dict[str | None, tuple[Launched, Results]] = {}
    for launched in launcher.launch(call.case.get("launch", "plain")):
        if launched.config is None:
            paths[launched.path] = None
        same, results = launched.call is call, launched.results
        joint = subject.joint if same else Joint.of(launched.call, launcher.operator.reference(launched.call, Shared()))
        problem = joint.problem(results, launcher.device, kernel.fills_out)
        first = firsts.get(launched.config) if same else None
        early: list[Watched] = []
        if same and launched.poison == 0 and not passed:
            early = _watched(subject.early, call.written_over())
        if same and not problem and _as_expected(launched, results, first[1] if first else goldens, early):
            if first is None:
                passed.append(joint.exact())
                firsts[launched.config] = launched, goldens
            continue
        if written := changed(early)[0]:
            message = f"{launched.label}: wrote to its input {', '.join(written)}"
            return Verdict(None, "input-changed", message), launched.path
        if (damage := launched.damage()) or problem:
            kind, what = ("guard", damage) if damage else ("form", problem)
            return Verdict(None, kind, f"{launched.label}: {what}"), launched.path
        if first is not None:
            apart = joint.difference(first[1], results)
            if apart is None:
                continue
            if kernel.repeats(call.case.params):
                name, mask = apart
                found = _blamed(_disagreement(launcher, joint, name, mask, first, launched), subject)
                return explain(found, launcher, launched, joint, subject.joint, name, allowance), launched.path
        found, name = joint.judge(results, kernel.promise)
        if not found.passed:
            found = _blamed(_explained(found, launched.part(name), joint.references.of[name]), subject)
            return explain(found, launcher, launched, joint, subject.joint, name, allowance), launched.path
        passed.append(found)
        if same:
            firsts.setdefault(launched.config, (launched, _kept(results, joint, found)))
    verdict = max(passed, key=weakness)
    fallbacks = [path for path in paths if path not in kernel.native_paths]  # None too: a launch that did not say
    return _blamed(verdict, subject), next(iter([*fallbacks, *paths]), None)


def _as_expected(launched: Launched, results: Results, expected: Results, early: Sequence[Watched]) -> bool:
    """Whether a launch left the expected bits and nothing else; the device is waited for once. It mostly is so, and if
    not the same is asked again, piece by piece."""
    if launched.touched is None:
        return False
    flags = [launched.touched, *(one.before.differs(one.now) for one in early)]
    flags += [differs(results[name], expected[name]) for name in expected]
    return not any(torch.stack(flags).tolist())


def _watched(before: Mapping[str, Snapshot], now: Mapping[str, Tensor]) -> list[Watched]:
    return [Watched(name, snapshot, now[name]) for name, snapshot in before.items()]


def _kept(results: Results, joint: Joint, found: Verdict) -> Results:
    """A copy of the results, which the kernel may write to again: of what has the golden's bits, the golden."""
    if len(results) == 1 and found.level == "bit-exact" and found.max_error is None:
        return {name: joint.references.of[name].golden for name in results}
    return {name: one.clone() for name, one in results.items()}


def _blamed(verdict: Verdict, subject: Subject) -> Verdict:
    """The verdict, or that the kernel wrote to its inputs or to the reference: what follows from them, later results
    and the oracle, is wrong then as well."""
    subject.call.set_poison(1)
    inputs, reference = subject.written()
    if inputs:
        kind, message = "input-changed", f"wrote to its input {', '.join(inputs)}"
    elif reference:
        kind, message = "guard", f"wrote to memory of the suite that holds the reference ({', '.join(reference)})"
    else:
        return verdict
    if verdict.passed:
        return replace(verdict, kind=kind, message=message)
    return Verdict(None, kind, f"{message}; after that, {verdict.message}")


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
