"""Data of two-stage MoE at the ends of its formats: scales, and blocks between the stages where rules part."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conformance.data.generate import integers, uniform
from references.moe_gemm_2stage import fp8, mx
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.payloads import coded

_TOPS = ((6.0, 2.0, 0.0, 0.0), (6.0, 6.0, 0.0, 0.0), (6.0, 6.0, 2.0, 0.0), (6.0, 6.0, 3.0, 0.5))  # see `tops`


def shifted(of: Operand, power: int) -> Operand:
    """Every other block's scale multiplied by 2^power, as far as e8m0 has such a number."""
    assert of.factors is not None
    codes = mx.encode_e8m0(of.factors)
    moved = (codes.int() + power).clamp(0, mx.E8M0_NAN - 1).to(torch.uint8)
    odd = torch.arange(codes.shape[-1], device=codes.device) // mx.BLOCK % 2 == 1
    return replace(of, factors=mx.decode_e8m0(torch.where(odd, codes, moved)))


def of_range(of: Operand, small: bool, mode: Mode, width: int, seed: int) -> Operand:
    """Other fp32 scales. ``small``: half of them subnormal numbers, the others the next above. Else so large that the
    products of both are of a common size, and as small as lets the sum of ``width`` products be multiplied by either of
    the two first. 16-bit rows, which have none, are multiplied themselves, by powers of two."""
    shape = of.payload.shape[:-1] if of.factors is None else (*of.payload.shape[:-1], width // GROUP)
    device = of.payload.device
    if small:  # bits: from 2^-129 to 2^-126, and from there to 2^-125
        low, high = (integers(shape, 1 << bit, 1 << top, seed, device) for bit, top in ((20, 23), (23, 24)))
        scale = torch.where(integers(shape, 0, 2, seed + 1, device) == 0, low, high).to(torch.int32).view(torch.float32)
        if of.factors is not None:
            return replace(of, factors=scale.repeat_interleave(GROUP, dim=-1))
        return replace(of, scale=scale)
    largest = 4.0 if mode.activation == "bf16" else 128.0 if mode.integer else 448.0
    of_weights = {"fp8": 448.0, "int8": 128.0}.get(mode.weight, 8.0)
    room = 126 - math.ceil(math.log2(largest * of_weights * width))
    power = integers(shape, room - 3, room, seed + 1, device)
    if of.scale is None:
        return replace(of, payload=torch.ldexp(of.payload, power[..., None]))
    return replace(of, scale=torch.ldexp(1.0 + uniform(shape, seed, device), power))


def subnormal(rows: int, width: int, encoding: str, first: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: fp8 numbers, up to 15 times the smallest one, of which those below 8 are subnormal."""
    count = 4.0 * coded(rows, width, first, device) + coded(rows, width, first + 3, device)
    return count * 2.0 ** -(fp8.FORMS[encoding].bias + 2)


def fours(rows: int, width: int, device: torch.device) -> Operand:
    """Rows that are one power of two in four columns side by side, and 0 elsewhere."""
    row = torch.arange(rows, device=device)
    group = row * 5 % (width // 4)
    payload = torch.where(torch.arange(width, device=device)[None] // 4 == group[:, None], 2.0, 0.0)
    return Operand(payload, factors=torch.exp2((row % 3).float())[:, None].expand(rows, width).contiguous())


def is_top(inter: int, device: torch.device) -> Tensor:
    """bool [I]: the channels that are the largest of their blocks, one in each."""
    channel = torch.arange(inter, device=device)
    return channel % mx.BLOCK == (5 + 3 * (channel // mx.BLOCK)) % mx.BLOCK


def tops(rows: int, width: int, mode: Mode, expert: int, seed: int, device: torch.device) -> Operand:
    """Weights [1, 2 I, width] by which `fours` become blocks of I whose largest magnitude is 8, 12, 14 or 15.5 times a
    power of two, in turn, where the rules of scales part. The gate is a power of two so large that SiLU leaves it as it
    is. All else are odd and even multiples of what a right scale's smallest step is: for e2m1 of half of that power,
    for e4m3 of what is subnormal beside the largest magnitude."""
    inter = rows // 2
    channel, column = torch.arange(inter, device=device), torch.arange(width, device=device) % 4
    kind = (channel // mx.BLOCK + expert) % len(_TOPS)
    rest = coded(inter, width, 11 * expert + seed % 89, device)
    rest = rest * torch.tensor([1.0, 0.5, 0.0, 0.0], device=device)[column]
    top = is_top(inter, device)
    up = torch.where(top[:, None], torch.tensor(_TOPS, device=device)[kind][:, column], rest)
    small = 2.0**-13 if mode.activation == "mxfp8" else 1.0
    gate = torch.where(column == 0, 4.0, 0.0).expand(inter, width)
    factors = torch.cat([torch.full((inter,), 8.0, device=device), torch.where(top, 1.0, small)])
    return Operand(torch.cat([gate, up])[None], factors=factors[None, :, None].expand(1, rows, width).contiguous())
