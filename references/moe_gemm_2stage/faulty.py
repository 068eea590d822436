"""Two-stage MoE computed with a fault: what a wrong kernel would return for some columns of a call.

Routes are walked one by one as a kernel does, so that a fault may send each of them anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.operator import Call, Fault
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.reading import Reading, read, token_slot

Change = Callable[[Reading], "Reading | None"]


def compute(of: Reading) -> Tensor:
    """[rows of the output, C] in the output's dtype."""
    routes = of.routes
    if of.w1 is None:
        return _combined(of, _second(of, of.rows, of.source(of, routes)))
    inter = of.w1.payload.shape[1] // 2
    inner = of.columns if of.w2 is None else torch.arange(inter, device=of.columns.device)
    both = _sums(of, of.rows, of.source(of, routes), of.w1, torch.cat([inner, inner + inter]))
    gate, up = both.chunk(2, dim=1)
    share = routes.share[:, None]
    gate = gate * share if of.doweight in ("gate", "gate-and-up") else gate
    up = up * share if of.doweight == "gate-and-up" else up
    y = of.activate(gate, up)
    y = y * share if of.doweight == "after" else y
    if of.w2 is None:
        return _combined(of, y)
    out1 = torch.zeros((of.tokens * of.topk, inter), dtype=of.held, device=y.device)
    out1[token_slot(of, routes)] = y.to(of.held)
    return _combined(of, _second(of, of.between(of, out1), of.second(of, routes)))


def _second(of: Reading, rows: Operand, index: Tensor) -> Tensor:
    assert of.w2 is not None
    z = _sums(of, rows, index, of.w2, of.columns)
    return z * of.routes.share[:, None] if of.weighted else z


def _sums(of: Reading, rows: Operand, index: Tensor, w: Operand, columns: Tensor) -> Tensor:
    """fp32 [R, C]: each route's row times the columns of its expert, scaled."""
    expert, count = of.routes.expert, len(w.payload)
    part = of.terms(rows.payload.shape[-1])
    payload, scaled = of.payload_expert(expert, count), of.scale_expert(expert, count)
    left = rows.payload[index][:, part].double()
    if rows.factors is not None:
        left *= rows.factors[index][:, part]
    total = torch.zeros((len(index), len(columns)), dtype=torch.float64, device=left.device)
    for one in expert.unique().tolist():
        here = (expert == one).nonzero().flatten()
        right = w.payload[payload[here[0]]].index_select(0, columns)[:, part].double()
        if w.factors is not None:
            right *= w.factors[scaled[here[0]]].index_select(0, columns)[:, part]
        total[here] = left[here] @ right.T
    found = of.sum(total.float())
    by_channel = None if w.scale is None else of.channel_scale(w.scale, scaled, columns)
    by_row = None if rows.scale is None else of.row_scale(rows.scale, index, of.routes)
    found = found if by_channel is None else found * by_channel
    return found if by_row is None else found * by_row[:, None]


def _combined(of: Reading, value: Tensor) -> Tensor:
    """The terms [R, C] at their places in the output; slots are added where the operator adds them."""
    chain = of.w1 is not None and of.w2 is not None
    reduced = chain and not of.adds
    target, term = of.target(of, of.routes), of.term(value).to(of.dtype)
    rows = of.tokens * of.topk if reduced else of.call.output.shape[0]
    out = torch.zeros((rows, value.shape[1]), dtype=of.dtype, device=value.device)
    for one in _by_turn(target):
        fresh = of.overwrite or not of.adds
        out[target[one]] = term[one] if fresh else out[target[one]] + term[one]
    if not reduced:
        return out / of.divide if of.divide != 1 else out
    parts = out.view(of.tokens, of.topk, -1)
    total = torch.zeros(parts[:, 0].shape, dtype=of.partial, device=out.device)
    for slot in range(of.topk):
        total += parts[:, slot].to(of.partial)
    return (total / of.divide).to(of.dtype)


def _by_turn(target: Tensor) -> list[Tensor]:
    """Indices of the first route to each target, of the second ones, and so on."""
    order = torch.argsort(target, stable=True)
    ordered = target[order]
    first = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(order), device=order.device) - first
    return [order[turn == number] for number in range(int(turn.max()) + 1)] if len(order) else []


def shares(change: Callable[[Reading, Tensor], Tensor]) -> Change:
    """Other weights, where there are any: ``change(reading, weights [T, k])`` is [T, k]."""

    def changed(r: Reading) -> Reading | None:
        if r.w2 is None and r.doweight == "none":
            return None
        return replace(r, routes=replace(r.routes, share=r.by_slot(change(r, r.call.arguments["topk_weights"]))))

    return changed


def weights_read(function: Callable[[Reading, Operand, Tensor], Operand | None]) -> Change:
    """Weights read otherwise: ``function(reading, as they are, stored)`` of each stage."""

    def change(r: Reading) -> Reading | None:
        found = {name: None if w is None else function(r, w, r.call.arguments[name])
                 for name, w in (("w1", r.w1), ("w2", r.w2))}
        if all(value is None for value in found.values()):
            return None
        return replace(r, w1=found["w1"] or r.w1, w2=found["w2"] or r.w2)

    return change


def chained(change: Change) -> Change:
    """``change`` where there are both stages."""
    return lambda r: change(r) if r.w1 is not None and r.w2 is not None else None


def fault(key: str, sentence: str, change: Change) -> Fault:
    """The fault whose reading of a call ``change`` makes from the right one; None where it changes nothing."""

    def predict(call: Call, columns: Tensor) -> Tensor | None:
        if not len(call.arguments["topk_ids"]):
            return None
        reading = change(read(call, columns))
        return None if reading is None else compute(reading)

    return Fault(key, sentence, predict)
