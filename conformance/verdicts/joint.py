"""All outputs of one result together: their forms, which of them is wrong, and whether two results are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.diagnosis.predictions import Predictions
from conformance.formats import bits
from conformance.kernel import LEVELS
from conformance.launching.guards import shares_memory
from conformance.operator import ONLY, Call, Reference, References, Results
from conformance.verdicts.verdict import Verdict, check_form, differing, golden_fraction, judge

_ANY_ORDER = "within-budget"  # the best level of a result in another order than the golden's


@dataclass(frozen=True)
class Joint:
    """What all outputs of one call must be. ``fraction(name)``: budget fraction of an output that is bit-exact.
    ``predictions``: what faults predict for the call, as far as failures of kernels have asked."""

    call: Call
    references: References
    fraction: Callable[[str], float]
    predictions: Predictions = field(default_factory=Predictions)

    @classmethod
    def of(cls, call: Call, reference: Reference | References) -> Joint:
        references = References.made_of(reference)
        told = {name: golden_fraction(one) for name, one in references.of.items()}
        return cls(call, references, lambda name: told[name]())

    def problem(self, results: Mapping[str, Any], device: torch.device, in_place: bool) -> str | None:
        """What is wrong with the results' form, or None."""
        forms = self.call.outputs
        if set(results) != set(forms):
            returned = "one value" if set(results) == {ONLY} else ", ".join(map(str, results)) or "no output"
            return f"returned {returned}; {', '.join(forms)} are required, by name or in this order"
        for name, form in forms.items():
            found = check_form(results[name], form, device, in_place)
            if found is None and results[name].numel() and (of := shares_memory(results[name], self.call.arguments)):
                found = f"the result is a view of the input {of}"
            if found is not None:
                return self._told(name, found)
        return None

    def judge(self, results: Results, promise: str) -> tuple[Verdict, str]:
        """The verdict on the whole, and the output that decides it: the first that fails, or the weakest. Where the
        contract leaves an order open, any holds, unless bit-exactness is promised."""
        found, name = self._decided(results, self.references.of, promise)
        if found.passed or self.references.settle is None:
            return found, name
        other, at = self._decided(results, self.references.settled(results), promise)
        if not other.passed:
            return other, at
        if promise == "bit-exact":
            text = f"{found.message} (right in another order, which only kernels that do not promise bit-exact may use)"
            return replace(found, kind="bits", message=text), name
        level = max(other.level or _ANY_ORDER, _ANY_ORDER, key=LEVELS.index)
        return replace(other, level=level), at

    def exact(self) -> Verdict:
        """The verdict on results that have the goldens' bits, all of them."""
        return max((Verdict("bit-exact", budget_fraction=None if reference.exact else self.fraction(name))
                    for name, reference in self.references.of.items()), key=weakness)

    def difference(self, one: Results, two: Results) -> tuple[str, Tensor] | None:
        """The first output in which two results of the call differ where nothing is left open, the order being that
        of the first; with the mask of the elements. None where there is none."""
        if all(torch.equal(bits(one[name]), bits(two[name])) for name in one):
            return None
        references = self.references.settled(one)
        masks = ((name, differing(one[name], two[name], references[name])) for name in references)
        return next(((name, mask) for name, mask in masks if mask is not None), None)

    def _decided(self, results: Results, references: Mapping[str, Reference], promise: str
                 ) -> tuple[Verdict, str]:
        found = {name: judge(results[name], self.call.part(name), reference, promise, self.fraction(name))
                 for name, reference in references.items()}
        failed = [name for name, verdict in found.items() if not verdict.passed]
        if not failed:
            name = max(found, key=lambda key: weakness(found[key]))
            return found[name], name
        name, *others = failed
        also = f"; {', '.join(others)} too {'are' if len(others) > 1 else 'is'} wrong" if others else ""
        verdict = found[name]
        first = verdict.first if self._single or verdict.first is None else {"output": name, **verdict.first}
        return replace(verdict, message=self._told(name, verdict.message) + also, first=first), name

    @property
    def _single(self) -> bool:
        return len(self.call.outputs) == 1

    def _told(self, name: str, text: str) -> str:
        return text if self._single else f"{name}: {text}"


def weakness(found: Verdict) -> tuple[int, float]:
    """Of those that passed the greatest counts."""
    return LEVELS.index(found.level or ""), found.budget_fraction or 0.0
