"""From a failed launch to its diagnosis: what else is run to tell explanations apart, and what a verdict says then."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import PROBE, Allowance, Diagnosis, diagnose
from conformance.diagnosis.evidence import gather
from conformance.diagnosis.exact import diagnose_exact
from conformance.errors import KernelRaised
from conformance.formats import bits
from conformance.joint import Joint
from conformance.launch import Launched, Launcher
from conformance.operator import Call, Fault, FaultyOutputs, Reference, References, Shared
from conformance.verdict import Verdict, check_form, judge

KINDS = frozenset({"nan-map", "inf-map", "exact", "bits", "budget", "published", "poison"})
_MOST_CONFIGS = 16


def explain(verdict: Verdict, launcher: Launcher, launched: Launched, joint: Joint, first: Joint, name: str,
            allowance: Allowance) -> Verdict:
    """The failed verdict with the best explanation in front, as long as ``allowance`` grants one.

    ``joint`` belongs to the launched call, ``first`` to the launcher's own, ``name`` to the output that failed.
    """
    result, reference = launched.results[name], joint.references.of[name]
    comparable = bool(launcher.operator.faulty_outputs) if reference.exact else result.dim() == 2
    if verdict.kind not in KINDS or not comparable or not allowance.grants(launcher.kernel.name):
        return verdict
    try:
        said = io.StringIO()  # what the kernel prints was printed by the failed launch
        with allowance, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            found = (_of_exact_outputs(launcher, launched, joint, first) if reference.exact else
                     _diagnosis(_Failure(launcher, launched, reference, name), first.references.of[name]))
    except Exception as error:  # the failure itself must be reported whatever happens here
        return replace(verdict, message=f"{verdict.message} (no diagnosis: {type(error).__name__}: {error})")
    if found is None:
        return verdict
    return replace(verdict, message=f"{found.text}. {verdict.message}", details={"diagnosis": found.details()})


@dataclass(frozen=True)
class _Failure:
    """A launch of which one output is wrong: that output by its name, its result, and its reference."""

    launcher: Launcher
    launched: Launched
    reference: Reference
    name: str

    @functools.cached_property
    def part(self) -> Launched:
        return self.launched.part(self.name)

    @property
    def of_another_call(self) -> bool:
        return self.launched.call is not self.launcher.call

    def again(self, poison: int | None, launcher: Launcher | None = None, config: str | None = None) -> Tensor | None:
        """The output of the same launch again, None where it has none; without ``poison`` inputs are left as they
        are. ``launcher``, ``config``: others than the launch's own."""
        launcher = launcher or self.launcher
        if poison is None:
            launcher = replace(launcher, call=replace(launcher.call, set_poison=lambda which: None))
        try:
            again = launcher.once("diagnosis", self.launched.poison if poison is None else poison,
                                  config or self.launched.config)
        except KernelRaised:
            return None
        result = again.results.get(self.name)
        bad_form = check_form(result, self.part.call.output, launcher.device, launcher.kernel.fills_out)
        return None if bad_form or again.overrun else result

    def holds(self, result: Tensor | None) -> bool:
        """Whether the output is right when it is this one."""
        promise = self.launcher.kernel.promise
        return result is not None and judge(result, self.part.call, self.reference, promise, 0.0).passed


def _of_exact_outputs(launcher: Launcher, launched: Launched, joint: Joint, first: Joint) -> Diagnosis | None:
    faults = launcher.operator.faulty_outputs
    if launched.call is not launcher.call:
        earlier = {name: reference.golden for name, reference in first.references.of.items()}
        faults = (FaultyOutputs("remembered-result", "the result of an earlier call at the same addresses is returned",
                                lambda call: earlier), *faults)
    launched.call.set_poison(launched.poison)
    return diagnose_exact(launched.results, launched.call, joint.references.settled(launched.results), faults)


def _diagnosis(failure: _Failure, first: Reference) -> Diagnosis | None:
    """``first``: the output's reference of the launcher's own call, where the launch was of another."""
    part, launcher, reference = failure.part, failure.launcher, failure.reference
    if not failure.of_another_call and (history := _history(failure)) is not None:
        return Diagnosis("history", history, 0.0, int((bits(part.result) != bits(reference.golden)).sum()))
    observed = [gather(part.result.clone(), part.call, reference, part.poison)]
    faults = launcher.operator.faults
    if failure.of_another_call:
        return diagnose(observed, faults, tuple(_remembered(launcher, first, failure.name)))
    if faults and (again := failure.again(PROBE)) is not None:  # a poison whose rows all differ
        # What is not written is not written again: the probe is held to the places seen first.
        observed.append(replace(gather(again, part.call, reference, PROBE), left=observed[0].left))
    found = diagnose(observed, faults)
    if found is not None and part.config is not None:
        known = launcher.kernel.configs[:_MOST_CONFIGS]
        wrong = [config for config in known if not failure.holds(failure.again(part.poison, config=config))]
        if 0 < len(wrong) < len(known):
            names = f"configuration {wrong[0]} is" if len(wrong) == 1 else f"configurations {', '.join(wrong)} are"
            return replace(found, key="one-config", sentence=f"only {names} wrong: {found.sentence}")
    return found


def _history(failure: _Failure) -> str | None:
    """What shows that not the arguments but earlier calls make the result wrong: it is right on copies of them.

    Only asked where copies lie in memory as the arguments do.
    """
    launcher, poison = failure.launcher, failure.launched.poison
    call = launcher.call
    if call.case.get("layout", "contiguous") != "contiguous":
        return None
    before = bits(failure.part.result).clone()
    call.set_poison(poison)
    copies = replace(launcher, call=replace(call, arguments={
        name: value.clone() if isinstance(value, Tensor) else value for name, value in call.arguments.items()}))
    there = [failure.again(*how) for how in ((None, copies), (poison, launcher)) * 2]
    right = [failure.holds(one) for one in there]
    if all(right):
        return "wrong only once: called again it is right, so the result depends on earlier calls or on chance"
    same = [one is not None and torch.equal(bits(one), before) for one in there]
    if right == [True, False, True, False] and same[1] and same[3]:
        return "wrong at these addresses only: on copies of its arguments it is right, so it remembers earlier calls"
    return None


def _remembered(launcher: Launcher, first: Reference, name: str) -> Iterator[Fault]:
    """One argument, or the whole result, is that of the call before at the same addresses."""
    earlier = launcher.call

    def result(call: Call, columns: Tensor) -> Tensor | None:
        return _columns(first.golden, columns) if first.golden.shape == call.output.shape else None

    yield Fault("remembered-result", "the result of an earlier call at the same addresses is returned", result)
    for argument, value in earlier.arguments.items():
        if isinstance(value, Tensor):
            yield Fault(f"remembered-{argument}", f"{argument} of an earlier call at the same address is used",
                        _with_argument(launcher, argument, value, name))


def _with_argument(launcher: Launcher, argument: str, value: Tensor, name: str
                   ) -> Callable[[Call, Tensor], Tensor | None]:
    def predict(call: Call, columns: Tensor) -> Tensor | None:
        now = call.arguments[argument]
        if now is None or now.shape != value.shape:
            return None
        mixed = replace(call, arguments={**call.arguments, argument: value})
        return _columns(References.made_of(launcher.operator.reference(mixed, Shared())).of[name].golden, columns)

    return predict


def _columns(tensor: Tensor, columns: Tensor) -> Tensor:
    return bits(tensor)[:, columns].view(tensor.dtype)
