"""Faulty readings of the operands of two-stage MoE: their scales, and how payloads lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts
from references.moe_gemm_2stage.faulty import Change, Reading, Routes, encoding, fault, quantised, smoothed
from references.moe_gemm_2stage.operands import GROUP, Operand

# ---- Scales -------------------------------------------------------------------------------------------------------


def _channels(function: Callable[[Tensor, Tensor, Tensor], Tensor | None]) -> Change:
    def change(r: Reading) -> Reading | None:
        scaled = any(w is not None and w.scale is not None for w in (r.w1, r.w2))
        return replace(r, channel_scale=function) if scaled else None

    return change


def _rows(function: Callable[[Tensor, Tensor, Routes], Tensor | None]) -> Change:
    return lambda r: None if r.rows.scale is None else replace(r, row_scale=function)


def _row_scale_of_slot_0(r: Reading) -> Reading | None:
    if r.rows.scale is None or r.w2 is None:
        return None
    topk = r.topk
    if r.w1 is None:
        return replace(r, row_scale=lambda scale, row, routes: scale[row // topk * topk])
    return replace(r, between=lambda of, out1: _slot_0_scales(of, quantised(of, smoothed(of, out1))))


def _slot_0_scales(r: Reading, rows: Operand) -> Operand:
    assert rows.scale is not None
    return replace(rows, scale=rows.scale.view(r.tokens, r.topk)[:, :1].repeat(1, r.topk).flatten())


def _gate_for_up(r: Reading) -> Reading | None:
    if r.w1 is None or (r.w1.scale is None and r.w1.factors is None):
        return None

    def twice(value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.cat([value.chunk(2, dim=1)[0]] * 2, dim=1)

    return replace(r, w1=replace(r.w1, factors=twice(r.w1.factors), scale=twice(r.w1.scale)))


def _weights(function: Callable[[Reading, Operand, Tensor], Operand | None]) -> Change:
    """Weights read otherwise: ``function(reading, as they are, stored)`` of each stage."""

    def change(r: Reading) -> Reading | None:
        found = {name: None if w is None else function(r, w, r.call.arguments[name])
                 for name, w in (("w1", r.w1), ("w2", r.w2))}
        if all(value is None for value in found.values()):
            return None
        return replace(r, w1=found["w1"] or r.w1, w2=found["w2"] or r.w2)

    return change


def _flushed(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale.abs() < torch.finfo(torch.float32).tiny, 0.0)


def _all_flushed(r: Reading) -> Reading | None:
    """All fp32 scales: those of rows and of channels or groups."""
    changes = (_rows(lambda s, row, routes: _flushed(s[row])), _channels(lambda s, e, c: _flushed(s[e[:, None], c])),
               _groups(_flushed) if r.mode.weight == "int4_g32" else lambda r: None)
    found: Reading | None = None
    for change in changes:
        found = change(found or r) or found
    return found


def _groups(function: Callable[[Tensor], Tensor | None]) -> Change:
    """Factors [E, N, K/32] of groups, changed."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        if w.factors is None:
            return None
        found = function(w.factors[..., ::GROUP])
        return replace(w, factors=None if found is None else found.repeat_interleave(GROUP, dim=-1))

    return _weights(change)


def _dequantised(scaled: Callable[[Tensor], Tensor], cast: Callable[[Tensor], Tensor]) -> Change:
    """4-bit weights of bf16 rows multiplied by ``scaled(scale)`` before the product, and ``cast`` then."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        scale = w.factors if w.scale is None else w.scale[..., None]
        if not r.mode.arithmetic.bf16_weights or scale is None:
            return None
        return Operand(cast(w.payload * scaled(scale)))

    return _weights(change)


def _bf16(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def _cut(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


# ---- Storage ------------------------------------------------------------------------------------------------------


def _other_encoding(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
    if r.mode.weight != "fp8":
        return None
    other = fp8.FNUZ if encoding(r.call) == "ocp" else fp8.OCP
    return replace(w, payload=fp8.decode(layouts.unpreshuffle(stored.view(torch.uint8)), other))


def _rows_other_encoding(r: Reading) -> Reading | None:
    if r.mode.activation != "fp8":
        return None
    name = "x" if "x" in r.call.arguments else "a2"
    other = fp8.FNUZ if encoding(r.call) == "ocp" else fp8.OCP
    codes = r.call.arguments[name].view(torch.uint8)

    def between(of: Reading, out1: Tensor) -> Operand:
        right = quantised(of, smoothed(of, out1))
        own = fp8.FORMS[encoding(of.call)]
        return replace(right, payload=fp8.decode(fp8.encode(right.payload, own), other))

    payload = fp8.decode(codes.reshape(-1, codes.shape[-1]), other)
    return replace(r, rows=replace(r.rows, payload=payload), between=between)


def _raw_order(r: Reading, w: Operand, stored: Tensor) -> Operand:
    """As if the weights had not been preshuffled."""
    return replace(w, payload=_shuffled(r, w.payload, True))


def _wrong_width(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
    """16 elements of 16 bits are taken to lie together, where 8 do."""
    return replace(w, payload=_shuffled(r, w.payload, False)) if stored.element_size() == 2 else None


def _shuffled(r: Reading, payload: Tensor, ignored: bool) -> Tensor:
    """The numbers [E, N, K] in memory order, read row by row, or with 16 elements side by side."""
    experts, rows, columns = payload.shape
    width = {"f16": 8, "bf16": 8, "mxfp4": 32}.get(r.mode.weight, 16)
    memory = payload.view(experts, rows // 16, 16, columns // width, width).transpose(2, 3).reshape(payload.shape)
    if ignored:
        return memory
    return memory.view(experts, rows // 16, columns // 16, 16, 16).transpose(2, 3).reshape(payload.shape)


def _nibbles(function: Callable[[Tensor], Tensor]) -> Change:
    """4-bit weights: ``function`` gives int8 [..., K] of the packed bytes [..., K/2]."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        if not r.mode.weight.startswith("int4"):
            return None
        return replace(w, payload=layouts.unpreshuffle(function(stored)).float())

    return _weights(change)


def _paired(stored: Tensor) -> Tensor:
    nibbles = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).to(torch.int16)
    return ((nibbles ^ 8) - 8).to(torch.int8)


def _unsigned(stored: Tensor) -> Tensor:
    return layouts.unpack_int4(stored) & 15


def _lowest(read_as: Callable[[float], float]) -> Change:
    """Integer weights whose lowest code is taken for another number."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        lowest = {"int8": -128.0, "int4": -8.0, "int4_g32": -8.0}.get(r.mode.weight)
        if lowest is None:
            return None
        return replace(w, payload=w.payload.masked_fill(w.payload == lowest, read_as(lowest)))

    return _weights(change)


OPERANDS = (
    fault("channel-scale-missing", "the scales of output channels are left out", _channels(lambda s, e, c: None)),
    fault("channel-scale-twice", "the scales of output channels are applied twice",
          _channels(lambda s, e, c: s[e[:, None], c] ** 2)),
    fault("channel-scale-of-channel-0", "channel 0's scale counts for all channels of an expert",
          _channels(lambda s, e, c: s[e[:, None], c * 0])),
    fault("channel-scale-of-next-expert", "channels are scaled by the next expert's scales",
          _channels(lambda s, e, c: s[(e[:, None] + 1) % len(s), c])),
    fault("channel-scale-of-expert-0", "channels are scaled by expert 0's scales",
          _channels(lambda s, e, c: s[e[:, None] * 0, c])),
    fault("channel-scale-power-of-two", "scales of channels are cut to powers of two",
          _channels(lambda s, e, c: s[e[:, None], c].log2().floor().exp2())),
    fault("scales-rounded", "the scales of weights are rounded to bf16, and so are weights times scales",
          _dequantised(_bf16, _bf16)),
    fault("scales-rounded", "the scales of groups are rounded to bf16", _groups(_bf16)),
    fault("weights-cut", "weights times scales are cut to bf16, and not rounded", _dequantised(lambda s: s, _cut)),
    fault("scale-flushed", "fp32 scales below 2^-126 count as 0", _all_flushed),
    fault("scale-flushed", "fp32 scales of channels below 2^-126 count as 0",
          _channels(lambda s, e, c: _flushed(s[e[:, None], c]))),
    fault("scale-flushed", "fp32 scales of rows below 2^-126 count as 0",
          _rows(lambda s, row, routes: _flushed(s[row]))),
    fault("gate-scale-for-up", "up is scaled by the gate's scales", _gate_for_up),
    fault("row-scale-missing", "the scales of rows are left out", _rows(lambda s, row, routes: None)),
    fault("row-scale-twice", "the scales of rows are applied twice", _rows(lambda s, row, routes: s[row] ** 2)),
    fault("row-scale-of-row-0", "row 0's scale counts for all rows", _rows(lambda s, row, routes: s[row * 0])),
    fault("row-scale-of-slot-0", "the row of a slot is scaled by that of slot 0", _row_scale_of_slot_0),
    fault("group-scale-missing", "the scales of groups are left out", _groups(lambda factors: None)),
    fault("group-scale-of-first", "the first group's scales count for all groups",
          _groups(lambda factors: factors[..., :1].expand(factors.shape))),
    fault("group-scale-of-next", "a group gets the scales of the next one",
          _groups(lambda factors: factors.roll(-1, -1))),
    fault("fp8-encoding", "fp8 weights are read in the other e4m3 encoding", _weights(_other_encoding)),
    fault("fp8-encoding-rows", "fp8 rows are read in the other e4m3 encoding", _rows_other_encoding),
    fault("preshuffle-ignored", "preshuffled weights are read row by row", _weights(_raw_order)),
    fault("preshuffle-width", "16 elements of a weight are taken to lie together, where 8 do", _weights(_wrong_width)),
    fault("nibbles-swapped", "low and high nibbles of the weights have changed places",
          _nibbles(lambda stored: layouts.unpack_int4(stored << 4 | stored >> 4))),
    fault("nibbles-paired", "the two nibbles of a byte are taken for neighbours", _nibbles(_paired)),
    fault("nibbles-unsigned", "4-bit weights are not sign-extended", _nibbles(_unsigned)),
    fault("lowest-code-positive", "the lowest code of integer weights, -128 or -8, is read without its sign",
          _lowest(lambda lowest: -lowest)),
    fault("lowest-code-clamped", "the lowest code of integer weights, -128 or -8, is read as -127 or -7",
          _lowest(lambda lowest: lowest + 1)),
)
