"""Proof that a mutation was applied: a case on which the mutant does something else than its unmutated twin."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from conformance.case import Case
from conformance.formats import bits
from conformance.judging.judge import HARMLESS, Judge
from conformance.kernel import Kernel
from conformance.launching.launch import Launcher
from conformance.launching.raised import KernelRaised
from conformance.launching.restore import process_kept
from conformance.launching.snapshot import checksum
from conformance.mutants import DIFFERS
from conformance.operator import Call
from conformance.registry import operator
from conformance.result import Result

_TRIES = 8  # a fault that depends on chance or on earlier calls does not show at once
_tries: Counter[tuple[str, str]] = Counter()  # in this process; of those that are proven, _TRIES


def noted(result: Result, judge: Judge, case: Case, kernel: Kernel, twin: Kernel) -> Result:
    """The result of a mutant; of one that failed, and has not been seen to differ from its twin yet, with the outcome
    of another try. Runs the mutant again, so it belongs within the case's time limit."""
    key = kernel.operator, kernel.name
    if result.state not in ("fail", "error") or judge.lost or _tries[key] >= _TRIES:
        return result
    found = differs(kernel, twin, case, judge)
    _tries[key] = _TRIES if found else _tries[key] + 1
    if result.kind not in HARMLESS:
        judge.forget()
    return replace(result, details={**(result.details or {}), DIFFERS: found})


def differs(mutant: Kernel, twin: Kernel, case: Case, judge: Judge) -> bool:
    """Whether the two leave other bits, raise differently, overrun, or change their inputs differently."""
    call = judge.ready(case).call
    right = _trace(twin, call, judge)  # first: it leaves the inputs as they are
    return _trace(mutant, call, judge) != right


def _trace(kernel: Kernel, call: Call, judge: Judge) -> list[object]:
    """What one kernel does with a call, launch by launch, as comparable facts."""
    launcher = Launcher(operator(kernel.operator), kernel, call, judge.settings.sizes, judge.device, judge.shared)
    seen: list[object] = []
    with torch.no_grad(), process_kept():
        try:
            for launched in launcher.launch(call.case.get("launch", "plain")):
                seen.append(launched.damage())
                for name, result in launched.results.items():
                    form = launched.call.outputs.get(name)
                    same_form = form is not None and isinstance(result, Tensor) and result.dtype == form.dtype
                    seen.append(checksum(bits(result.contiguous()).clone()) if same_form else str(type(result)))
        except KernelRaised as raised:
            seen.append(type(raised.__cause__).__name__)
    call.set_poison(1)
    seen += [checksum(value) for value in call.arguments.values() if isinstance(value, Tensor)]
    return seen
