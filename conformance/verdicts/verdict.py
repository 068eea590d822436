"""The comparison of one output with its reference: form, NaN and infinity maps, budget, tolerance, level.

Levels, best first: bit-exact (the golden's bytes), within-budget (each element within the error that correct
arithmetic may make, and within the published tolerance), published (only the latter). A NaN is never a wildcard.
An output without an oracle is bit-exact or wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.formats import bits
from conformance.kernel import LEVELS
from conformance.launching.guards import memory_lost
from conformance.operator import Call, Output, Reference
from conformance.verdicts import fused
from conformance.verdicts.measurement import Tally, measured, nan_disagrees


@dataclass(frozen=True)
class Verdict:
    """What the comparison says. ``level`` is None when no level was reached; ``kind`` is None when it passed."""

    level: str | None
    kind: str | None = None
    message: str = ""
    budget_fraction: float | None = None
    max_error: float | None = None
    wrong: int = 0
    first: dict[str, Any] | None = None
    details: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return self.kind is None


def check_form(result: Any, form: Output, device: torch.device, in_place: bool = False) -> str | None:
    """What is wrong with the form of ``result``, or None. ``in_place``: it is the buffer that the kernel was given."""
    if result is None and not in_place:
        return "it has no parameter for the output, so it must return its result, and returned None"
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__} instead of a tensor"
    if type(result) not in (Tensor, torch.nn.Parameter):
        return f"returned a {type(result).__name__}, a subclass of Tensor; a plain tensor is required"
    if result.layout != torch.strided or result.is_nested or result.is_neg() or result.is_conj():
        return f"returned a lazy, nested or {result.layout} tensor; a plain strided one is required"
    if result.dtype != form.dtype:
        return f"dtype is {result.dtype}, {form.dtype} is required"
    if tuple(result.shape) != form.shape:
        return f"shape is {tuple(result.shape)}, {form.shape} is required"
    if result.device != device:
        return f"device is {result.device}, {device} is required"
    if (lost := memory_lost(result)) is not None:
        return lost
    if result.numel() and not in_place and not result.is_contiguous():
        return f"strides are {result.stride()}, a contiguous result is required"
    return None


def golden_fraction(reference: Reference) -> Callable[[], float]:
    """Budget fraction of the golden itself, which every bit-exact kernel has: measured once, on a GPU beginning now,
    and told when it is asked for."""
    begun = fused.begin(reference)

    @functools.cache
    def told() -> float:
        found = begun()
        return measured(reference.golden, reference).fraction if found is None else found

    return told


def judge(result: Tensor, call: Call, reference: Reference, promise: str, fraction_if_exact: float) -> Verdict:
    """Compare ``result`` (its form already checked) with the reference and hold it to ``promise``."""
    golden = reference.golden
    if reference.exact:
        return _exactly(result, reference)
    if torch.equal(bits(result), bits(golden)):
        return Verdict("bit-exact", budget_fraction=fraction_if_exact)
    if (disagree := nan_disagrees(result, reference)) is not None:
        return _failure("nan-map", "are NaN on one side only", disagree, result, golden, Verdict(None))
    differs = (bits(result) != bits(golden)) & ~(result.float().isnan() & golden.float().isnan())
    tally = measured(result, reference)
    level = _level(tally, differs)
    figures = Verdict(level, budget_fraction=tally.fraction, max_error=tally.error)
    if tally.wrong_infinities:
        wrong = differs & (result.float().isinf() | golden.float().isinf())
        rule = "are infinite on one side only, or of the other sign"
        return _failure("inf-map", rule, wrong, result, golden, figures)
    if call.regime == "exact":
        unequal = differs & ~((result.float() == 0) & (golden.float() == 0))
        if bool(unequal.any()):
            rule = "differ although this data makes every sum exact in any order"
            return _failure("exact", rule, unequal, result, golden, figures)
    if call.bitwise_rows is not None and bool((wrong := differs & call.bitwise_rows[:, None]).any()):
        return _failure("bits", "differ in rows that the contract fixes bit by bit", wrong, result, golden, figures)
    if level is not None and LEVELS.index(level) <= LEVELS.index(promise):
        return figures
    if promise == "bit-exact" and level is not None:
        return _failure("bits", f"differ from the golden in their bits (promised bit-exact, reached {level})",
                        differs, result, golden, figures)
    kind, count, rule = (
        ("budget", tally.over_budget, f"exceed the error budget (worst {tally.fraction:.3g} times the budget)")
        if tally.over_budget
        else ("published", tally.over_published, "exceed the published tolerance")
    )
    first = tally.first[0 if tally.over_budget else 1]
    assert first is not None
    message = f"{count} of {result.numel()} elements {rule}; first at {_show(first)}"
    return replace(figures, kind=kind, message=message, wrong=count, first=first)


def differing(one: Tensor, two: Tensor, reference: Reference) -> Tensor | None:
    """Mask of the elements that differ in their bits and are not left open; None where there are none."""
    if torch.equal(bits(one), bits(two)):
        return None
    differs = bits(one) != bits(two)
    if reference.open is not None:
        differs &= ~reference.open
    return differs if bool(differs.any()) else None


def _exactly(result: Tensor, reference: Reference) -> Verdict:
    golden = reference.golden
    wrong = differing(result, golden, reference)
    if wrong is None:
        return Verdict("bit-exact")
    return _failure("exact", "differ where the contract fixes every bit", wrong, result, golden, Verdict(None))


def _level(tally: Tally, differs: Tensor) -> str | None:
    if tally.over_published or tally.wrong_infinities:
        return None
    if tally.over_budget:
        return "published"
    return "within-budget" if bool(differs.any()) else "bit-exact"


def _failure(kind: str, rule: str, wrong: Tensor, result: Tensor, golden: Tensor, figures: Verdict) -> Verdict:
    """The figures as a failure: how many elements break the rule, and the first of them."""
    place = tuple(wrong.nonzero()[0].tolist())
    first = {"index": list(place), "expected": number(golden[place]), "actual": number(result[place])}
    count = int(wrong.sum())
    message = f"{count} of {result.numel()} elements {rule}; first at {_show(first)}"
    return replace(figures, kind=kind, message=message, wrong=count, first=first)


def _show(first: dict[str, Any]) -> str:
    budget = f" (budget {first['budget']:.3g})" if "budget" in first else ""
    expected, actual = (spelled(first[side]) for side in ("expected", "actual"))
    return f"{first['index']}: expected {expected}, got {actual}{budget}"


def number(element: Tensor) -> float | int:
    """One element; integers keep all their digits."""
    return float(element) if element.is_floating_point() else int(element)


def spelled(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"
