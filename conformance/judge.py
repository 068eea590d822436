"""Judging one case on one kernel: inputs, reference, launches, guards, verdict, and the result record."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.case import Case
from conformance.diagnosis.diagnose import Allowance
from conformance.diagnosis.inquiry import explain
from conformance.errors import NotSupported
from conformance.formats import bits
from conformance.guards import checksum, shares_memory, unwritten
from conformance.kernel import LEVELS, Kernel
from conformance.launch import KernelRaised, Launched, Launcher
from conformance.layouts import MAY_REFUSE
from conformance.operator import Call, Reference, Shared
from conformance.pins import changed
from conformance.registry import matrix, operator
from conformance.result import REJECTED, Result, Settings, blank_result, refusal, why_not_run
from conformance.vacuity import accepted, is_proved
from conformance.verdict import Verdict, check_form, golden_fraction, judge


def torch_device(settings: Settings) -> torch.device:
    return torch.device("cuda", 0) if settings.device == "cuda" else torch.device(settings.device)


# Failures after which the inputs are known to be as they were: `_blamed` has looked, and no guard band was touched.
_HARMLESS = frozenset({"nan-map", "inf-map", "exact", "bits", "budget", "published", "poison", "repeat"})


@dataclass(frozen=True)
class _Subject:
    """One case made ready: its call, its reference, and the checksums of inputs and golden before any kernel ran."""

    call: Call
    reference: Reference
    sums: dict[str, int]
    golden_sum: int
    golden_fraction: Callable[[], float]

    def intact(self) -> bool:
        return checksum(self.reference.golden) == self.golden_sum


class Judge:
    """Judges cases one after another; keeps what the cases of one group share, and the last case's reference."""

    def __init__(self, settings: Settings, vacuity: str = "off") -> None:
        """``vacuity``: which cases prove first that they can fail ("smoke", "all", "off")."""
        self.settings = settings
        self.vacuity = vacuity
        self._vacuous: dict[str, str | None] = {}
        self._allowance = Allowance()
        self.device = torch_device(settings)
        self.shared = Shared()
        self.lost: str | None = None
        self._subject: tuple[str, _Subject] | None = None

    def run(self, case: Case, kernel: Kernel) -> Result:
        """Never raises for what a kernel does; ConformanceError for a case or a file that is wrong itself."""
        reason = self.lost or why_not_run(case, kernel, self.settings)
        if reason:
            kind = "refused" if reason == refusal(case, kernel) else None
            return blank_result(case, kernel, self.settings, "not-run", message=reason, kind=kind, lane="route")
        start = time.perf_counter()
        blank = blank_result(case, kernel, self.settings, "pass")
        try:
            subject = self._prepare(case, blank.group)
            if (drift := changed(case, self.settings.sizes, subject.reference.golden)) is not None:
                return replace(blank, state="error", kind="oracle-changed", message=f"{case.id}: {drift}")
            if (taken := self._accepted(case, subject)) is not None:
                return replace(blank, state="error", kind="vacuous",
                               message=f"{case.id}: the case is vacuous: its verdict accepts {taken}")
            with torch.no_grad():
                result = self._judged(case, kernel, subject, blank)
        except torch.OutOfMemoryError as error:
            self.forget()
            first_line = str(error).splitlines()[0]
            return replace(blank, state="error", kind="memory",
                           message=f"{case.id} on {kernel.name}: out of memory in the suite itself: {first_line}")
        if result.state != "pass":
            if not self._context_works():
                self.lost = f"the GPU context was lost by {case.id} on {kernel.name}: {result.message}"
                return result
            if result.kind not in _HARMLESS or not subject.intact():
                self.forget()  # a faulty kernel may have written anywhere
        return replace(result, elements=subject.reference.golden.numel(), seconds=round(time.perf_counter() - start, 5))

    def _context_works(self) -> bool:
        if self.settings.device != "cuda":
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def holds(self, case: Case) -> bool:
        """Whether the inputs of the case's group are in memory."""
        return self.shared.group == matrix(case.operator).group_of(case)

    def forget(self) -> None:
        """Drop all inputs and references; the next case builds its own."""
        self._subject = None
        self.shared.clear()

    def _prepare(self, case: Case, group: str) -> _Subject:
        if self._subject is not None and self._subject[0] == case.id:
            return self._subject[1]
        self._subject = None
        contract, device = operator(case.operator), self.device
        self.shared.enter(group)
        call = contract.inputs(case, self.settings.sizes, device, self.shared)
        call.set_poison(1)
        reference = contract.reference(call, self.shared)
        fraction = functools.lru_cache(lambda: golden_fraction(reference))
        subject = _Subject(call, reference, self._checksums(call), checksum(reference.golden), fraction)
        self._subject = case.id, subject
        return subject

    def _accepted(self, case: Case, subject: _Subject) -> str | None:
        """What is wrong and yet accepted by the case, looked for once per case."""
        if not is_proved(case, self.vacuity):
            return None
        if case.id not in self._vacuous:
            self._vacuous[case.id] = accepted(subject.call, subject.reference)
        return self._vacuous[case.id]

    def _checksums(self, call: Call) -> dict[str, int]:
        """Checksums before any kernel ran; those of tensors that the group shares are taken once."""
        return {
            name: self.shared.get(("checksum", name), functools.partial(checksum, value))
            if self.shared.holds(value) else checksum(value)
            for name, value in call.arguments.items() if isinstance(value, Tensor)
        }

    def _judged(self, case: Case, kernel: Kernel, subject: _Subject, blank: Result) -> Result:
        contract = operator(case.operator)
        launcher = Launcher(contract, kernel, subject.call, self.settings.sizes, self.device, self.shared)
        try:
            verdict, path = _launch_and_compare(launcher, subject, self._allowance)
        except KernelRaised as raised:
            error = raised.__cause__
            if isinstance(error, NotSupported):
                return replace(blank, state="not-run", lane="route", kind="refused",
                               message=f"not supported by {kernel.name}: {error}")
            if case.get("layout") in MAY_REFUSE and isinstance(error, (ValueError, TypeError)):
                message = f"rejected, as the contract allows: {error}"
                return replace(blank, path=REJECTED, level=kernel.promise, message=message)
            text = f"{case.id} on {kernel.name}: raised {type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error, limit=-12))
            return replace(blank, state="error", kind="exception", message=text, trace=trace)
        return replace(
            blank,
            state="pass" if verdict.passed else "fail",
            level=verdict.level,
            kind=verdict.kind,
            message=f"{case.id} on {kernel.name}: {verdict.message}" if verdict.message else "",
            budget_fraction=verdict.budget_fraction,
            max_error=verdict.max_error,
            wrong=verdict.wrong,
            first=verdict.first,
            details=verdict.details,
            path=path,
        )


def _launch_and_compare(launcher: Launcher, subject: _Subject, allowance: Allowance) -> tuple[Verdict, str | None]:
    """Launch in the case's mode. Every launch must hold, and the weakest one counts; launches of the same call and
    configuration must agree bit by bit. What fails is explained as long as ``allowance`` grants it."""
    kernel, call = launcher.kernel, launcher.call
    passed: list[Verdict] = []
    paths: dict[str, None] = {}  # what ran where no configuration was forced, in order
    firsts: dict[str | None, tuple[Launched, Tensor]] = {}
    for launched in launcher.launch(call.case.get("launch", "plain")):
        if launched.config is None and launched.path is not None:
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
            firsts.setdefault(launched.config, (launched, launched.result.clone()))
    verdict = max(passed, key=lambda one: (LEVELS.index(one.level or ""), one.budget_fraction or 0.0))
    fallbacks = [path for path in paths if path not in kernel.native_paths]
    return _blamed(verdict, subject), next(iter([*fallbacks, *paths]), None)


def _blamed(verdict: Verdict, subject: _Subject) -> Verdict:
    """The verdict, or that the kernel wrote to its inputs: what follows from them, later results and the oracle,
    is wrong then as well."""
    call = subject.call
    call.set_poison(1)
    changed = [name for name, value in subject.sums.items() if checksum(call.arguments[name]) != value]
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
