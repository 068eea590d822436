"""Which faulty semantics explains a wrong result of outputs whose every bit is fixed. Each predicts all outputs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.diagnosis.diagnose import ENOUGH, Diagnosis
from conformance.diagnosis.predictions import Predictions
from conformance.formats import bits
from conformance.launching.guards import unwritten
from conformance.operator import Call, FaultyOutputs, Reference, Results


@dataclass(frozen=True)
class Observed:
    """One launch: its results, what they must be, in their own order where that is open, and the outputs' poison."""

    results: Results
    references: Mapping[str, Reference]
    poison: int

    @functools.cached_property
    def exact(self) -> dict[str, Reference]:
        return {name: reference for name, reference in self.references.items() if reference.exact}

    @functools.cached_property
    def wrong(self) -> dict[str, Tensor]:
        """Masks by output."""
        return {name: _differs(self.results[name], one.golden, one) for name, one in self.exact.items()}

    @property
    def count(self) -> int:
        return sum(int(mask.sum()) for mask in self.wrong.values())

    def measure(self, predicted: Results) -> tuple[int, int]:
        """(wrong elements that a prediction predicts, right ones that it calls wrong)."""
        hits = false = 0
        for name, reference in self.exact.items():
            missed = _differs(self.results[name], predicted[name], reference)
            hits += int((self.wrong[name] & ~missed).sum())
            false += int((~self.wrong[name] & missed).sum())
        return hits, false


def diagnose_exact(call: Call, observed: Sequence[Observed], faults: Iterable[FaultyOutputs],
                   predictions: Predictions | None = None) -> Diagnosis | None:
    """The explanation that predicts most of the wrong elements and calls fewest right ones wrong, over all launches;
    the first one is the failure itself, and names the numbers. Where none predicts half of them: where they lie. None
    where nothing is wrong in the first. predictions: what ``faults`` are known to predict for the call."""
    predictions, general = predictions or Predictions(), tuple(faults)
    failure = observed[0]
    count = failure.count
    if count == 0:
        return None
    known: dict[str, _Fit] = {}
    for one in observed:
        call.set_poison(one.poison)
        least = max((fit.share for fit in known.values()), default=0.0) * _WORTH
        for fault in (*_before(one), *general, *_after(one)):
            if one is not failure and (fault.key not in known or known[fault.key].share < least):
                continue
            predicted = predictions.of_outputs(fault, call, one.poison) if fault in general else fault.predict(call)
            if predicted is not None:
                fit = known.setdefault(fault.key, _Fit(fault.sentence))
                fit.add(*one.measure(predicted), one.count)
    best = max(known, key=lambda key: known[key].share)  # the first of equals
    fit = known[best]
    if fit.share < ENOUGH:
        return _by_place(failure.wrong, count)
    ties = tuple(key for key, other in known.items()
                 if key not in (best, *_PLACED) and other.share >= fit.share - 1e-9)
    sentence = f"{fit.sentence}, {_where(failure.wrong)}" if best in _PLACED else fit.sentence
    return Diagnosis(best, sentence, fit.first, count, ties)


class _Fit:
    """How well one explanation fits: over all launches, its hits among the wrong elements and its false claims."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence
        self.first = 0.0  # share of the failure's wrong elements
        self._hits = self._all = 0

    def add(self, hits: int, false: int, wrong: int) -> None:
        if not self._all:
            self.first = hits / wrong
        self._hits += hits
        self._all += wrong + false

    @property
    def share(self) -> float:
        return self._hits / self._all if self._all else 0.0


_PLACED = {"unwritten", "zeroed"}
UNNAMED = frozenset({"unexplained", "one-element", "last-element"})  # keys of what no fault explains
_WORTH = 0.6  # of the best fit to the failure: what fits less is not tried on further launches


def _before(one: Observed) -> Iterator[FaultyOutputs]:
    """What is tested before any faulty semantics: what stood in an output still stands there."""
    yield _mixed("unwritten", "elements are not written", one,
                 {name: unwritten(one.results[name], one.poison) for name in one.exact})


def _after(one: Observed) -> Iterator[FaultyOutputs]:
    yield _mixed("zeroed", "elements are left at zero", one,
                 {name: bits(one.results[name]) == 0 for name in one.exact})


def _mixed(key: str, sentence: str, one: Observed, masks: Mapping[str, Tensor]) -> FaultyOutputs:
    """The results where masks hold, and what is right elsewhere."""
    mixed = {name: torch.where(mask, bits(one.results[name]), bits(one.exact[name].golden)).view(
        one.results[name].dtype) for name, mask in masks.items()}
    return FaultyOutputs(key, sentence, lambda call: mixed)


def _by_place(wrong: Mapping[str, Tensor], count: int) -> Diagnosis:
    place = _where(wrong)
    if count > 1:
        return Diagnosis("unexplained", f"no known fault explains it; wrong {place}", 0.0, count)
    mask = next(mask for mask in wrong.values() if bool(mask.any()))
    key = "last-element" if bool(mask.flatten()[-1]) else "one-element"
    return Diagnosis(key, f"a single element is wrong, {place}", 1.0, 1)


def _where(wrong: Mapping[str, Tensor]) -> str:
    """The outputs that are wrong, each with the first and the last place in it."""
    parts = []
    for name, mask in wrong.items():
        places = mask.nonzero()
        if len(places) == 1:
            parts.append(f"{name}{places[0].tolist()}")
        elif len(places):
            all_of_it = "all of " if len(places) == mask.numel() else ""
            parts.append(f"{all_of_it}{name} from {places[0].tolist()} to {places[-1].tolist()}")
    return f"in {', '.join(parts)}"


def _differs(one: Tensor, two: Tensor, reference: Reference) -> Tensor:
    differs = bits(one) != bits(two)
    return differs if reference.open is None else differs & ~reference.open
