"""From a failed launch to its diagnosis: what else is run to tell explanations apart, and what a verdict says then."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import PROBE, REACHED, Allowance, Diagnosis, diagnose
from conformance.diagnosis.evidence import Evidence, gather
from conformance.diagnosis.exact import UNNAMED, Observed, diagnose_exact
from conformance.diagnosis.nearby import brought_evidence, brought_outputs
from conformance.formats import bits
from conformance.launching.launch import Launched, Launcher
from conformance.launching.raised import KernelRaised
from conformance.operator import Call, Fault, FaultyOutputs, Reference, References, Results, Shared
from conformance.result import NOT_LOOKED_FOR
from conformance.verdicts.joint import Joint
from conformance.verdicts.verdict import Verdict, judge

KINDS = frozenset({"nan-map", "inf-map", "exact", "bits", "budget", "published", "poison"})
_MOST_CONFIGS = 16


def explain(verdict: Verdict, launcher: Launcher, launched: Launched, joint: Joint, first: Joint, name: str,
            allowance: Allowance) -> Verdict:
    """The failed verdict with the best explanation in front, as long as ``allowance`` grants one.

    ``joint`` belongs to the launched call, ``first`` to the launcher's own, ``name`` to the output that failed.
    """
    result, reference = launched.results[name], joint.references.of[name]
    comparable = bool(launcher.operator.faulty_outputs) if reference.exact else result.dim() == 2
    kernel = f"{launcher.operator.name}/{launcher.kernel.name}"
    if verdict.kind not in KINDS or not comparable:
        return verdict
    if not allowance.grants(kernel, verdict.kind):
        note = "its cause was not looked for, as that of others was: run alone, it is"
        return replace(verdict, message=f"{verdict.message} ({note})", details={"cause": NOT_LOOKED_FOR})
    try:
        said = io.StringIO()  # what the kernel prints was printed by the failed launch
        with allowance, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            failure = _Failure(launcher, launched, joint, name)
            found = (_of_exact_outputs(failure, first, verdict.kind) if reference.exact else
                     _diagnosis(failure, first.references.of[name], verdict.kind))
    except Exception as error:  # the failure itself must be reported whatever happens here
        return replace(verdict, message=f"{verdict.message} (no diagnosis: {type(error).__name__}: {error})")
    if found is None:
        return verdict
    return replace(verdict, message=f"{found.text}. {verdict.message}", details={"diagnosis": found.details()})


@dataclass(frozen=True)
class _Failure:
    """A launch of which one output is wrong: that output by its name, and what all outputs must be."""

    launcher: Launcher
    launched: Launched
    joint: Joint
    name: str

    @functools.cached_property
    def part(self) -> Launched:
        return self.launched.part(self.name)

    @property
    def reference(self) -> Reference:
        return self.joint.references.of[self.name]

    @property
    def of_another_call(self) -> bool:
        return self.launched.call is not self.launcher.call

    def again(self, poison: int | None, launcher: Launcher | None = None, config: str | None = None) -> Results | None:
        """The outputs of the same launch again, None where their form is wrong; without ``poison`` inputs are left as
        they are. ``launcher``, ``config``: others than the launch's own."""
        launcher = launcher or self.launcher
        if poison is None:
            launcher = replace(launcher, call=replace(launcher.call, set_poison=lambda which: None))
        try:
            again = launcher.once("diagnosis", self.launched.poison if poison is None else poison,
                                  config or self.launched.config)
        except KernelRaised:
            return None
        bad_form = self.joint.problem(again.results, launcher.device, launcher.kernel.fills_out)
        return None if bad_form or again.damage() else again.results

    def by_history(self, sentence: str) -> Diagnosis:
        wrong = bits(self.part.result) != bits(self.reference.golden)
        return Diagnosis("history", sentence, 0.0, int(wrong.sum()))

    def holds(self, results: Results | None) -> bool:
        """Whether these results are right."""
        if results is None:
            return False
        promise, references = self.launcher.kernel.promise, self.joint.references
        required = references.of if promise == "bit-exact" else references.settled(results)
        return all(judge(results[name], self.launched.call.part(name), reference, promise, 0.0).passed
                   for name, reference in required.items())


def _of_exact_outputs(failure: _Failure, first: Joint, kind: str) -> Diagnosis | None:
    """``first``: of the launcher's own call, where the launch was of another. kind: of the verdict; "bits" is an order
    that only kernels without a promise of bit-exactness may use."""
    launcher, launched, references = failure.launcher, failure.launched, failure.joint.references
    faults = launcher.operator.faulty_outputs
    if failure.of_another_call:
        earlier = {name: reference.golden for name, reference in first.references.of.items()}
        faults = (FaultyOutputs("remembered-result", "the result of an earlier call at the same addresses is returned",
                                lambda call: earlier), *faults)
    elif (history := _history(failure)) is not None:
        return failure.by_history(history)
    def observed(results: Results, poison: int) -> Observed:
        return Observed(results, references.of if kind == "bits" else references.settled(results), poison)

    launches = [observed(launched.results, launched.poison)]
    if not failure.of_another_call and (again := failure.again(1 - launched.poison)) is not None:
        launches.append(observed(again, 1 - launched.poison))  # what the poison is by chance is not so twice
    known = failure.joint.predictions
    found = (diagnose_exact(launched.call, launches, faults, known) if failure.of_another_call else
             diagnose_exact(*brought_outputs(launched.call, launches), faults, known))
    if found is None or kind != "bits" or found.key not in UNNAMED:
        return found
    return Diagnosis("other-order", f"right, but in another order than the golden's; {REACHED}", 0.0, found.wrong)


def _diagnosis(failure: _Failure, first: Reference, kind: str) -> Diagnosis | None:
    """``first``: the output's reference of the launcher's own call, where the launch was of another. kind: of the
    verdict; of others than "bits" a result that is right by itself is not what failed."""
    part, launcher, reference = failure.part, failure.launcher, failure.reference
    if not failure.of_another_call and (history := _history(failure)) is not None:
        return failure.by_history(history)

    if kind != "bits" and (excluded := _excluded(failure)) is not None:
        return excluded

    def observe(result: Tensor, poison: int) -> Evidence:
        found = gather(result, part.call, reference, poison)
        return found if kind == "bits" else replace(found, kept=False)

    observed = [observe(part.result.clone(), part.poison)]
    faults = launcher.operator.faults
    if failure.of_another_call:
        return diagnose(observed, faults, tuple(_remembered(launcher, first, failure.name)))
    if faults and (again := failure.again(PROBE)) is not None:  # a poison whose rows all differ
        # What is not written is not written again: the probe is held to the places seen first.
        probe = gather(again[failure.name], part.call, reference, PROBE)
        if probe.kept and kind != "bits":  # right with this poison: other roundings than the golden's are not wrong
            probe = replace(probe, kept=False, wrong=torch.zeros_like(probe.wrong))
        observed.append(replace(probe, left=observed[0].left))
    found = diagnose(brought_evidence(observed), faults, predictions=failure.joint.predictions)
    if found is not None and part.config is not None:
        known = launcher.kernel.configs[:_MOST_CONFIGS]
        wrong = [config for config in known if not failure.holds(failure.again(part.poison, config=config))]
        if 0 < len(wrong) < len(known):
            names = f"configuration {wrong[0]} is" if len(wrong) == 1 else f"configurations {', '.join(wrong)} are"
            return replace(found, key="one-config", sentence=f"only {names} wrong: {found.sentence}")
    return found


def _excluded(failure: _Failure) -> Diagnosis | None:
    """The first way to compute of those that the contract rules out by which every element would be right."""
    part = failure.part
    for way in failure.launcher.operator.excluded:
        allowed = way.reference(part.call)
        if allowed is not None and judge(part.result, part.call, allowed, "within-budget", 0.0).passed:
            wrong = int(gather(part.result, part.call, failure.reference, part.poison).wrong.sum())
            return Diagnosis(way.key, way.sentence, 1.0, wrong)
    return None


def _history(failure: _Failure) -> str | None:
    """What shows that not the arguments but earlier calls make the result wrong: it is right on copies of them.

    Only asked where copies lie in memory as the arguments do.
    """
    launcher, poison = failure.launcher, failure.launched.poison
    call = launcher.call
    if call.case.get("layout", "contiguous") != "contiguous":
        return None
    before = {name: bits(one).clone() for name, one in failure.launched.results.items()}
    call.set_poison(poison)
    copies = replace(launcher, call=replace(call, arguments={
        name: value.clone() if isinstance(value, Tensor) else value for name, value in call.arguments.items()}))
    there = [failure.again(*how) for how in ((None, copies), (poison, launcher)) * 2]
    right = [failure.holds(one) for one in there]
    if all(right):
        return "wrong only once: called again it is right, so the result depends on earlier calls or on chance"
    same = [one is not None and all(torch.equal(bits(one[name]), known) for name, known in before.items())
            for one in there]
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
