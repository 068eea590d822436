"""Data of two-stage MoE, the same bits on every device: signed, uneven, over three decades, distinct per slot.

Numbers are near-uniform and symmetric, so that 4-bit formats hold them too; each row and each output channel has a
scale of its own between 2^-8 and 2, each block of a microscaled one a factor besides; the gate's distribution differs
from the up projection's. All arithmetic is exact or rounded once per element, so that devices agree.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conformance.data.arithmetic import divided
from conformance.data.generate import integers, uniform
from conformance.data.routing import as_mask
from references.moe_gemm_2stage import mx, operands, sorting
from references.moe_gemm_2stage.cases import Extents
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.extremes import fours, is_top, of_range, shifted, subnormal, tops
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.payloads import blocks, coded, decades, numbers, positive

_SPREAD = 5.0  # standard deviation of ``numbers``
# Factors of rows and of w2. "larger": many results of stage 1 are beyond fp16; "overflow": of stage 2, none of stage 1.
_OF_ROWS = {"large": 256.0, "larger": 2.0**11, "overflow": 32.0}
_OF_W2 = {"large": 256.0, "overflow": 2.0**15}
_ROUTING_SEED, _WEIGHT_SEED, _SCALE_SEED, _MASK_SEED, _BLOCK_SEED, _RUN_SEED = 101, 202, 303, 404, 505, 606
_SHIFT = 119  # of e8m0 codes, down of rows and up of w1 or w2: many codes of rows are 0, 2^-127, then
_SUBNORMAL = ("subnormal_channels", "subnormal_rows")
_OF_SUBNORMAL = 7  # powers of two by which subnormal fp8 numbers become about as large as others
_POSITIVE = ("nan_blocks", "one_sign")


def rows_of(count: int, width: int, mode: Mode, data: str, encoding: str, seed: int, device: torch.device) -> Operand:
    """Activations [count, width]."""
    if data == "coded" and mode.microscaled:
        return Operand(coded(count, width, seed % 97, device), factors=blocks(count, width, 1, seed, device))
    if data == "coded":
        return Operand(coded(count, width, seed % 97, device), scale=_powers(count, mode.activation, seed, device))
    if data in _POSITIVE:
        return operands.activation(positive(count, width, seed, device), mode, encoding)
    if data in _SUBNORMAL:
        found = operands.activation(positive(count, width, seed, device), mode, encoding)
        return of_range(found, data == "subnormal_rows", mode, width, seed + _SCALE_SEED)
    if data == "subnormal_codes":
        payload = subnormal(count, width, encoding, seed % 89, device)
        if mode.microscaled:
            return Operand(payload, factors=blocks(count, width, _OF_SUBNORMAL, seed, device))
        return Operand(payload, scale=decades(count, seed + _SCALE_SEED, device)[:, 0] * 2.0**_OF_SUBNORMAL)
    if data == "block_tops":
        return fours(count, width, device)
    value = divided(numbers(count, width, seed, device), _SPREAD) * decades(count, seed + _SCALE_SEED, device)
    if mode.microscaled:
        value *= blocks(count, width, 0, seed + _BLOCK_SEED, device)
    found = operands.activation(_of_kind(value, data), mode, encoding)
    return shifted(found, -_SHIFT) if data == "scales" else found


def _of_kind(value: Tensor, data: str) -> Tensor:
    """Rows of numbers as ``data`` asks for: "zero_rows", every third row 0; others some times as large."""
    if data == "zero_rows":
        value[1::3] = 0.0
    return value * _OF_ROWS.get(data, 1.0)


def smoothed_rows(count: int, width: int, mode: Mode, data: str, encoding: str, seed: int, ids: Tensor, experts: int
                  ) -> Operand:
    """int8smooth: activations [T, k, width] after multiplication by the factor of each slot's expert."""
    value = divided(numbers(count, width, seed, ids.device), _SPREAD) * decades(count, seed + _SCALE_SEED, ids.device)
    positives = data in (*_SUBNORMAL, *_POSITIVE)
    value = positive(count, width, seed, ids.device) if positives else _of_kind(value, data)
    factors = smoothing(experts, width, seed + 7, ids.device)
    found = operands.activation(operands.smoothed(value[:, None], factors, ids), mode, encoding)
    if data not in _SUBNORMAL:
        return found
    return of_range(found, data == "subnormal_rows", mode, width, seed + _SCALE_SEED)


def smoothing(experts: int, width: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [E, width] factors between 0.75 and 1.25."""
    return uniform((experts, width), seed, device) / 2 + 0.75


def weight_of(expert: int, rows: int, width: int, mode: Mode, data: str, encoding: str, seed: int, gated: bool,
              device: torch.device) -> Operand:
    """Weights [1, rows, width] of one expert. ``gated``: the first half of the rows is the gate, which is skewed."""
    seed = seed + 7919 * expert
    if data == "coded":
        value = coded(rows, width, 11 * expert + seed % 89, device)[None]
        if mode.weight in mx.ELEMENTS:
            return Operand(value, factors=blocks(rows, width, 1, seed, device)[None])
        scale = _powers(rows, mode.weight, seed, device)
        if mode.weight == "int4_g32":
            assert scale is not None
            return Operand(value, factors=scale[None, :, None].expand(1, rows, width))
        return Operand(value, scale=None if scale is None else scale[None])
    if data in _POSITIVE:
        return operands.weight(divided(positive(rows, width, seed, device), width)[None], mode, encoding)
    if data in _SUBNORMAL:
        found = operands.weight(positive(rows, width, seed, device)[None], mode, encoding)
        return of_range(found, data == "subnormal_channels", mode, width, seed + _SCALE_SEED)
    if data == "subnormal_codes" and mode.weight == "fp8":
        scale = decades(rows, seed + _SCALE_SEED, device)[:, 0] * 2.0 ** (_OF_SUBNORMAL - width.bit_length() // 2)
        return Operand(subnormal(rows, width, encoding, 11 * expert + seed % 89, device)[None], scale=scale[None])
    if data == "block_tops" and gated:
        return tops(rows, width, mode, expert, seed, device)
    value = divided(numbers(rows, width, seed, device), _SPREAD * math.sqrt(width))
    if gated:
        gate = value[: rows // 2]
        value[: rows // 2] = gate.abs() * 0.25 + gate * 0.75
    value *= decades(rows, seed + _SCALE_SEED, device)
    if not gated:  # stage 2 is linear in its rows, stage 1 quadratic
        value *= _OF_W2.get(data, 1.0)
    if mode.weight in mx.ELEMENTS:
        value *= blocks(rows, width, 0, seed + _BLOCK_SEED, device)
    found = _with_lowest(operands.weight(value[None], mode, encoding), mode)
    if data == "block_tops":  # beside a block's largest number the others would not be seen in every other sum
        hidden = is_top(width, device) & (torch.arange(rows, device=device) % 2 == 0)[:, None]
        found = replace(found, payload=found.payload.masked_fill(hidden, 0.0))
    return shifted(found, _SHIFT) if data == "scales" else found


def _with_lowest(of: Operand, mode: Mode) -> Operand:
    """Of integers every other number that is as far below 0 as quantisation goes one lower: the code that negation and
    abs() leave negative."""
    largest = {"int8": 127.0, "int4": 7.0, "int4_g32": 7.0}.get(mode.weight)
    if largest is None:
        return of
    row, column = (torch.arange(size, device=of.payload.device) for size in of.payload.shape[-2:])
    lowest = (of.payload == -largest) & ((row[:, None] + column) % 2 == 0)
    return replace(of, payload=of.payload - lowest.float())


def _powers(count: int, form: str, seed: int, device: torch.device) -> Tensor | None:
    """Scales that are powers of two, for data whose sums are exact; None where the format has none."""
    if form in ("f16", "bf16"):
        return None
    return torch.exp2(integers((count,), -1, 2, seed, device).float())


def experts_of(of: Extents, routing: str, seed: int, device: torch.device, mask: Tensor | None = None) -> Tensor:
    """int32 [T, k] distinct experts per token.

    skewed: some experts are popular, one in the middle is never chosen (where E - k allows it), token 0 has expert 0
    in slot 0 and the last token the last expert; a token in the middle has masked experts only, where there are enough.
    even: hashed scores. one_expert: every token makes the same choice, the last expert first. sentinel: as skewed, and
    no other token has expert 0, so that packed id 0 stands before padding in one block.
    """
    score = uniform((of.tokens, of.experts), seed + _ROUTING_SEED, device)
    if routing == "one_expert":
        score = torch.arange(of.experts, device=device).float().expand(of.tokens, of.experts).clone()
    elif routing != "even":
        score += uniform((of.experts,), seed + _ROUTING_SEED + 1, device)[None] * 0.9
        if of.experts > of.topk + 1 and of.experts > 2:
            score[:, of.experts // 2] = -1.0
        if routing == "sentinel":
            score[1:, 0] = -0.5
        if mask is not None and of.tokens > 2:
            score[of.tokens // 2] += 4.0 * (mask == 0)
        score[:1, 0] = 9.0
        score[1:][-1:, -1] = 8.0
    return score.argsort(dim=1, descending=True, stable=True)[:, : of.topk].to(torch.int32)


def shuffled_runs(found: sorting.Sorted, tokens: int, seed: int) -> sorting.Sorted:
    """The same lists with the rows of each expert in another order, as sorts by atomic counters leave them. The padding
    stays behind them."""
    row = ((found.token_ids[: found.valid_rows] & sorting.MOST_TOKENS) < tokens).nonzero().flatten()
    expert = found.expert_ids[row // found.block]
    order = integers((len(row),), 0, 1 << 31, seed + _RUN_SEED, row.device).argsort(stable=True)
    order = order[expert[order].argsort(stable=True)]
    ids, weights = found.token_ids.clone(), found.weights.clone()
    ids[row], weights[row] = found.token_ids[row[order]], found.weights[row[order]]
    return replace(found, token_ids=ids, weights=weights)


def routing_weights(of: Extents, data: str, kind: str, seed: int, device: torch.device) -> Tensor:
    """fp32 [T, k], strongly uneven, each row's sum 1 up to rounding; powers of two for exact sums.

    ``kind`` "signed": a third of them negative, a sixth 0, and a few of those -0. "large": a quarter as they are, the
    others times 2.5 (a factor that models have), 16 and -40. "subnormal": those of every other token below 2^-126.
    "nan": an eighth of them NaN.
    """
    shape = of.tokens, of.topk
    if data == "coded":
        found = torch.exp2(integers(shape, -3, 1, seed + _WEIGHT_SEED, device).float())
    else:
        share = uniform(shape, seed + _WEIGHT_SEED, device)
        share = share * share
        share = share * share + 0.02
        total = share[:, 0].clone()
        for slot in range(1, of.topk):
            total += share[:, slot]
        found = share / total[:, None]
    if kind == "signed":
        found *= torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0], device=device)[
            integers(shape, 0, 6, seed + _WEIGHT_SEED + 1, device)]
        found[::4] *= -1.0
    elif kind == "large":
        found *= torch.tensor([1.0, 2.5, 16.0, -40.0], device=device)[
            integers(shape, 0, 4, seed + _WEIGHT_SEED + 1, device)]
    elif kind == "subnormal":
        found[::2] *= 2.0**-126
    elif kind == "nan":
        found[integers(shape, 0, 8, seed + _WEIGHT_SEED + 1, device) == 0] = math.nan
    return found


def expert_mask(of: Extents, which: str, values: str, seed: int, device: torch.device) -> Tensor | None:
    """int32 [E] or, of "no", None. "yes": 0 for two thirds of the experts, neither the first nor the last of more than
    two; "other": for as many, most of them others. "lower", "upper": that half of the experts is here, as on the ranks
    of expert parallelism; "one": the last but one alone; "none", "all". ``values`` as of `routing.as_mask`."""
    if which == "no":
        return None
    expert = torch.arange(of.experts, device=device)
    ranks = {"lower": (0, of.experts // 2), "upper": (of.experts // 2, of.experts), "none": (0, 0),
             "all": (0, of.experts), "one": (max(0, of.experts - 2), max(1, of.experts - 1))}
    if which in ranks:
        first, end = ranks[which]
        return as_mask((expert >= first) & (expert < end), torch.int32, values, seed + _MASK_SEED)
    local = (expert % 3 == 0) | (expert >= max(2, of.experts - 1))
    if which == "other":
        local[1:-1] = local[1:-1].roll(1)
    return as_mask(local, torch.int32, values, seed + _MASK_SEED)
