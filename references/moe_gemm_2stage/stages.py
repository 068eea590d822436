"""The two stages in fp64 with error bounds. Tokens are independent: slice them to bound memory.

Stage 1, of each routed (t, s) with e = ids[t, s], over H:
    acc = sum x w1[e];  g, u = (acc sw) sx, first and second half of 2 I rows;  y = silu(g) u
Stage 2, over I:
    z = (acc sw) sa, times the routing weight where it is applied here
    atomic: out[t] += round(z), k roundings in the output's format;  reduce: round(z) each, one fp32 sum, one cast

Errors are those before the last cast, as `conformance.operator.OracleRows` has them: the comparison adds half an ULP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.formats import Format
from references.moe_gemm_2stage.bounds import (
    Arithmetic,
    Bounded,
    Combined,
    U,
    dot_error,
    format_of,
    overflows,
    silu,
)
from references.moe_gemm_2stage.operands import Operand

DOWEIGHT_STAGE1 = ("none", "after", "gate", "gate-and-up")


@dataclass(frozen=True)
class Routes:
    """ids int32 [T, k]: expert of each slot, -1 = no local expert. weights fp32 [T, k]."""

    ids: Tensor
    weights: Tensor

    @property
    def valid(self) -> Tensor:
        """bool [T, k]"""
        return self.ids >= 0


@dataclass(frozen=True)
class Dot:
    """Sums [T, k, N] of each slot's row with the rows of its expert: exact, of magnitudes, and of carried errors."""

    total: Tensor
    size: Tensor
    carried: Tensor


def dot(rows: Operand, weights: Operand, routes: Routes) -> Dot:
    """rows [T, k, K] with weights [E, N, K]; 0 for slots without an expert."""
    total = _zeros(weights, routes)
    size, carried = torch.zeros_like(total), torch.zeros_like(total)
    left = rows.value()
    for _, here, right in _by_expert(weights, routes):
        total[here] = left[here] @ right.T
        right.abs_()
        size[here] = left[here].abs() @ right.T
        if rows.error is not None:
            carried[here] = (rows.error[here] @ right.T).nan_to_num(nan=math.inf, posinf=math.inf)  # infinity times 0
    return Dot(total, size, carried)


def totals(rows: Operand, weights: Operand, routes: Routes) -> Tensor:
    """The exact sums of ``dot`` alone."""
    total = _zeros(weights, routes)
    left = rows.value()
    for _, here, right in _by_expert(weights, routes):
        total[here] = left[here] @ right.T
    return total


def moved_by_bf16(rows: Operand, weights: Operand, routes: Routes) -> Tensor:
    """[T, k, N] >= 0: how far a sum, times the scales of channels, is moved when every weight is rounded to bf16 before
    the product: code times scale, to nearest. Beside a tie either neighbour is right, as that product was rounded too.

    This is the very difference and no bound: a multiple of the sum of magnitudes, 2^-8 S, would hide an accumulator in
    bf16 and much else. The sum of such weights is rounded like any other; that it is up to 2^-8 larger is nothing
    beside lambda.
    """
    moved, left = _zeros(weights, routes), rows.value()
    for expert, here, right in _by_expert(weights, routes):
        if weights.scale is not None:
            right.mul_(weights.scale[expert, :, None])
        product = right.float()
        low, high = (torch.nextafter(product, product.new_tensor(end)).bfloat16().double()
                     for end in (-math.inf, math.inf))
        found = (left[here] @ (low - right).T).abs()
        either = (low != high).any(dim=1)  # channels
        found[:, either] += left[here].abs() @ (high - low)[either].T
        if rows.error is not None:
            found += rows.error[here] @ torch.maximum((low - right).abs(), (high - right).abs()).T
        moved[here] = found
    return moved.nan_to_num(nan=math.inf)  # infinity times 0


def _zeros(weights: Operand, routes: Routes) -> Tensor:
    shape = *routes.ids.shape, weights.payload.shape[1]
    return torch.zeros(shape, dtype=torch.float64, device=weights.payload.device)


def _by_expert(weights: Operand, routes: Routes) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, bool [T, k], fp64 [N, K]): each expert that has any slots, these, and its weights. They stand in the
    same memory each time, because to allocate so much takes longer than to fill it."""
    wide = torch.empty(weights.payload.shape[1:], dtype=torch.float64, device=weights.payload.device)
    for expert in routes.ids[routes.valid].unique().tolist():
        wide.copy_(weights.payload[expert])
        if weights.factors is not None:
            wide.mul_(weights.factors[expert])
        yield expert, routes.ids == expert, wide


def scaled_sums(rows: Operand, weights: Operand, routes: Routes, arithmetic: Arithmetic) -> Bounded:
    """[T, k, N]: (acc * scale of the output channel) * scale of the row."""
    sums = dot(rows, weights, routes)
    grouped = rows.factors is not None or weights.factors is not None
    terms = rows.payload.shape[-1]
    error = dot_error(sums.total.abs() + sums.carried, sums.size + sums.carried, terms, arithmetic, grouped)
    found = Bounded(sums.total, error + sums.carried)
    if weights.scale is not None:
        found = found.times(weights.scale[routes.ids.clamp(min=0).long()])
    if arithmetic.bf16_weights:
        found = Bounded(found.value, found.error + moved_by_bf16(rows, weights, routes))
    if rows.scale is not None:
        found = found.times(rows.scale[..., None])
    return found


def stage1(rows: Operand, w1: Operand, routes: Routes, doweight: str = "none", arithmetic: Arithmetic | None = None
           ) -> Bounded:
    """silu(gate) * up [T, k, I] before the cast; slots without an expert are never written, and 0 here.

    doweight: where the routing weight w goes. "after": w * (silu(g) u), FlyDSL's reference and its old kernel. "gate":
    silu(w g) u, FlyDSL HEAD's kernel. "gate-and-up": silu(w g) (w u), aiter. Raises ValueError for another one.
    """
    if doweight not in DOWEIGHT_STAGE1:
        raise ValueError(f"doweight is {doweight!r}: one of {', '.join(DOWEIGHT_STAGE1)} is required")
    both = scaled_sums(rows, w1, routes, arithmetic or Arithmetic())
    half = both.value.shape[-1] // 2
    gate = Bounded(both.value[..., :half], both.error[..., :half])
    up = Bounded(both.value[..., half:], both.error[..., half:])
    factor = routes.weights[..., None]
    if doweight in ("gate", "gate-and-up"):
        gate = gate.times(factor)
    if doweight == "gate-and-up":
        up = up.times(factor)
    found = silu(gate).by(up)
    return found.times(factor) if doweight == "after" else found


def stage2(rows: Operand, w2: Operand, routes: Routes, doweight: bool = True, arithmetic: Arithmetic | None = None
           ) -> Bounded:
    """The terms z [T, k, H] before they are rounded; 0 for slots without an expert."""
    found = scaled_sums(rows, w2, routes, arithmetic or Arithmetic())
    return found.times(routes.weights[..., None]) if doweight else found


def combine_atomic(terms: Bounded, routes: Routes, out: str) -> Combined:
    """[T, H] of terms that are rounded to ``out`` and added in ``out``, in any order, or with fewer roundings.

    With m slots that is m roundings of terms and m - 1 of sums (the first adds to 0). The last one is the comparison's
    half ULP; the m - 2 others are bounded at the sum of magnitudes, or at the largest number: beyond it is infinity,
    which stays. One is met where the terms of its sign alone may overflow; who adds in fp32 need not meet it.
    """
    form, valid = format_of(out), routes.valid[..., None]
    of_terms = _rounded_terms(terms, valid, form)
    count = valid.sum(dim=1)
    reach = ((terms.value.abs() + terms.error) * valid).sum(dim=1) + of_terms.sum(dim=1)
    last = form.half_ulp(reach.clamp(max=form.maximum))
    error = of_terms.sum(dim=1) + (count - 2).clamp(min=0) * last
    single = (terms.error * valid).sum(dim=1)  # one slot: its own rounding is the last one
    error = torch.where(count > 1, error, single)
    slack = error + last
    plus, minus = ((side.clamp(min=0) * valid).sum(dim=1) + slack >= overflows(form) for side in _ends(terms))
    return Combined.of((terms.value * valid).sum(dim=1), error, plus, minus)


def combine_reduce(terms: Bounded, routes: Routes, out: str) -> Combined:
    """[T, H] of terms that are rounded to ``out`` each (f16, bf16), then summed in fp32. Raises ValueError for f32.
    Where a term may overflow, the sum may be that infinity as well; who keeps terms in fp32 does not meet it."""
    if out == "f32":
        raise ValueError("out is 'f32': partials are f16 or bf16 only")
    form, valid = format_of(out), routes.valid[..., None]
    of_terms = _rounded_terms(terms, valid, form)
    count = valid.sum(dim=1)
    size = ((terms.value.abs() + terms.error) * valid).sum(dim=1)
    additions = torch.where(count > 1, (count - 1) * U * (size + of_terms.sum(dim=1)), 0.0)  # no 0 times infinity
    error = of_terms.sum(dim=1) + additions * (1 + 2.0**-16)
    plus, minus = (((side >= overflows(form)) & valid).any(dim=1) for side in _ends(terms))
    return Combined.of((terms.value * valid).sum(dim=1), error, plus, minus)


def _rounded_terms(terms: Bounded, valid: Tensor, form: Format) -> Tensor:
    """[T, k, H]: how far a term may be from its value once it is rounded to a finite number of the format."""
    size = (terms.value.abs() + terms.error).clamp(max=form.maximum)
    return torch.where(valid, terms.error + form.half_ulp(size), 0.0)


def _ends(terms: Bounded) -> tuple[Tensor, Tensor]:
    """[T, k, H] each: how far up, and how far down, a term may reach."""
    return terms.value + terms.error, terms.error - terms.value
