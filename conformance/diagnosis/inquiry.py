"""From a failed launch to its diagnosis: what else is run to tell explanations apart, and what a verdict says then."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import PROBE, Allowance, Diagnosis, diagnose
from conformance.diagnosis.evidence import Evidence, gather
from conformance.formats import bits, format_of
from conformance.launch import KernelRaised, Launched, Launcher
from conformance.operator import Call, Fault, Reference, Shared
from conformance.verdict import Verdict, check_form, judge

KINDS = frozenset({"nan-map", "inf-map", "exact", "bits", "budget", "published", "poison"})
_MOST_CONFIGS = 16


def explain(verdict: Verdict, launcher: Launcher, launched: Launched, reference: Reference, first: Reference,
            allowance: Allowance) -> Verdict:
    """The failed verdict with the best explanation in front, as long as ``allowance`` grants one.

    ``reference`` is that of the launched call, ``first`` that of the launcher's own.
    """
    result = launched.result
    comparable = verdict.kind in KINDS and result.dim() == 2 and format_of(result.dtype) is not None
    if not comparable or not allowance.grants(launcher.kernel.name):
        return verdict
    try:
        said = io.StringIO()  # what the kernel prints was printed by the failed launch
        with allowance, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            found = _diagnosis(launcher, launched, reference, first)
    except Exception as error:  # the failure itself must be reported whatever happens here
        return replace(verdict, message=f"{verdict.message} (no diagnosis: {type(error).__name__}: {error})")
    if found is None:
        return verdict
    return replace(verdict, message=f"{found.text}. {verdict.message}", details={"diagnosis": found.details()})


def _diagnosis(launcher: Launcher, launched: Launched, reference: Reference, first: Reference) -> Diagnosis | None:
    if launched.call is launcher.call and (history := _history(launcher, launched, reference)) is not None:
        return Diagnosis("history", history, 0.0, int((bits(launched.result) != bits(reference.golden)).sum()))
    observed = [gather(launched.result.clone(), launched.call, reference, launched.poison)]
    faults = launcher.operator.faults
    if launched.call is not launcher.call:
        return diagnose(observed, faults, tuple(_remembered(launcher, first)))
    if faults and (probed := _probe(launcher, launched, reference)) is not None:
        # What is not written is not written again: the probe is held to the places seen first.
        observed.append(replace(probed, left=observed[0].left))
    found = diagnose(observed, faults)
    if found is not None and launched.config is not None:
        wrong = [config for config in launcher.kernel.configs[:_MOST_CONFIGS] if _fails(launcher, launched, reference,
                                                                                       config)]
        if 0 < len(wrong) < len(launcher.kernel.configs[:_MOST_CONFIGS]):
            names = f"configuration {wrong[0]} is" if len(wrong) == 1 else f"configurations {', '.join(wrong)} are"
            return replace(found, key="one-config", sentence=f"only {names} wrong: {found.sentence}")
    return found


def _probe(launcher: Launcher, launched: Launched, reference: Reference) -> Evidence | None:
    """The same launch with a poison whose rows all differ; None when that does not end in a result."""
    again = _again(launcher, launched, PROBE)
    return None if again is None else gather(again, launcher.call, reference, PROBE)


def _history(launcher: Launcher, launched: Launched, reference: Reference) -> str | None:
    """What shows that not the arguments but earlier calls make the result wrong: it is right on copies of them.

    Only asked where copies lie in memory as the arguments do.
    """
    call = launcher.call
    if call.case.get("layout", "contiguous") != "contiguous":
        return None
    before = bits(launched.result).clone()
    call.set_poison(launched.poison)
    copies = replace(launcher, call=replace(call, arguments={
        name: value.clone() if isinstance(value, Tensor) else value for name, value in call.arguments.items()}))
    there = [_again(*how) for how in ((copies, launched, None), (launcher, launched, launched.poison)) * 2]
    right = [one is not None and judge(one, call, reference, launcher.kernel.promise, 0.0).passed for one in there]
    if all(right):
        return "wrong only once: called again it is right, so the result depends on earlier calls or on chance"
    same = [one is not None and torch.equal(bits(one), before) for one in there]
    if right == [True, False, True, False] and same[1] and same[3]:
        return "wrong at these addresses only: on copies of its arguments it is right, so it remembers earlier calls"
    return None


def _fails(launcher: Launcher, launched: Launched, reference: Reference, config: str) -> bool:
    again = _again(launcher, replace(launched, config=config), launched.poison)
    return again is None or not judge(again, launcher.call, reference, launcher.kernel.promise, 0.0).passed


def _again(launcher: Launcher, launched: Launched, poison: int | None) -> Tensor | None:
    """The result of the same launch again, None where it has none; without ``poison`` inputs are left as they are."""
    if poison is None:
        launcher = replace(launcher, call=replace(launcher.call, set_poison=lambda which: None))
    try:
        again = launcher.once("diagnosis", launched.poison if poison is None else poison, launched.config)
    except KernelRaised:
        return None
    bad_form = check_form(again.result, launched.call.output, launcher.device, launcher.kernel.fills_out)
    return None if bad_form or again.overrun else again.result


def _remembered(launcher: Launcher, first: Reference) -> Iterator[Fault]:
    """One argument, or the whole result, is that of the call before at the same addresses."""
    earlier = launcher.call

    def result(call: Call, columns: Tensor) -> Tensor | None:
        return _columns(first.golden, columns) if first.golden.shape == call.output.shape else None

    yield Fault("remembered-result", "the result of an earlier call at the same addresses is returned", result)
    for name, value in earlier.arguments.items():
        if isinstance(value, Tensor):
            yield Fault(f"remembered-{name}", f"{name} of an earlier call at the same address is used",
                        _with_argument(launcher, name, value))


def _with_argument(launcher: Launcher, name: str, value: Tensor) -> Callable[[Call, Tensor], Tensor | None]:
    def predict(call: Call, columns: Tensor) -> Tensor | None:
        now = call.arguments[name]
        if now is None or now.shape != value.shape:
            return None
        mixed = replace(call, arguments={**call.arguments, name: value})
        return _columns(launcher.operator.reference(mixed, Shared()).golden, columns)

    return predict


def _columns(tensor: Tensor, columns: Tensor) -> Tensor:
    return bits(tensor)[:, columns].view(tensor.dtype)
