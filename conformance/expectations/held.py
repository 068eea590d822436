"""Holding a result to what is expected of it on its architecture: turns a contradiction into a failure, and a failure
that was declared into the state "expected"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance.arch import Arch
from conformance.errors import ConformanceError
from conformance.expectations.rule import FAILURES, NATIVE, Expectation, Outcome, Range, contradiction, expected
from conformance.kernel import Kernel
from conformance.result import REJECTED, Result

# Failures of the suite or the machine say nothing of the kernel: no rule is about them.
_NOT_THE_KERNELS = ("suite", "memory")


def hold(result: Result, kernel: Kernel, arch: Arch, rules: Sequence[Expectation]) -> Result:
    """The result as its expectation makes it. A case that was not run for another reason than the kernel's refusal is
    left as it is, with the rule noted."""
    try:
        rule = expected(rules, point(result), arch) if rules else NATIVE
    except ConformanceError as error:
        return replace(result, expected={"kind": "ambiguous", "text": "ambiguous", "reason": str(error)})
    if rule is None:
        return replace(result, expected={"kind": "unknown", "text": "unknown", "reason": _unknown(rules, arch)})
    if rule is not NATIVE:
        result = replace(result, expected=_described(rule))
    if result.kind in _NOT_THE_KERNELS or (result.state == "not-run" and result.kind != "refused"):
        return result
    if result.path == REJECTED and result.message:  # the judge's word; a kernel that reports this path says nothing
        return result
    outcome = Outcome(result.lane, result.path, failure_of(result), result.message)
    found = contradiction(rule, outcome, kernel.native_paths) or _untold(outcome, kernel)
    if found is None:
        if rule.failure and outcome.failure:
            return replace(result, state="expected", message=f"{result.message} - declared: {rule.reason}")
        return result
    kind, sentence = found
    also = f"; {result.message}" if outcome.failure else ""
    state = result.state if result.state not in ("pass", "not-run") else "fail"
    return replace(result, state=state, kind=kind, message=f"{result.case} on {result.kernel}: {sentence}{also}")


def _untold(outcome: Outcome, kernel: Kernel) -> tuple[str, str] | None:
    """A path is reported, never inferred: a kernel that declares paths must say in each launch which one ran."""
    if outcome.failure or outcome.path is not None or outcome.lane != "execute" or not kernel.tells_path:
        return None
    return "path-unknown", (
        f"did not say in every launch which path ran; {kernel.name} declares paths (native= or route=), so its "
        "dispatcher must call report_path, in the thread that calls it"
    )


def point(result: Result) -> dict[str, str]:
    """What a rule may match: the case's parameters, operator, variant, family and kernel."""
    return {**result.params, "operator": result.operator, "variant": result.variant, "family": result.family,
            "kernel": result.kernel}


def failure_of(result: Result) -> str | None:
    """The kind of failure, of `expectation.FAILURES`, that a result shows."""
    if result.state in ("pass", "expected"):
        return None
    if result.state == "not-run":
        return "refused"
    if result.kind in FAILURES:
        return result.kind
    return {"fail": "mismatch", "crash": "process-exit", "timeout": "hang"}.get(result.state, "launch-error")


def _described(rule: Expectation) -> dict[str, str]:
    return {"kind": rule.kind, "text": str(rule), "reason": rule.reason, "source": rule.source, "where": rule.where}


def _unknown(rules: Sequence[Expectation], arch: Arch) -> str:
    limits = (c.above for rule in rules for c in rule.match.values() if isinstance(c, Range))
    names = {*limits, *(name for rule in rules for name in rule.facts)}
    missing = sorted(name for name in names if name and arch.fact(name) is None)
    return f"a rule asks for {', '.join(missing)}, which nobody could source for {arch.name}"
