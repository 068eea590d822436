"""Judging one case on one kernel: inputs, reference, launches, guards, verdict, and the result record."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.errors import NotSupported
from conformance.formats import bits
from conformance.guards import checksum, unwritten
from conformance.kernel import Kernel
from conformance.launch import KernelRaised, Launched, Launcher
from conformance.operator import Call, Reference, Shared
from conformance.registry import matrix, operator, selector
from conformance.verdict import Verdict, check_form, golden_fraction, judge

MAY_REJECT = ("strided", "unaligned")  # layouts that a kernel may refuse instead of taking
STATES = ("pass", "fail", "error", "crash", "timeout", "not-run")


@dataclass(frozen=True)
class Result:
    """One line of the records: how one case went on one kernel. ``kind`` is the kind of failure."""

    case: str
    operator: str
    variant: str
    kernel: str
    family: str
    tiers: list[str]
    params: dict[str, str]
    group: str
    state: str
    promised: str
    level: str | None = None
    kind: str | None = None
    message: str = ""
    budget_fraction: float | None = None
    max_error: float | None = None
    wrong: int = 0
    elements: int = 0
    first: dict[str, Any] | None = None
    path: str | None = None
    lane: str = "execute"
    seconds: float = 0.0
    worker: str = ""
    rerun: str = ""
    details: dict[str, Any] | None = None
    trace: str | None = None
    type: str = field(default="result")

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """What a run decides for all its cases."""

    device: str = "cpu"
    sizes: str = "reduced"
    arch: str = "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device(self.device)


def rerun_command(case: str, kernels: str, settings: Settings) -> str:
    return f"pytest --case '{case}' --kernels {kernels} --sizes {settings.sizes} --arch {settings.arch}"


def blank_result(case: Case, kernel: Kernel, settings: Settings, state: str, **more: Any) -> Result:
    """A result with everything that is known before the case runs."""
    return Result(
        case=case.id,
        operator=case.operator,
        variant=operator(case.operator).variant(case),
        kernel=kernel.name,
        family=case.family,
        tiers=sorted(case.tiers),
        params=dict(case.params),
        group=matrix(case.operator).group_of(case),
        state=state,
        promised=kernel.promise,
        rerun=rerun_command(case.id, selector(kernel), settings),
        worker=os.environ.get("PYTEST_XDIST_WORKER", "main"),
        **more,
    )


def why_not_run(case: Case, kernel: Kernel, settings: Settings) -> str | None:
    """Why the case cannot be executed here on this kernel, or None."""
    wanted = matrix(case.operator).devices(case)
    if wanted and settings.device not in wanted:
        return f"{case.family} needs {' or '.join(wanted)}"
    if settings.device not in kernel.devices:
        return f"{kernel.name} runs on {' or '.join(kernel.devices)}"
    reason = kernel.requires(settings.device) if kernel.requires else None
    if reason:
        return reason
    reason = kernel.supports(case.params) if kernel.supports else None
    return f"not supported by {kernel.name}: {reason}" if reason else None


@dataclass(frozen=True)
class _Subject:
    """One case made ready: its call, its reference, and the checksums of its inputs before any kernel ran."""

    call: Call
    reference: Reference
    sums: dict[str, int]
    golden_fraction: Callable[[], float]


class Judge:
    """Judges cases one after another; keeps what the cases of one group share, and the last case's reference."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shared = Shared()
        self.lost: str | None = None
        self._subject: tuple[str, _Subject] | None = None

    def run(self, case: Case, kernel: Kernel) -> Result:
        """Never raises for what a kernel does; ConformanceError for a case or a file that is wrong itself."""
        reason = self.lost or why_not_run(case, kernel, self.settings)
        if reason:
            return blank_result(case, kernel, self.settings, "not-run", message=reason, lane="route")
        start = time.perf_counter()
        blank = blank_result(case, kernel, self.settings, "pass")
        try:
            subject = self._prepare(case, blank.group)
            with torch_settings_kept():
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
        contract, device = operator(case.operator), self.settings.torch_device
        self.shared.enter(group)
        call = contract.inputs(case, self.settings.sizes, device, self.shared)
        call.set_poison(1)
        reference = contract.reference(call, self.shared)
        fraction = functools.lru_cache(lambda: golden_fraction(reference))
        subject = _Subject(call, reference, self._checksums(call), fraction)
        self._subject = case.id, subject
        return subject

    def _checksums(self, call: Call) -> dict[str, int]:
        """Checksums before any kernel ran; those of tensors that the group shares are taken once."""
        return {
            name: self.shared.get(("checksum", name), functools.partial(checksum, value))
            if self.shared.holds(value) else checksum(value)
            for name, value in call.arguments.items() if isinstance(value, Tensor)
        }

    def _judged(self, case: Case, kernel: Kernel, subject: _Subject, blank: Result) -> Result:
        contract = operator(case.operator)
        launcher = Launcher(
            contract, kernel, subject.call, self.settings.sizes, self.settings.torch_device, self.shared
        )
        try:
            verdict, path = _launch_and_compare(launcher, subject)
        except KernelRaised as raised:
            error = raised.__cause__
            if isinstance(error, NotSupported):
                return replace(blank, state="not-run", lane="route", message=f"not supported by {kernel.name}: {error}")
            if case.get("layout") in MAY_REJECT and isinstance(error, (ValueError, TypeError)):
                message = f"rejected, as the contract allows: {error}"
                return replace(blank, path="rejected", level=kernel.promise, message=message)
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
            path=path,
        )


def _launch_and_compare(launcher: Launcher, subject: _Subject) -> tuple[Verdict, str | None]:
    """Launch in the case's mode. Every launch must hold; launches of the same call must agree bit by bit."""
    kernel, call = launcher.kernel, launcher.call
    verdict, path = Verdict(None), None
    first: tuple[Launched, Tensor] | None = None
    for launched in launcher.launch(call.case.get("launch", "plain")):
        problem = check_form(launched.result, call.output, launcher.device)
        if launched.overrun or problem:
            kind, what = ("guard", launched.overrun) if launched.overrun else ("form", problem)
            return Verdict(None, kind, f"{launched.label}: {what}"), launched.path
        if first is not None and launched.call is call:
            if torch.equal(bits(launched.result), bits(first[1])):
                continue
            if kernel.repeatable:
                return _disagreement(launcher, first, launched), launched.path
        same = launched.call is call
        reference = subject.reference if same else launcher.operator.reference(launched.call, Shared())
        fraction = subject.golden_fraction() if same else golden_fraction(reference)
        found = judge(launched.result, launched.call, reference, kernel.promise, fraction)
        if not found.passed:
            return _explained(found, launched), launched.path
        if first is None:
            first, verdict, path = (launched, launched.result.clone()), found, launched.path
    call.set_poison(1)
    changed = [name for name, value in subject.sums.items() if checksum(call.arguments[name]) != value]
    if changed:
        return replace(verdict, kind="input-changed", message=f"wrote to its input {', '.join(changed)}"), path
    return verdict, path


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
    """Two launches of one call differ: run the first one's poison again to tell poison from chance."""
    result = second.result.clone()
    differs = bits(result) != bits(first[1])
    place = differs.nonzero()[0].tolist()
    again = launcher.once("again", first[0].poison)
    repeatable = torch.equal(bits(again.result), bits(first[1]))
    kind = "poison" if repeatable and first[0].poison != second.poison else "repeat"
    what = (
        "depends on what stood in the output, in padding or in rows that no slot refers to"
        if kind == "poison"
        else "is not repeatable"
    )
    one, two = float(first[1][tuple(place)]), float(result[tuple(place)])
    message = f"the result {what}: {int(differs.sum())} elements differ between '{first[0].label}' and "
    message += f"'{second.label}', first at {place}: {one:.9g} and {two:.9g}"
    return Verdict(None, kind, message, wrong=int(differs.sum()), first={"index": place, "expected": one, "actual": two})


@contextlib.contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Put back what a kernel may change for the whole process: default dtype, TF32, determinism, grad mode."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    precision, grad = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(grad)
