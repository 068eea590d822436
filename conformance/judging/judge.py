"""Judging one case on one kernel: inputs, reference, launches, guards, verdict, and the result record."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import torch
from torch import Tensor

from conformance.case import Case
from conformance.data.layouts import MAY_REFUSE
from conformance.diagnosis.diagnose import Allowance
from conformance.errors import NoAnswer, NotSupported, spelled_out, text_of, trace_of
from conformance.judging.comparison import Subject, launch_and_compare
from conformance.judging.pins import changed
from conformance.judging.vacuity import accepted, is_proved
from conformance.kernel import Kernel
from conformance.launching.launch import Launcher
from conformance.launching.raised import CaptureFailed, Damaged, KernelRaised
from conformance.launching.reference_guard import ReferenceGuard
from conformance.launching.snapshot import Snapshot
from conformance.operator import Shared
from conformance.registry import matrix, operator
from conformance.result import REJECTED, Result, Settings, blank_result, refusal, why_not_run
from conformance.verdicts.joint import Joint


def torch_device(settings: Settings) -> torch.device:
    return torch.device("cuda", 0) if settings.device == "cuda" else torch.device(settings.device)


# Failures after which the inputs are known to be as they were: the comparison has looked, no guard band was touched.
HARMLESS = frozenset({"nan-map", "inf-map", "exact", "bits", "budget", "published", "poison", "repeat"})


_KEPT = 1 << 18  # elements of an output that are kept for the next case
_ROWS = 8  # at least


class Judge:
    """Judges cases one after another; keeps what the cases of one group share, and the last case's reference."""

    def __init__(self, settings: Settings, vacuity: str = "off", allowance: Allowance | None = None) -> None:
        """``vacuity``: which cases prove first that they can fail ("smoke", "all", "off"). ``allowance``: which
        failures are diagnosed, by default some of many."""
        self.settings = settings
        self.vacuity = vacuity
        self._vacuous: dict[str, str | None] = {}
        self._before: dict[str, Tensor] = {}  # outputs of the case before, the first rows of them
        self._allowance = allowance or Allowance()
        self._guard = ReferenceGuard()
        self.device = torch_device(settings)
        self.shared = Shared()
        self.lost: str | None = None
        self._subject: tuple[str, Subject] | None = None

    def run(self, case: Case, kernel: Kernel) -> Result:
        """Never raises for what a kernel does; ConformanceError for a case or a file that is wrong itself."""
        try:
            return self._run(case, kernel)
        except NoAnswer as error:
            return blank_result(case, kernel, self.settings, "error", kind="exception", trace=trace_of(error, 6),
                                message=f"{case.id} on {kernel.name}: {error}")

    def _run(self, case: Case, kernel: Kernel) -> Result:
        reason = self.lost or why_not_run(case, kernel, self.settings)
        if reason:
            kind = "refused" if reason == refusal(case, kernel) else None
            return blank_result(case, kernel, self.settings, "not-run", message=reason, kind=kind, lane="route")
        start = time.perf_counter()
        blank = blank_result(case, kernel, self.settings, "pass")
        try:
            subject = self._prepare(case, blank.group)
            if (drift := changed(case, self.settings.sizes, subject.joint.references)) is not None:
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
            if self.lost_context(result):
                return result
            if result.kind not in HARMLESS or subject.touched():
                self.forget()  # a faulty kernel may have written anywhere
        elements = subject.joint.references.elements
        return replace(result, elements=elements, seconds=round(time.perf_counter() - start, 5))

    def ready(self, case: Case) -> Subject:
        """The case with its reference, as it was judged last or made anew."""
        return self._prepare(case, matrix(case.operator).group_of(case))

    def lost_context(self, result: Result) -> bool:
        """Whether the GPU cannot be used any more after this result; later cases are not run then."""
        if self._context_works():
            return False
        self.lost = f"the GPU context was lost by {result.case} on {result.kernel}: {result.message}"
        return True

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

    def _prepare(self, case: Case, group: str) -> Subject:
        if self._subject is not None and self._subject[0] == case.id:
            return self._subject[1]
        self._subject = None
        contract, device = operator(case.operator), self.device
        self.shared.enter(group)
        call = contract.inputs(case, self.settings.sizes, device, self.shared)
        call.set_poison(0)
        tensors = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}
        early = self._snapshots(call.written_over(), 0)
        call.set_poison(1)
        joint = Joint.of(call, contract.reference(call, self.shared))
        subject = Subject(joint, self._snapshots(tensors, 1), early, self._guard, self.shared)
        self._subject = case.id, subject
        return subject

    def _accepted(self, case: Case, subject: Subject) -> str | None:
        """What is wrong and yet accepted by the case, looked for once per case."""
        if not is_proved(case, self.vacuity):
            return None
        if case.id not in self._vacuous:
            of = subject.joint.references.of
            self._vacuous[case.id] = accepted(subject.call, subject.joint.references, self._before)
            self._before = {name: _beginning(one.golden).cpu() for name, one in of.items()}
        return self._vacuous[case.id]

    def _snapshots(self, tensors: dict[str, Tensor], poison: int) -> dict[str, Snapshot]:
        """Before any kernel ran; of tensors that the group shares they are taken once for each poison."""
        return {name: self.shared.get(("snapshot", name, id(value), poison), functools.partial(Snapshot.of, value))
                if self.shared.holds(value) else Snapshot.of(value) for name, value in tensors.items()}

    def _judged(self, case: Case, kernel: Kernel, subject: Subject, blank: Result) -> Result:
        contract = operator(case.operator)
        launcher = Launcher(contract, kernel, subject.call, self.settings.sizes, self.device, self.shared)
        try:
            verdict, path = launch_and_compare(launcher, subject, self._allowance)
        except Damaged as damage:
            return replace(blank, state="fail", kind="guard", message=f"{case.id} on {kernel.name}: {damage}")
        except KernelRaised as raised:
            error = raised.__cause__
            assert error is not None
            if isinstance(error, NotSupported):
                return replace(blank, state="not-run", lane="route", kind="refused",
                               message=f"not supported by {kernel.name}: {text_of(error) or 'it does not say why'}")
            if case.get("layout") in MAY_REFUSE and isinstance(error, (ValueError, TypeError)):
                message = f"rejected, as the contract allows: {text_of(error)}"
                return replace(blank, path=REJECTED, level=kernel.promise, message=message)
            where = ""
            if isinstance(raised, CaptureFailed):
                where = "cannot be captured in a CUDA graph (where that is so by design, declare graph_safe=False): "
            text = f"{case.id} on {kernel.name}: {where}raised {spelled_out(error)}"
            return replace(blank, state="error", kind="exception", message=text, trace=trace_of(error, 12))
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


def _beginning(output: Tensor) -> Tensor:
    """Its first rows, some hundred thousand elements: more would take longer to fetch from a GPU than to judge."""
    return output[: max(_ROWS, _KEPT * len(output) // max(1, output.numel()))]
