"""How far a result is from the exact one, in units of its error budget and of the published tolerance.

Quickly in fp32, in few passes over memory, as far as that settles it; the rest in fp64, element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.formats import FORMATS, Format, format_of
from conformance.operator import MINUS_INFINITY, NOT_A_NUMBER, PLUS_INFINITY, OracleRows, Reference

_FLOAT = FORMATS["fp32"]
_FEW = 1 << 16  # elements


@dataclass
class Tally:
    """Running figures over the rows of one output; ``first`` are the first elements over their budget and
    over the published tolerance."""

    fraction: float = 0.0
    error: float = 0.0
    over_budget: int = 0
    over_published: int = 0
    wrong_infinities: int = 0
    first: list[dict[str, Any] | None] = field(default_factory=lambda: [None, None])


def measured(result: Tensor, reference: Reference) -> Tally:
    """The figures of a result whose form was checked; zeros where there is no oracle, as for integers."""
    tally = Tally()
    for rows in reference.oracle():
        here = slice(rows.start, rows.stop)
        _measure(result[here], reference.golden[here], rows, tally, reference.published or _format(result).published)
    return tally


def _measure(result: Tensor, golden: Tensor, rows: OracleRows, tally: Tally, published: float) -> None:
    """Add the rows' errors, in units of budget and of published tolerance, to ``tally``.

    First in fp32, in few passes over memory, which settles what is finite and clearly right; the rest, often a few
    elements that lie near the middle of two values, in fp64.
    """
    if not result.numel():
        return
    doubtful = _unsettled(result, rows, tally, published)
    if doubtful is None:
        return
    if len(doubtful) * 8 > result.numel():
        _measure_exactly(result, golden, rows, tally, published, None)
    elif len(doubtful):
        _measure_exactly(*_gathered(result, golden, rows, doubtful), tally, published, doubtful)


def _gathered(result: Tensor, golden: Tensor, rows: OracleRows, places: Tensor) -> tuple[Tensor, Tensor, OracleRows]:
    """The elements [n] at ``places`` [n, dimensions]; of few, in one transfer, on the CPU: what is asked of them then
    waits for no device, a dozen times."""
    at = tuple(places.T)
    parts = [part[at] for part in (result, golden, rows.value, rows.error)]
    also = None if rows.also is None else rows.also[at]
    if len(places) <= _FEW:
        numbers = torch.stack([part.double() for part in parts]).cpu()
        parts = [number.to(part.dtype) for number, part in zip(numbers, parts, strict=True)]
        also = None if also is None else also.cpu()
    one, other, value, error = parts
    return one, other, OracleRows(rows.start, rows.stop, value, error, also)


def _unsettled(result: Tensor, rows: OracleRows, tally: Tally, published: float) -> Tensor | None:
    """Places [n, dimensions] of the elements of which fp32 cannot tell that they keep budget and tolerance; None where
    it can of all. What is settled is added to ``tally``; where something is not, the largest fraction is among that, or
    as near to it as fp32 can tell.

    The half ULP is taken at the exact value itself, which is never more than the budget's. The tolerance follows
    from the budget where the arithmetic error is small: half an ULP is below tolerance times value in every format.
    """
    form = _format(result)
    expected = rows.value.float()
    if form.name == "fp32":
        error = torch.sub(result, rows.value, out=torch.empty_like(expected))
        margin = 2.0**-20
    else:
        if form.name == "e4m3":
            expected.clamp_(-form.maximum, form.maximum)
        error = (result.float() if form.name == "e4m3" else result).sub(expected)
        margin = 2.0 ** (form.precision - 23)  # what rounding the exact value to fp32 can hide, in half ULPs
    power = expected.view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)  # 2**floor(log2 |expected|)
    if form.minimum_exponent > _FLOAT.minimum_exponent:  # else what is below the normal range gets a smaller budget
        power.clamp_(min=2.0**form.minimum_exponent)
    budget = torch.add(rows.error, power, alpha=2.0**-form.precision, out=power)
    largest = _largest(error)
    fractions = error.div_(budget)
    worst = torch.stack([largest, _largest(fractions), _largest(rows.error)]).tolist()
    if math.isfinite(worst[1]) and worst[2] < published / 2:  # and so are errors and budgets
        tally.error = max(tally.error, worst[0])
        if worst[1] >= 1 - margin:
            return (fractions.abs_() >= 1 - margin).nonzero()
        tally.fraction = max(tally.fraction, worst[1])
        return None
    settled = (fractions.abs_() < 1 - margin) & (rows.error < published / 2)
    fractions.mul_(settled).nan_to_num_(nan=0.0)
    tally.fraction = max(tally.fraction, float(fractions.max()))
    tally.error = max(tally.error, float(budget.mul_(fractions).nan_to_num_(nan=0.0).max()))
    return settled.logical_not_().nonzero()


def _largest(value: Tensor) -> Tensor:
    """The largest magnitude, NaN where there is one."""
    low, high = value.aminmax()
    return torch.maximum(high, low.neg_())


def _measure_exactly(result: Tensor, golden: Tensor, rows: OracleRows, tally: Tally, published: float,
                     places: Tensor | None) -> None:
    """The same in fp64, infinities included: all elements, or [n] of them that stand at ``places`` [n, dimensions]."""
    value = result.double()
    error, budget, settled = element_errors(result, golden, rows)
    tally.wrong_infinities += int(((value.isinf() | golden.double().isinf()) & ~settled & ~(error <= budget)).sum())
    fraction = (error / budget).masked_fill_(settled, 0.0).nan_to_num_(nan=torch.inf)
    over_budget = fraction > 1.0
    form = _format(result)
    expected = _in_range(rows.value, form)
    over_published = (~(error <= published * (1 + expected.abs()))).logical_and_(~settled)
    tally.over_published += int(over_published.sum())
    tally.fraction = max(tally.fraction, float(fraction.max()))
    tally.error = max(tally.error, float(error.masked_fill(settled, 0.0).nan_to_num_(nan=torch.inf).max()))
    tally.over_budget += int(over_budget.sum())
    for number, over in enumerate((over_budget, over_published)):
        if tally.first[number] is None and bool(over.any()):
            here = tuple(over.nonzero()[0].tolist())
            row, *rest = here if places is None else places[here].tolist()
            tally.first[number] = {"index": [rows.start + row, *rest], "expected": float(expected[here]),
                                   "actual": float(value[here]), "budget": float(budget[here])}


def nan_disagrees(result: Tensor, reference: Reference) -> Tensor | None:
    """Mask of the elements that are NaN in the result or in the golden alone, and must not be; None where there are
    none."""
    differs = result.float().isnan() != reference.golden.float().isnan()
    if not bool(differs.any()):
        return None
    for rows in reference.oracle():
        if rows.also is not None:
            differs[rows.start : rows.stop] &= (rows.also & NOT_A_NUMBER) == 0
    return differs if bool(differs.any()) else None


def element_errors(result: Tensor, golden: Tensor, rows: OracleRows) -> tuple[Tensor, Tensor, Tensor]:
    """Error and budget (fp64) of each element, and which elements are settled without either.

    NaNs are compared as maps elsewhere. An infinity is right where the golden has it with the same sign, where
    the exact value is so near the end of the finite range that correct arithmetic may land on either side, and where
    the rows say so.
    """
    form = _format(result)
    value, golden, expected = result.double(), golden.double(), rows.value
    allowed = rows.error.double().nan_to_num(nan=0.0, posinf=0.0)  # no rounding turns an infinite sum finite
    if form.name == "e4m3":  # what saturates has no error left beyond the largest value
        low, high = (_in_range(side, form) for side in (expected - allowed, expected + allowed))
        expected = _in_range(expected, form)
        allowed = torch.maximum(expected - low, high - expected).nan_to_num_(nan=0.0)
    budget = allowed + form.half_ulp(expected.abs() + allowed)
    error = (value - expected).abs_()
    settled = value.isnan()
    infinite = value.isinf()
    if bool(infinite.any()) or bool(golden.isinf().any()):
        edge = form.maximum * (1.0 + 0.5 / (2.0**form.precision - 1))  # halfway to the next power of two
        same_sign = value.sign() == expected.sign()
        settled |= infinite & (golden == value)
        settled |= infinite & same_sign & (expected.abs() + allowed >= edge)
        if rows.also is not None:
            sides = torch.where(value > 0, PLUS_INFINITY, MINUS_INFINITY)
            settled |= infinite & ((rows.also & sides) != 0)
    return error, budget, settled


def _in_range(value: Tensor, form: Format) -> Tensor:
    """Saturated where the format saturates."""
    return value.clamp(-form.maximum, form.maximum) if form.name == "e4m3" else value


def _format(result: Tensor) -> Format:
    form = format_of(result.dtype)
    assert form is not None, f"no format is known for {result.dtype}"
    return form
