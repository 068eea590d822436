"""Proof that a case can fail: results that are wrong on purpose are put to its verdict, which must reject each.

A wrong row is harder to see than a wrong tensor, and the verdict holds when all elements do, so each candidate is the
golden with one row (or one element) made wrong, judged together with the rows beside it. What counts as wrong is
decided here, without the verdict's own comparison; a candidate that the case's contract does not make wrong is none.
Outputs whose every bit is fixed have candidates of their own, in `vacuity_exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from conformance.case import Case
from conformance.formats import BY_DTYPE, bits, cast
from conformance.judging import vacuity_exact
from conformance.operator import NOT_A_NUMBER, ONLY, Call, OracleRows, Reference, References
from conformance.registry import operator
from conformance.verdicts.joint import Joint
from conformance.verdicts.verdict import judge

_WINDOW = 4  # rows that are judged together
_COLUMNS = 64  # of another expert's row
_MILLIONS = 1 << 22  # elements among which one wrong one must be seen


def is_proved(case: Case, mode: str) -> bool:
    """Whether the case is to prove that it can fail: those of the smoke tier, all, or none."""
    return mode == "all" or (mode == "smoke" and "smoke" in case.tiers)


def accepted(call: Call, reference: Reference | References, before: Mapping[str, Tensor] | None = None) -> str | None:
    """What the case accepts although it is wrong, in words, or None. A case without elements proves nothing.

    A case in which no candidate at all is wrong by its own contract is vacuous as well. before: outputs of another
    case by name, or the first rows of them.
    """
    before = before or {}
    joint = Joint(call, References.made_of(reference), lambda name: 0.0)  # nobody asks how good the golden is
    outputs = {name: one for name, one in joint.references.of.items() if one.golden.numel()}
    tried: set[str] = set()
    taken: set[str] = set()
    for name, one in outputs.items():
        found = (vacuity_exact.accepted(joint, name, before.get(name)) if one.exact else
                 _within_bounds(call.part(name), one, before.get(name)))
        tried |= found[0]
        taken |= {f"{name}: {wrong}" if name != ONLY else wrong for wrong in found[1]}
    if outputs and not tried:
        return "every result: none of the wrong ones that were tried is wrong by its contract"
    return ", ".join(sorted(taken)) or None


def _within_bounds(call: Call, reference: Reference, before: Tensor | None) -> tuple[set[str], set[str]]:
    """Which wrong results of an output [rows, columns] that has an oracle were tried, and which are accepted."""
    tried: set[str] = set()
    taken: set[str] = set()
    foreign = _foreign(call)
    for window in _windows(call, reference):
        more = {"the previous case's output": partial(_earlier, before),
                "another expert's row": partial(foreign, window)}
        for name, change in (_CHANGES | more).items():
            if name not in tried and (passes := _passes(window, change)) is not None:
                tried.add(name)
                taken |= {name} if passes else set()
        if len(tried) == len(_CHANGES) + len(more):
            break
    whole = _largest_window(call, reference)
    for name, alone in (("one element changed", _other_value), ("one NaN", _nan)):
        result = whole.reference.golden.clone()
        if alone(result, whole.rows):
            tried.add(name)
            if judge(result, whole.call, whole.reference, "within-budget", 0.0).passed:
                taken.add(name)
    return tried, taken


@dataclass(frozen=True)
class _Window:
    """A few rows of a case: call, reference, the oracle's rows by themselves, and the number of the first one."""

    call: Call
    reference: Reference
    rows: OracleRows
    start: int = 0


def _window(call: Call, reference: Reference, chunk: OracleRows, start: int, stop: int, device: torch.device
            ) -> _Window:
    """Rows [start, stop) of a chunk of the oracle."""
    also = None if chunk.also is None else chunk.also[start:stop].to(device)
    rows = OracleRows(0, stop - start, chunk.value[start:stop].to(device), chunk.error[start:stop].to(device), also)
    here = slice(chunk.start + start, chunk.start + stop)
    fixed = call.bitwise_rows
    return _Window(replace(call, bitwise_rows=None if fixed is None else fixed[here].to(device)),
                   Reference(reference.golden[here].to(device), lambda: iter((rows,)), reference.published), rows,
                   here.start)


def _windows(call: Call, reference: Reference) -> Iterator[_Window]:
    """Windows in the middle, at the start and at the end of the first chunk of the oracle, on the CPU: for so few
    elements a GPU's launches and synchronisations take longer."""
    chunk = next(iter(reference.oracle()))
    count = chunk.stop - chunk.start
    for start in dict.fromkeys((max(0, count // 2 - 2), 0, max(0, count - _WINDOW))):
        yield _window(call, reference, chunk, start, min(count, start + _WINDOW), torch.device("cpu"))


def _largest_window(call: Call, reference: Reference) -> _Window:
    """The whole output, or as many rows of it as hold some millions of elements."""
    chunk = next(iter(reference.oracle()))
    if reference.golden.numel() <= _MILLIONS:
        return _Window(call, reference, chunk)
    count = max(1, _MILLIONS * len(reference.golden) // reference.golden.numel())
    return _window(call, reference, chunk, 0, min(count, chunk.stop - chunk.start), reference.golden.device)


def _passes(window: _Window, change: Callable[[Tensor], Tensor]) -> bool | None:
    """Whether the verdict accepts the window with one row changed; None where no row is wrong then."""
    golden = window.reference.golden
    changed = cast(change(golden.to(torch.float32, copy=True)), golden.dtype)
    for row in range(len(golden)):
        if _wrong(window, changed, row):
            result = golden.clone()
            bits(result)[row] = bits(changed)[row]
            return judge(result, window.call, window.reference, "within-budget", 0.0).passed
    return None


def _wrong(window: _Window, changed: Tensor, row: int) -> bool:
    """Whether a changed row is wrong beyond doubt in one element at least."""
    form = BY_DTYPE[changed.dtype]
    was, now = window.reference.golden[row].double(), changed[row].double()
    if bool(((was.isnan() != now.isnan()) & _fixed(window.rows, NOT_A_NUMBER)[row]).any()):
        return True
    moved = (now - was).abs()
    if window.call.regime == "exact":
        return bool((moved > 0).any())
    published = window.reference.published or form.published
    step = 2.0 ** (1 - form.precision) * torch.maximum(was.abs(), now.abs()) + 2.0**form.minimum_exponent
    doubtful = torch.minimum(4 * (window.rows.error[row].double() + step), 2 * published * (1 + was.abs()))
    return bool(((moved > doubtful) & moved.isfinite()).any())


def _fixed(rows: OracleRows, what: int) -> Tensor:
    """Mask of the elements that must not be ``what`` unless the golden is."""
    return torch.ones_like(rows.value, dtype=torch.bool) if rows.also is None else (rows.also & what) == 0


def _other_value(result: Tensor, rows: OracleRows) -> bool:
    """Change one element of ``result`` in place by far; False where none is finite."""
    places = result.float().isfinite().nonzero()
    if not len(places):
        return False
    row, column = places[len(places) // 2].tolist()
    value = result[row, column].float()
    result[row, column] = cast(torch.where(value.abs() < 4.0, value + 8.0, value * 0.25), result.dtype)
    return True


def _nan(result: Tensor, rows: OracleRows) -> bool:
    """Make the last element of ``rows`` that is no NaN, and must not be one, NaN in place."""
    places = (~result[: rows.stop - rows.start].float().isnan() & _fixed(rows, NOT_A_NUMBER)).nonzero()
    if len(places):
        row, column = places[-1].tolist()
        result[row, column] = torch.tensor(float("nan")).to(result.dtype)
    return bool(len(places))


def _earlier(before: Tensor | None, value: Tensor) -> Tensor:
    """Rows of another case's output, rows and columns in turn as many as it takes; without one, those given."""
    if before is None or before.dim() != 2 or not before.numel():
        return value
    rows, columns = (torch.arange(extent) % other for extent, other in zip(value.shape, before.shape, strict=True))
    return before.to(torch.float32)[rows][:, columns].to(value.device)


def _foreign(call: Call) -> Callable[[_Window, Tensor], Tensor]:
    """Rows as the operator's fault makes them that takes another expert; some columns of them are enough."""
    of = operator(call.case.operator)
    faults = [fault for fault in of.faults if fault.key == of.another_expert]
    width = call.output.shape[-1]
    columns = torch.linspace(0, width - 1, min(_COLUMNS, width)).long().unique().to(_device(call))
    found = [one for fault in faults if (one := fault.predict(call, columns)) is not None]

    def change(window: _Window, value: Tensor) -> Tensor:
        for predicted in found[:1]:
            rows = predicted[window.start : window.start + len(value)]
            value[:, columns.to(value.device)] = rows.to(value.device, torch.float32)
        return value

    return change


def _device(call: Call) -> torch.device:
    return next(value.device for value in call.arguments.values() if isinstance(value, Tensor))


def _tail_zero(value: Tensor) -> Tensor:
    value[:, -8:] = 0.0
    return value


# Each maps fp32 rows [n, H], a copy, to wrong ones; one of them is put in the place of the right one at a time.
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "a constant": torch.ones_like,
    "the result times 1.01": lambda value: value * 1.01,
    "the result times 2": lambda value: value * 2.0,
    "the result negated": torch.neg,
    "another token's row": lambda value: value.roll(1, 0),
    "columns in reverse": lambda value: value.flip(1),
    "columns shifted by one": lambda value: value.roll(1, 1),
    "its last columns at zero": _tail_zero,
}
