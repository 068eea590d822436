"""Which of many explanations a wrong result fits best. Explanations are tested, not guessed: each predicts a result.

A failing kernel is run once more with a poison whose rows all differ, so that a prediction has to hold twice. Only
failures pay for this, and of many failures of one kernel only some.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.diagnosis import patterns
from conformance.diagnosis.evidence import Evidence, Measured
from conformance.diagnosis.faulty_casts import casts
from conformance.diagnosis.predictions import Predictions
from conformance.diagnosis.regions import region
from conformance.formats import bits, ulps_apart
from conformance.operator import Fault

FIRST = 4  # failures of one kernel in one process that are all diagnosed; then each time their number has doubled
SECONDS = 60.0  # for all diagnoses of one process
PROBE = 2  # number of the poison whose rows all differ
ENOUGH = 0.5  # of the wrong elements: what explains fewer is no explanation
OTHER_ROUNDING = "other-rounding"
REACHED = "promise='within-budget' is the level that it reaches"
_WORTH = 0.6  # of the best fit to the failure: what fits less is not tried on further observations
_LOW_BITS = 22  # fewer good bits than this are named as low precision
_ROUNDINGS = 2.0**-5  # of an element: 16 roundings of bf16, 2^-9 each, that all go one way


@dataclass(frozen=True)
class Diagnosis:
    """The best explanation. explained: share of the wrong elements (of the sampled columns) that it predicts; wrong:
    their number in the whole output. others: keys of explanations that fit as well. remaining: where the rest lies."""

    key: str
    sentence: str
    explained: float
    wrong: int
    others: tuple[str, ...] = ()
    remaining: str = ""

    @property
    def text(self) -> str:
        if self.explained == 0:
            return f"{self.sentence} ({self.wrong} elements)"
        share = f"explains {_percent(self.explained)} of {self.wrong} wrong elements"
        rest = f", the others {self.remaining}" if self.remaining else ""
        tie = f"; fits as well here: {', '.join(self.others)}" if self.others else ""
        return f"{self.sentence} ({share}{rest}{tie})"

    def details(self) -> dict[str, Any]:
        return asdict(self)


class Allowance:
    """Which failures this process diagnoses: of each kind of failure of a kernel a few in a row, then ever fewer, so
    that a thousand cost ten diagnoses and come from all parts of the matrix; when the time for all is spent only the
    first one, and none any more after twice that time. ``first``: all that is diagnosed of each kernel, whatever the
    kind and the time."""

    def __init__(self, first: int | None = None) -> None:
        self._first = first
        self._failures: Counter[tuple[str, str]] = Counter()
        self._spent = 0.0
        self._started = 0.0

    def grants(self, kernel: str, kind: str) -> bool:
        failure = kernel, kind if self._first is None else ""
        self._failures[failure] += 1
        number = self._failures[failure]
        if self._first is not None:
            return number <= self._first
        if self._spent >= SECONDS:
            return number == 1 and self._spent < 2 * SECONDS
        return number <= FIRST or number & (number - 1) == 0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spent += time.perf_counter() - self._started


def diagnose(observed: Sequence[Evidence], faults: Iterable[Fault], before: Iterable[Fault] = (),
             predictions: Predictions | None = None) -> Diagnosis | None:
    """The explanation that fits all observations best; the first one is the failure itself, and names the numbers.

    None where nothing is wrong in the first. Each observation's poison is put in place before it is predicted. Of
    explanations that fit equally well, the one with more of the very bits is named, then the first one: those in
    ``before`` come first of all. predictions: what ``faults`` are known to predict for the call of all observations.
    """
    predictions = predictions or Predictions()
    failure = observed[0]
    place = region(failure.wrong)
    if place is None:
        return None
    scores: dict[str, _Score] = {}
    for evidence in observed:
        evidence.call.set_poison(evidence.poison)
        if evidence is not failure:  # what fits the failure badly is not asked again
            least = max(score.fit for score in scores.values()) * _WORTH
            scores = {key: score for key, score in scores.items() if score.fit >= least}
            faults = [fault for fault in faults if fault.key in scores]
        for key, sentence, predicted in _predictions(evidence, faults, before, predictions):
            if evidence is not failure and key not in scores:
                continue
            known = scores.setdefault(key, _Score(key, sentence))
            known.offer(evidence.measure(predicted), sentence, evidence is failure)
        for known in scores.values():
            known.settle(evidence)
    best = max(scores.values(), key=lambda score: (round(score.fit, 9), score.equal))  # the first of equals
    if best.fit <= ENOUGH:  # of two launches one alone makes exactly half
        return _by_place(failure)
    ties = tuple(s.key for s in scores.values() if s is not best and s.fit >= best.fit - 1e-9 and s.equal == best.equal)
    sentence, remaining = best.sentence, ""
    if best.hits is not None:
        rest = region(best.hits)
        remaining = rest.text if rest is not None else ""
    if best.key in _PLACED:
        sentence += f", {place.text}"
    return Diagnosis(best.key, sentence, best.share, place.count, ties, remaining)


_PLACED = {"unwritten", "zeroed"}


class _Score:
    """How well one explanation fits: over all observations, its hits among the wrong elements and its false claims."""

    def __init__(self, key: str, sentence: str) -> None:
        self.key, self.sentence = key, sentence
        self.share = 0.0
        self.hits: Tensor | None = None  # of the failure: wrong elements that stay unexplained
        self.equal = 0  # hits with the very bits
        self.refuted = False  # of one of the observations it predicts nothing
        self._hit = self._all = 0
        self._offered: Measured | None = None
        self._primary = False

    def offer(self, measured: Measured, sentence: str, primary: bool) -> None:
        """Of several variants with one key the best counts."""
        known = self._offered
        if known is None or measured.hits - measured.false > known.hits - known.false:
            self._offered, self._primary = measured, primary
            if primary:
                self.sentence = sentence

    def settle(self, evidence: Evidence) -> None:
        wrong = int(evidence.sampled_wrong.sum())
        found = self._offered or Measured(0, 0, evidence.sampled_wrong, 0)
        if self._offered is not None and self._primary:
            self.share = found.hits / max(1, wrong)
            self.hits = found.unexplained if bool(found.unexplained.any()) else None
        self.refuted |= wrong > 0 and found.hits == 0
        self._hit += found.hits
        self._all += wrong + found.false
        self.equal += found.equal
        self._offered = None

    @property
    def fit(self) -> float:
        return self._hit / self._all if self._all and not self.refuted else 0.0


def _predictions(evidence: Evidence, faults: Iterable[Fault], before: Iterable[Fault], known: Predictions
                 ) -> Iterator[patterns.Predicted]:
    yield from _faulty(evidence, before, known)
    yield from patterns.first(evidence)
    yield from _faulty(evidence, faults, known)
    yield from casts(evidence.exact, evidence.form)
    yield from patterns.last(evidence)


def _faulty(evidence: Evidence, faults: Iterable[Fault], known: Predictions) -> Iterator[patterns.Predicted]:
    for fault in faults:
        predicted = known.of_columns(fault, evidence)
        if predicted is not None:
            yield fault.key, fault.sentence, predicted


def _by_place(evidence: Evidence) -> Diagnosis:
    """What can be said where no explanation fits: that it is right, few bits, one element, one tile, or only where."""
    place = region(evidence.wrong)
    assert place is not None
    if evidence.kept:
        found, golden = (bits(one)[evidence.wrong].view(one.dtype) for one in (evidence.result, evidence.golden))
        apart = ulps_apart(found, golden)
        return Diagnosis(OTHER_ROUNDING, "correct within its budget, but in another order or with other roundings than "
                         f"the golden's: off by {_ulps(int(apart[0]))} at the first element that differs, by "
                         f"{_ulps(int(apart.max()))} at most; {REACHED}", 0.0, place.count)
    last = (place.shape[0] - 1, place.shape[1] - 1)
    if place.single:
        key = "last-element" if (place.rows[0], place.columns[0]) == last else "one-element"
        return Diagnosis(key, f"a single element is wrong, {place.text}", 1.0, 1)
    if place.compact:
        return Diagnosis("one-tile", f"only one region is wrong, {place.text}", 1.0, place.count)
    digits = _good_bits(evidence)
    if digits is not None and digits < _LOW_BITS:
        return Diagnosis("low-precision", f"the sum has about {digits} good bits where fp32 has 24", 1.0, place.count)
    return Diagnosis("unexplained", f"no known fault explains it; wrong {place.text}", 0.0, place.count)


def _ulps(count: int) -> str:
    return "the sign of a zero" if count == 0 else f"{count} ULP{'s' * (count > 1)}"


def _good_bits(evidence: Evidence) -> int | None:
    """Significant bits that the worst sum kept, measured by its own error bound; None where it is far off, or where
    most wrong elements are off by more of themselves than roundings to any format of 16 bits add up to."""
    result, exact = evidence.sampled(evidence.result).double(), evidence.exact
    wrong, off = evidence.sampled_wrong, (result - exact).abs()
    if bool(wrong.any()) and not float((off / exact.abs())[wrong].nan_to_num(nan=torch.inf).median()) < _ROUNDINGS:
        return None
    error = (off - evidence.form.half_ulp(exact.abs())) / evidence.error.double()
    worst = float(error[wrong].nan_to_num(nan=torch.inf).max()) if len(error) else 0.0
    lost = torch.log2(torch.tensor(max(1.0, worst)))
    return 24 - int(lost) if float(lost) < 18 else None


def _percent(share: float) -> str:
    """Rounded, but 100 % only where nothing is left."""
    return "100 %" if share == 1 else f"{min(99, round(100 * share))} %"
