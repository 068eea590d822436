"""Golden and oracle of the three operators, read from what the kernels get, some tokens at a time.

Error bounds are those of `bounds`, before the last cast, in fp32 rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from conformance.operator import (
    MINUS_INFINITY,
    NOT_A_NUMBER,
    PLUS_INFINITY,
    Call,
    OracleRows,
    Reference,
    Shared,
)
from references.moe_gemm_2stage import golden, operands, stages
from references.moe_gemm_2stage.bounds import Arithmetic, Bounded, Combined
from references.moe_gemm_2stage.chain import intermediate
from references.moe_gemm_2stage.decoded import Decoded, decode, encoding_of, same_tensors
from references.moe_gemm_2stage.dtypes import Mode

# FlyDSL 7e6dca08, verify_output: atol = rtol of stage 1 and of stage 2. It accepts zeros; the budget decides here.
PUBLISHED = {"moe_gemm1": 0.25, "moe_gemm2": 0.5, "moe_gemm_2stage": 0.5}
# None was published for data whose terms leave f16's range while their sum may not: one ULP of a term is 32 there. Nor
# for sums of terms of thousands that cancel, where weights are rounded to bf16.
_UNPUBLISHED = ("overflow",)
_UNPUBLISHED_OF_BF16_WEIGHTS = ("large", "larger")
_LARGEST = 1e38  # an error beyond any number: nothing is known of the element
_KEPT = 1 << 24  # elements of what is kept for other cases, of several chunks together
_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}  # elements of one fp64 temporary

T = TypeVar("T")
Span = tuple[int, int]  # tokens of a chunk
Kept = dict[tuple[str, Span], Any]


def terms(of: Decoded) -> Bounded:
    """What does not depend on the output's dtype and on how slots are combined: y [T, k, I], or z [T, k, H]."""
    if of.w2 is None:
        assert of.w1 is not None
        return stages.stage1(of.rows, of.w1, of.routes, of.doweight, of.arithmetic)
    rows = of.rows
    if of.w1 is not None:
        y = stages.stage1(of.rows, of.w1, of.routes, "none", of.arithmetic)
        given = of.call.arguments
        rows = intermediate(y, of.mode, of.routes, given["smooth2"], encoding_of(of.call),
                            **operands.named_rule(of.mode, given["rule"]))
    return stages.stage2(rows, of.w2, of.routes, True, of.arithmetic)


def combined(of: Decoded, found: Bounded) -> Bounded:
    """[rows of the output, N]: the terms of the slots, added where the operator adds them."""
    if of.w2 is not None and of.combine == "atomic":
        return stages.combine_atomic(found, of.routes, of.out)
    if of.w1 is not None and of.w2 is not None:
        return stages.combine_reduce(found, of.routes, of.out)
    return Bounded(found.value.flatten(0, 1), found.error.flatten(0, 1))


def golden_sums(of: Decoded) -> Tensor:
    """fp32 [T, k, N]: the scaled sums of the last stage, which depend neither on the output's dtype nor on how slots
    are combined."""
    if of.w2 is None:
        assert of.w1 is not None
        return golden.scaled_sums(of.rows, of.w1, of.routes)
    rows = of.rows
    if of.w1 is not None:
        value = golden.stage1(of.rows, of.w1, of.routes, "f16").float()
        given = of.call.arguments
        if given["smooth2"] is not None:
            value = value * operands.smooth_factors(given["smooth2"], of.routes.ids)
        rows = operands.activation(value, of.mode, encoding_of(of.call), **operands.named_rule(of.mode, given["rule"]))
    return golden.scaled_sums(rows, of.w2, of.routes)


def golden_of(of: Decoded, sums: Tensor) -> Tensor:
    """Every rounding where it is documented, slots in ascending order."""
    if of.w2 is None:
        return golden.activated(sums, of.routes, of.out, of.doweight).flatten(0, 1)
    parts = golden.weighted(sums, of.routes, of.out)
    if of.w1 is None and of.combine == "reduce":
        return parts.flatten(0, 1)
    return golden.combine(parts, of.routes, of.combine)


def _also(found: Bounded) -> Tensor | None:
    """What the sums may be besides numbers within their error: where that is infinite, anything."""
    also = found.also if isinstance(found, Combined) else None
    unknown = found.error.isinf() & found.value.isfinite()
    if not bool(unknown.any()):
        return also
    also = torch.zeros_like(unknown, dtype=torch.uint8) if also is None else also
    return also.masked_fill(unknown, PLUS_INFINITY + MINUS_INFINITY + NOT_A_NUMBER)


def _chunks(of: Decoded) -> list[Span]:
    tokens, topk = of.routes.ids.shape
    width = max(of.rows.payload.shape[-1], *(w.payload.shape[1] for w in (of.w1, of.w2) if w is not None))
    step = max(1, _CHUNK[of.routes.ids.device.type] // (topk * width))
    return [(start, min(tokens, start + step)) for start in range(0, tokens, step)] or [(0, 0)]


def reference(call: Call, shared: Shared) -> Reference:
    """Golden and oracle of a call. What the cases of a group have in common is computed once, unless it is too large to
    be kept, and so are the rows of the oracle, which are asked for again and again."""
    return _reference(decode(call, shared), shared)


def with_fp32_sums(call: Call) -> Reference | None:
    """What would be right if the sums of integers were fp32, of numbers that may have been dequantised before: None
    where the call has no integers."""
    of = decode(call)
    return _reference(replace(of, arithmetic=Arithmetic()), Shared()) if of.mode.integer else None


def _reference(of: Decoded, shared: Shared) -> Reference:
    call, spans = of.call, _chunks(of)
    topk = call.output.shape[0] // max(1, len(of.routes.ids))  # rows of the output per token
    w = of.w1 if of.w2 is None else of.w2
    assert w is not None
    keep = len(spans) == 1 or of.routes.ids.numel() * w.payload.shape[1] <= _KEPT
    same = *same_tensors(call), of.doweight, call.arguments.get("rule")
    kept: Kept = shared.latest("terms", same, dict) if keep else {}

    def of_chunk(what: str, span: Span, make: Callable[[Decoded], T]) -> T:
        if (what, span) in kept:
            return cast(T, kept[what, span])
        made = make(of.tokens(*span))
        if keep:
            kept[what, span] = made
        return made

    known: dict[Span, OracleRows] = {}

    def rows(span: Span) -> OracleRows:
        if span in known:
            return known[span]
        found = combined(of.tokens(*span), of_chunk("terms", span, terms))
        error = (found.error * (1 + 2.0**-22)).clamp(max=_LARGEST).float()
        also = _also(found)
        made = OracleRows(span[0] * topk, span[1] * topk, found.value, error, also)
        if keep:
            known[span] = made
        return made

    golden_rows = [golden_of(of.tokens(*span), of_chunk("golden", span, golden_sums)) for span in spans]
    return Reference(torch.cat(golden_rows), lambda: map(rows, spans), _published(call, of.mode))


def _published(call: Call, mode: Mode) -> float:
    data = call.case.get("data", "real")
    none = data in _UNPUBLISHED or (mode.arithmetic.bf16_weights and data in _UNPUBLISHED_OF_BF16_WEIGHTS)
    return math.inf if none else PUBLISHED[call.case.operator]
