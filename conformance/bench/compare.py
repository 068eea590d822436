"""Comparison of timed results on the device, without waiting for it: counts that are read when a trial is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.bench.clock import WrongWhenTimed
from conformance.formats import bits, format_of
from conformance.operator import ONLY, Reference, Results

_FAR = 3  # published tolerances: the result's own, the golden's, and one for the roundings of this comparison


@dataclass
class Findings:
    """What was counted since the last `raise_first`: how many elements of what are wrong, and in what words."""

    _pending: list[tuple[Tensor, Callable[[int], str]]] = field(default_factory=list)

    def count(self, wrong: Tensor, words: Callable[[int], str]) -> None:
        """Keep a count (of no dimensions, on the device) and what it means where it is not 0."""
        self._pending.append((wrong, words))

    def raise_first(self) -> None:
        """Wait for the device. Raises WrongWhenTimed for the first count that is not 0."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        for count, (_, words) in zip(torch.stack([one for one, _ in pending]).tolist(), pending, strict=True):
            if count:
                raise WrongWhenTimed(words(count))

    def same(self, expected: Results, results: Results, references: Mapping[str, Reference], when: str) -> None:
        """Every bit that is not left open must be as expected."""
        for name, one in expected.items():
            self.count(differing(one, results[name], references[name].open),
                       _words(when, name, results[name], "differ from the judged result"))

    def near(self, results: Results, references: Mapping[str, Reference], when: str) -> None:
        """Of a kernel that does not repeat its bits: no element may be far from the golden."""
        for name, reference in references.items():
            self.count(far(results[name], reference),
                       _words(when, name, results[name], "are far from what the reference has"))

    def unchanged(self, name: str, before: Tensor, now: Tensor) -> None:
        """An input must be as it was."""
        self.count(differing(before, now),
                   lambda count: f"after the timed calls {count} elements of the input {name} are others")


def differing(one: Tensor, two: Tensor, left_open: Tensor | None = None) -> Tensor:
    """How many elements differ in their bits and are not left open: int64, no dimensions."""
    differs = bits(one) != bits(two)
    if left_open is not None:
        differs &= ~left_open
    return differs.sum()


def far(result: Tensor, reference: Reference) -> Tensor:
    """How many elements no kernel may return, whatever the order of its sums: NaN, or several published tolerances from
    the golden. Where that is no number or near the end of the format's range, the judge alone knows."""
    golden, form = reference.golden, format_of(result.dtype)
    if reference.exact or form is None:
        return differing(result, golden, reference.open)
    expected, actual = golden.float(), result.float()
    size = expected.abs()
    allowed = (1 + size).mul_(_FAR * (reference.published or form.published))
    near = (actual - expected).abs_() <= allowed  # not of NaN
    return (~near & (size < form.maximum / 4)).sum()


def _words(when: str, name: str, result: Tensor, rule: str) -> Callable[[int], str]:
    total, where = result.numel(), "" if name == ONLY else f" of {name}"
    return lambda count: f"{when}: {count} of {total} elements{where} {rule}"
