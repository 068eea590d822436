"""Which faulty semantics explains a wrong result of outputs whose every bit is fixed. Each predicts all outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from conformance.diagnosis.diagnose import ENOUGH, Diagnosis
from conformance.formats import bits
from conformance.operator import Call, FaultyOutputs, Reference, Results


def diagnose_exact(results: Results, call: Call, references: Mapping[str, Reference], faults: Iterable[FaultyOutputs]
                   ) -> Diagnosis | None:
    """The explanation that predicts most of the wrong elements and calls fewest right ones wrong; None where none
    predicts half of them. ``references`` are in the order of the results, where that is open."""
    exact = {name: reference for name, reference in references.items() if reference.exact}
    wrong = {name: _differs(results[name], reference.golden, reference) for name, reference in exact.items()}
    count = sum(int(mask.sum()) for mask in wrong.values())
    fits: dict[str, tuple[float, float, str]] = {}  # fit, share of the wrong elements, sentence
    for fault in faults:
        predicted = fault.predict(call)
        if predicted is None or count == 0:
            continue
        hits = false = 0
        for name, reference in exact.items():
            missed = _differs(results[name], predicted[name], reference)
            hits += int((wrong[name] & ~missed).sum())
            false += int((~wrong[name] & missed).sum())
        fits[fault.key] = hits / (count + false), hits / count, fault.sentence
    if not fits or max(fits.values())[0] < ENOUGH:
        return None
    best = max(fits, key=lambda key: fits[key][0])  # the first of equals
    fit, share, sentence = fits[best]
    ties = tuple(key for key, other in fits.items() if key != best and other[0] >= fit - 1e-9)
    return Diagnosis(best, sentence, share, count, ties)


def _differs(one: Tensor, two: Tensor, reference: Reference) -> Tensor:
    differs = bits(one) != bits(two)
    return differs if reference.open is None else differs & ~reference.open
