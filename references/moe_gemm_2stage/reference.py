"""Golden and oracle of the three operators, read from what the kernels get, some tokens at a time.

The operands are decoded from their layouts; rows of slots without an expert count as zeros, whatever stands there.
Error bounds are those of `bounds`, before the last cast, in fp32 rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from references.moe_gemm_2stage import golden, layouts, operands, scales, sorting, stages
from references.moe_gemm_2stage.bounds import Arithmetic, Bounded, Combined
from references.moe_gemm_2stage.chain import intermediate
from references.moe_gemm_2stage.contract import sizes_of
from references.moe_gemm_2stage.dtypes import MODES, Mode
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.rounding import OUTPUTS
from references.moe_gemm_2stage.stages import Routes
from references.moe_gemm_2stage.storage import ENCODINGS, read_rows, read_weight

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


@dataclass(frozen=True)
class Decoded:
    """A call's operands as numbers. rows: of its first stage, [T, k, K]."""

    call: Call
    mode: Mode
    routes: Routes
    rows: Operand
    w1: Operand | None
    w2: Operand | None
    out: str
    arithmetic: Arithmetic

    @property
    def combine(self) -> str:
        return str(self.call.arguments.get("combine", ""))

    @property
    def doweight(self) -> str:
        return str(self.call.arguments.get("doweight", "none"))

    def tokens(self, start: int, stop: int) -> Decoded:
        """The same of some tokens."""
        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[start:stop]

        rows = replace(self.rows, payload=self.rows.payload[start:stop], factors=cut(self.rows.factors),
                       scale=cut(self.rows.scale))
        return replace(self, routes=Routes(self.routes.ids[start:stop], self.routes.weights[start:stop]), rows=rows)


def decode(call: Call, shared: Shared | None = None) -> Decoded:
    """Read a call's arguments. Weights, which take longest, are read once for the cases that share them."""
    given = call.arguments
    mode, of = MODES[given["in_dtype"]], sizes_of(given)
    served = sorting.routed(given["topk_ids"], of["E"], given["expert_mask"])
    ids = given["topk_ids"]
    if given["expert_mask"] is not None:
        ids = sorting.local_ids(given["expert_mask"])[ids.clamp(0, of["E"] - 1).long()]
    routes = Routes(torch.where(served, ids, -1).to(torch.int32), torch.where(served, given["topk_weights"], 0.0))
    rows = _rows(call, mode)
    payload = torch.where(served[..., None], rows.payload, 0.0)
    rows = Operand(payload, None if rows.factors is None else torch.where(served[..., None], rows.factors, 1.0),
                   None if rows.scale is None else torch.where(served, rows.scale, 1.0))
    shared = shared or Shared()
    w1, w2 = (shared.latest(w, _same(call), partial(_weight, call, w, mode, routes)) if w in given else None
              for w in ("w1", "w2"))
    out = next(key for key, dtype in OUTPUTS.items() if dtype == call.output.dtype)
    return Decoded(call, mode, routes, rows, w1, w2, out, mode.arithmetic)


def _rows(call: Call, mode: Mode) -> Operand:
    """Rows [T, k, K] of the first stage."""
    if mode.microscaled:
        return microscaled_rows(call)
    given, topk = call.arguments, call.arguments["topk_ids"].shape[1]
    name = "x" if "x" in given else "a2"
    rows = read_rows(given[name], given[f"scale_{name}"])
    if name == "a2":
        return Operand(rows.payload, scale=None if rows.scale is None else rows.scale.view(-1, topk))
    if mode.slot_major:
        assert rows.scale is not None
        return Operand(layouts.token_major(rows.payload, topk), scale=layouts.token_major(rows.scale, topk))
    return operands.per_slot(rows, topk)


def microscaled_rows(call: Call) -> Operand:
    """Rows [T, k, K] of the first stage, each with the scales that stand at its place in the sorted list."""
    given, of = call.arguments, sizes_of(call.arguments)
    name, ids = "x" if "x" in given else "a2", given["sorted_token_ids"]
    routes = sorting.Sorted(ids, given["sorted_weights"], given["sorted_expert_ids"], given["num_valid_ids"],
                            given["block"])
    place = sorting.positions(routes, of["T"], of["k"])
    stored, width = given[name], of["H" if name == "x" else "I"]
    if name == "x":
        stored = stored[:, None].expand(-1, of["k"], -1)
    return read_rows(stored, scales.unsort(given[f"scale_{name}"], place, len(ids), width))


def _same(call: Call) -> tuple[object, ...]:
    """What calls have in common whose tensors are the same ones. They live as long as what is shared."""
    return tuple(id(value) for value in call.arguments.values() if isinstance(value, Tensor))


def _weight(call: Call, name: str, mode: Mode, routes: Routes) -> Operand:
    """A weight; scales of experts without a token, which slots without an expert are multiplied by, are 1."""
    found = read_weight(call.arguments[name], call.arguments[f"scale_{name}"], mode)
    if found.scale is None:
        return found
    used = torch.zeros(len(found.scale), dtype=torch.bool, device=found.scale.device)
    used[routes.ids[routes.valid].long()] = True
    return replace(found, scale=torch.where(used[:, None], found.scale, 1.0))


def _encoding(call: Call) -> str:
    form = ENCODINGS.get(call.arguments["x"].dtype)
    return "ocp" if form is None else form.name


def terms(of: Decoded) -> Bounded:
    """What does not depend on the output's dtype and on how slots are combined: y [T, k, I], or z [T, k, H]."""
    if of.w2 is None:
        assert of.w1 is not None
        return stages.stage1(of.rows, of.w1, of.routes, of.doweight, of.arithmetic)
    rows = of.rows
    if of.w1 is not None:
        y = stages.stage1(of.rows, of.w1, of.routes, "none", of.arithmetic)
        given = of.call.arguments
        rows = intermediate(y, of.mode, of.routes, given["smooth2"], _encoding(of.call),
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
        rows = operands.activation(value, of.mode, _encoding(of.call), **operands.named_rule(of.mode, given["rule"]))
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
    same = *_same(call), of.doweight, call.arguments.get("rule")
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
