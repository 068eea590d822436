"""The comparison of one output with its reference: form, NaN and infinity maps, budget, tolerance, level.

Levels, best first: bit-exact (the golden's bytes), within-budget (each element within the error that correct
arithmetic may make, and within the published tolerance), published (only the latter). A NaN is never a wildcard.
An output without an oracle is bit-exact or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.formats import FORMATS, Format, bits, format_of
from conformance.kernel import LEVELS
from conformance.operator import Call, OracleRows, Output, Reference

_FLOAT = FORMATS["fp32"]


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


@dataclass
class _Tally:
    """Running figures over the rows of one output; ``first`` are the first elements over their budget and
    over the published tolerance."""

    fraction: float = 0.0
    error: float = 0.0
    over_budget: int = 0
    over_published: int = 0
    wrong_infinities: int = 0
    first: list[dict[str, Any] | None] = field(default_factory=lambda: [None, None])


def check_form(result: Any, form: Output, device: torch.device, in_place: bool = False) -> str | None:
    """What is wrong with the form of ``result``, or None. ``in_place``: it is the buffer that the kernel was given."""
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
    if result.numel() and not in_place and not result.is_contiguous():
        return f"strides are {result.stride()}, a contiguous result is required"
    return None


def golden_fraction(reference: Reference) -> float:
    """Budget fraction of the golden itself: what every bit-exact kernel has."""
    return _tally(reference.golden, reference).fraction


def judge(result: Tensor, call: Call, reference: Reference, promise: str, fraction_if_exact: float) -> Verdict:
    """Compare ``result`` (its form already checked) with the reference and hold it to ``promise``."""
    golden = reference.golden
    if reference.exact:
        return _exactly(result, reference)
    if torch.equal(bits(result), bits(golden)):
        return Verdict("bit-exact", budget_fraction=fraction_if_exact)
    nan = result.float().isnan()
    if bool((wrong := nan != golden.float().isnan()).any()):
        return _failure("nan-map", "are NaN on one side only", wrong, result, golden, Verdict(None))
    differs = (bits(result) != bits(golden)) & ~nan
    tally = _tally(result, reference)
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


def _level(tally: _Tally, differs: Tensor) -> str | None:
    if tally.over_published or tally.wrong_infinities:
        return None
    if tally.over_budget:
        return "published"
    return "within-budget" if bool(differs.any()) else "bit-exact"


def _tally(result: Tensor, reference: Reference) -> _Tally:
    tally = _Tally()
    for rows in reference.oracle():
        here = slice(rows.start, rows.stop)
        _measure(result[here], reference.golden[here], rows, tally, reference.published or _format(result).published)
    return tally


def _measure(result: Tensor, golden: Tensor, rows: OracleRows, tally: _Tally, published: float) -> None:
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
        at = tuple(doubtful.T)
        few = OracleRows(rows.start, rows.stop, rows.value[at], rows.error[at])
        _measure_exactly(result[at], golden[at], few, tally, published, doubtful)


def _unsettled(result: Tensor, rows: OracleRows, tally: _Tally, published: float) -> Tensor | None:
    """Places [n, dimensions] of the elements of which fp32 cannot tell that they keep budget and tolerance; None where
    it can of all. What is settled is added to ``tally``.

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
    if worst[1] < 1 - margin and worst[2] < published / 2:
        tally.fraction, tally.error = max(tally.fraction, worst[1]), max(tally.error, worst[0])
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


def _measure_exactly(result: Tensor, golden: Tensor, rows: OracleRows, tally: _Tally, published: float,
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


def element_errors(result: Tensor, golden: Tensor, rows: OracleRows) -> tuple[Tensor, Tensor, Tensor]:
    """Error and budget (fp64) of each element, and which elements are settled without either.

    NaNs are compared as maps elsewhere. An infinity is right where the golden has it with the same sign, or where
    the exact value is so near the end of the finite range that correct arithmetic may land on either side.
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
    return error, budget, settled


def _in_range(value: Tensor, form: Format) -> Tensor:
    """Saturated where the format saturates."""
    return value.clamp(-form.maximum, form.maximum) if form.name == "e4m3" else value


def _format(result: Tensor) -> Format:
    form = format_of(result.dtype)
    assert form is not None, f"no format is known for {result.dtype}"
    return form


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
