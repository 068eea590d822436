"""Explanations that need no knowledge of the operator: what a result has in common with the right one and poison."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.diagnosis.evidence import Evidence
from conformance.formats import bits, cast
from conformance.launching.guards import POISON_BYTES

Predicted = tuple[str, str, Tensor]
_SHIFTS = (1, 8, 16, 32, 64, 128, 256, 512)


def first(evidence: Evidence) -> Iterator[Predicted]:
    """(key, sentence, [T, C]): what is tested before any faulty semantics."""
    poison = _poison(evidence)
    left = evidence.sampled_mask(evidence.left)
    golden = evidence.sampled(evidence.golden)
    raw = bits(golden).clone()
    raw[left] = bits(poison)
    yield "unwritten", "elements are not written", raw.view(golden.dtype)
    added = evidence.exact.float() + poison.float()
    yield "stale-added", "the result is added to what stood in the output", cast(added, golden.dtype)


def last(evidence: Evidence) -> Iterator[Predicted]:
    """(key, sentence, [T, C]): what may explain a result when no faulty semantics does."""
    golden, result = evidence.sampled(evidence.golden), evidence.sampled(evidence.result)
    raw = bits(golden).clone()
    raw[result.float() == 0] = 0
    yield "zeroed", "elements are left at zero", raw.view(golden.dtype)
    raw = bits(golden).clone()
    zeros = (result.float() == 0) & (golden.float() == 0)
    raw[zeros] = bits(result)[zeros]
    yield "zero-sign", "zeros have the wrong sign", raw.view(golden.dtype)
    if bool(result.float().isnan().all()):
        yield ("all-nan", "everything is NaN, so something that is NaN takes part in every element: rows or scales "
               "that nothing refers to hold NaN", torch.full_like(result.float(), torch.nan).to(golden.dtype))
    yield from _factor(evidence, golden, result)
    for by in (1, -1):
        where = "next" if by == 1 else "previous"
        sentence = f"each row stands in the place of the {where} one"
        yield "rows-shifted", sentence, _rolled(evidence.golden, by, 0, evidence)
    yield "rows-reversed", "rows stand in reverse order", _moved(evidence.golden.view(torch.uint8).flip(0), evidence)
    hidden = evidence.golden.shape[1]
    for shift in _SHIFTS:
        for by in (shift, -shift):
            if shift < hidden:
                sentence = f"columns are shifted by {by}"
                yield "columns-shifted", sentence, _rolled(evidence.golden, by, 1, evidence)
    for half in _SHIFTS:
        if hidden % (2 * half) == 0:
            sentence = f"in every {2 * half} columns the halves have changed places"
            yield "columns-permuted", sentence, _halves_swapped(evidence, half)


def _factor(evidence: Evidence, golden: Tensor, result: Tensor) -> Iterator[Predicted]:
    right, found = golden.double(), result.double()
    usable = right.isfinite() & found.isfinite() & (right != 0)
    below, above = float((right * right)[usable].sum()), float((right * found)[usable].sum())
    factor = above / below if below else 0.0
    if not math.isfinite(factor) or factor in (0.0, 1.0):
        return
    power = round(math.log2(abs(factor)))
    if abs(abs(factor) / 2.0**power - 1) < 2.0**-6 and power:
        factor, text = math.copysign(2.0**power, factor), f"{'-' if factor < 0 else ''}2^{power}"
    elif abs(factor + 1) < 2.0**-6:
        factor, text = -1.0, "-1"
    else:
        text = f"{factor:.4g}" if abs(factor - 1) >= 1e-3 else f"1 {'-' if factor < 1 else '+'} {abs(factor - 1):.2g}"
    yield "constant-factor", f"the result is {text} times the right one", cast((evidence.exact * factor).float(),
                                                                             golden.dtype)


def _poison(evidence: Evidence) -> Tensor:
    """[1]: one element of the output's dtype with every byte poison."""
    size = evidence.result.element_size()
    return torch.full((size,), POISON_BYTES[evidence.poison], dtype=torch.uint8,
                      device=evidence.result.device).view(evidence.result.dtype)


def _rolled(golden: Tensor, by: int, axis: int, evidence: Evidence) -> Tensor:
    raw = golden.view(torch.uint8)
    return _moved(raw.roll(by if axis == 0 else by * golden.element_size(), axis), evidence)


def _halves_swapped(evidence: Evidence, half: int) -> Tensor:
    golden = evidence.golden
    parts = golden.view(torch.uint8).view(len(golden), golden.shape[1] // (2 * half), 2, half * golden.element_size())
    return _moved(parts.flip(2).reshape(len(golden), -1), evidence)


def _moved(raw: Tensor, evidence: Evidence) -> Tensor:
    """The sampled columns of a moved golden, given as bytes."""
    return evidence.sampled(raw.contiguous().view(evidence.golden.dtype))
