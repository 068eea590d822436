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

from conformance.arithmetic import divided
from conformance.generate import fill_rows, integers, uniform
from conformance.routing import as_mask
from references.moe_gemm_2stage import mx, operands
from references.moe_gemm_2stage.cases import Extents
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.operands import Operand

_SPREAD = 5.0  # standard deviation of ``numbers``
# Factors of rows and of w2. "larger": many results of stage 1 are beyond fp16; "overflow": of stage 2, none of stage 1.
_OF_ROWS = {"large": 256.0, "larger": 2.0**11, "overflow": 32.0}
_OF_W2 = {"large": 256.0, "overflow": 2.0**15}
_TOPS = ((6.0, 2.0, 0.0, 0.0), (6.0, 6.0, 0.0, 0.0), (6.0, 6.0, 2.0, 0.0), (6.0, 6.0, 3.0, 0.5))  # see `_tops`
_ROUTING_SEED, _WEIGHT_SEED, _SCALE_SEED, _MASK_SEED, _BLOCK_SEED = 101, 202, 303, 404, 505
_SHIFT = 119  # of e8m0 codes, down of rows and up of w1 or w2: many codes of rows are 0, 2^-127, then


def numbers(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: multiples of 1/16 in [-8.5, 8.5]."""
    coarse = fill_rows(torch.empty((rows, width), device=device), "exact", seed)
    fine = fill_rows(torch.empty((rows, width), device=device), "exact", seed + 50021)
    return coarse.add_(fine.mul_(1 / 16))


def decades(count: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [count, 1]: between 2^-8 and 2, evenly over the exponents; the first and the last are among the larger."""
    exponent = integers((count,), -8, 1, seed, device)
    exponent[:1] = exponent[-1:] = -1
    return torch.ldexp(1.0 + uniform((count,), seed + 1, device), exponent)[:, None]


def coded(rows: int, width: int, first: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: integers from -3 to 3 that tell rows and columns apart, with any row numbered ``first``."""
    row = torch.arange(first, first + rows, device=device)[:, None]
    column = torch.arange(width, device=device)[None, :]
    return (((row * row * 5 + row * 3 + column * (2 + row % 5) + column // 16) % 7) - 3).float()


def rows_of(count: int, width: int, mode: Mode, data: str, encoding: str, seed: int, device: torch.device) -> Operand:
    """Activations [count, width]."""
    if data == "coded" and mode.microscaled:
        return Operand(coded(count, width, seed % 97, device), factors=_blocks(count, width, 1, seed, device))
    if data == "coded":
        return Operand(coded(count, width, seed % 97, device), scale=_powers(count, mode.activation, seed, device))
    if data == "nan_blocks":
        return operands.activation(_positive(count, width, seed, device), mode)
    if data == "block_tops":
        return _fours(count, width, device)
    value = divided(numbers(count, width, seed, device), _SPREAD) * decades(count, seed + _SCALE_SEED, device)
    if mode.microscaled:
        value *= _blocks(count, width, 0, seed + _BLOCK_SEED, device)
    found = operands.activation(_of_kind(value, data), mode, encoding)
    return _shifted(found, -_SHIFT) if data == "scales" else found


def _blocks(rows: int, width: int, most: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: a power of two for each block of 32, 2^(most - 3) to 2^most: neighbours mostly differ."""
    exponent = integers((rows, width // mx.BLOCK), most - 3, most + 1, seed, device)
    return torch.exp2(exponent.float()).repeat_interleave(mx.BLOCK, dim=-1)


def _positive(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: 1/4 to 1.3, twice that in odd rows: numbers that no block rounds to 0, and of which sums are
    so near to each other that neither does a block of what stage 1 makes of them."""
    odd = torch.arange(rows, device=device)[:, None] % 2
    return (numbers(rows, width, seed, device).abs() + 2.0) * torch.where(odd == 1, 0.25, 0.125)


def _shifted(of: Operand, power: int) -> Operand:
    """Every other block's scale multiplied by 2^power, as far as e8m0 has such a number."""
    assert of.factors is not None
    codes = mx.encode_e8m0(of.factors)
    moved = (codes.int() + power).clamp(0, mx.E8M0_NAN - 1).to(torch.uint8)
    odd = torch.arange(codes.shape[-1], device=codes.device) // mx.BLOCK % 2 == 1
    return replace(of, factors=mx.decode_e8m0(torch.where(odd, codes, moved)))


def _fours(rows: int, width: int, device: torch.device) -> Operand:
    """Rows that are one power of two in four columns side by side, and 0 elsewhere."""
    row = torch.arange(rows, device=device)
    group = row * 5 % (width // 4)
    payload = torch.where(torch.arange(width, device=device)[None] // 4 == group[:, None], 2.0, 0.0)
    return Operand(payload, factors=torch.exp2((row % 3).float())[:, None].expand(rows, width).contiguous())


def _is_top(inter: int, device: torch.device) -> Tensor:
    """bool [I]: the channels that are the largest of their blocks, one in each."""
    channel = torch.arange(inter, device=device)
    return channel % mx.BLOCK == (5 + 3 * (channel // mx.BLOCK)) % mx.BLOCK


def _tops(rows: int, width: int, mode: Mode, expert: int, seed: int, device: torch.device) -> Operand:
    """Weights [1, 2 I, width] by which `_fours` become blocks of I whose largest magnitude is 8, 12, 14 or 15.5 times a
    power of two, in turn, where the rules of scales part. The gate is a power of two so large that SiLU leaves it as it
    is. All else are odd and even multiples of what a right scale's smallest step is: for e2m1 of half of that power,
    for e4m3 of what is subnormal beside the largest magnitude."""
    inter = rows // 2
    channel, column = torch.arange(inter, device=device), torch.arange(width, device=device) % 4
    kind = (channel // mx.BLOCK + expert) % len(_TOPS)
    rest = coded(inter, width, 11 * expert + seed % 89, device)
    rest = rest * torch.tensor([1.0, 0.5, 0.0, 0.0], device=device)[column]
    is_top = _is_top(inter, device)
    up = torch.where(is_top[:, None], torch.tensor(_TOPS, device=device)[kind][:, column], rest)
    small = 2.0**-13 if mode.activation == "mxfp8" else 1.0
    gate = torch.where(column == 0, 4.0, 0.0).expand(inter, width)
    factors = torch.cat([torch.full((inter,), 8.0, device=device), torch.where(is_top, 1.0, small)])
    return Operand(torch.cat([gate, up])[None], factors=factors[None, :, None].expand(1, rows, width).contiguous())


def _of_kind(value: Tensor, data: str) -> Tensor:
    """Rows of numbers as ``data`` asks for: "zero_rows", every third row 0; others some times as large."""
    if data == "zero_rows":
        value[1::3] = 0.0
    return value * _OF_ROWS.get(data, 1.0)


def smoothed_rows(count: int, width: int, mode: Mode, data: str, encoding: str, seed: int, ids: Tensor, experts: int
                  ) -> Operand:
    """int8smooth: activations [T, k, width] after multiplication by the factor of each slot's expert."""
    value = divided(numbers(count, width, seed, ids.device), _SPREAD) * decades(count, seed + _SCALE_SEED, ids.device)
    value = _of_kind(value, data)
    factors = smoothing(experts, width, seed + 7, ids.device)
    return operands.activation(operands.smoothed(value[:, None], factors, ids), mode, encoding)


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
            return Operand(value, factors=_blocks(rows, width, 1, seed, device)[None])
        scale = _powers(rows, mode.weight, seed, device)
        if mode.weight == "int4_g32":
            assert scale is not None
            return Operand(value, factors=scale[None, :, None].expand(1, rows, width))
        return Operand(value, scale=None if scale is None else scale[None])
    if data == "nan_blocks":
        return operands.weight(divided(_positive(rows, width, seed, device), width)[None], mode)
    if data == "block_tops" and gated:
        return _tops(rows, width, mode, expert, seed, device)
    value = divided(numbers(rows, width, seed, device), _SPREAD * math.sqrt(width))
    if gated:
        gate = value[: rows // 2]
        value[: rows // 2] = gate.abs() * 0.25 + gate * 0.75
    value *= decades(rows, seed + _SCALE_SEED, device)
    if not gated:  # stage 2 is linear in its rows, stage 1 quadratic
        value *= _OF_W2.get(data, 1.0)
    if mode.weight in mx.ELEMENTS:
        value *= _blocks(rows, width, 0, seed + _BLOCK_SEED, device)
    found = operands.weight(value[None], mode, encoding)
    if data == "block_tops":  # beside a block's largest number the others would not be seen in every other sum
        hidden = _is_top(width, device) & (torch.arange(rows, device=device) % 2 == 0)[:, None]
        found = replace(found, payload=found.payload.masked_fill(hidden, 0.0))
    return _shifted(found, _SHIFT) if data == "scales" else found


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


def routing_weights(of: Extents, data: str, kind: str, seed: int, device: torch.device) -> Tensor:
    """fp32 [T, k], strongly uneven, each row's sum 1 up to rounding; powers of two for exact sums.

    ``kind`` "signed": a third of them negative, a sixth 0, and a few of those -0. "nan": an eighth of them NaN.
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
    elif kind == "nan":
        found[integers(shape, 0, 8, seed + _WEIGHT_SEED + 1, device) == 0] = math.nan
    return found


def expert_mask(of: Extents, which: str, values: str, seed: int, device: torch.device) -> Tensor | None:
    """int32 [E] or, of "no", None. "yes": 0 for two thirds of the experts, neither the first nor the last of more than
    two; "other": for as many, most of them others. ``values`` as of `routing.as_mask`."""
    if which == "no":
        return None
    expert = torch.arange(of.experts, device=device)
    local = (expert % 3 == 0) | (expert >= max(2, of.experts - 1))
    if which == "other":
        local[1:-1] = local[1:-1].roll(1)
    return as_mask(local, torch.int32, values, seed + _MASK_SEED)
