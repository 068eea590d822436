"""Faulty readings of the scales of two-stage MoE: of rows, of output channels, of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faulty import Change, fault, weights_read
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.reading import Reading, Routes, quantised, smoothed


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


def _transposed(factors: Tensor) -> Tensor:
    """Stored scales [E, K/32, N] taken for [E, N, K/32]."""
    return factors.transpose(1, 2).reshape(factors.shape)


def _groups(function: Callable[[Tensor], Tensor | None]) -> Change:
    """Factors [E, N, K/32] of groups, changed."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        if w.factors is None:
            return None
        found = function(w.factors[..., ::GROUP])
        return replace(w, factors=None if found is None else found.repeat_interleave(GROUP, dim=-1))

    return weights_read(change)


def _dequantised(scaled: Callable[[Tensor], Tensor], cast: Callable[[Tensor], Tensor]) -> Change:
    """4-bit weights of bf16 rows multiplied by ``scaled(scale)`` before the product, and ``cast`` then."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        scale = w.factors if w.scale is None else w.scale[..., None]
        if not r.mode.arithmetic.bf16_weights or scale is None:
            return None
        return Operand(cast(w.payload * scaled(scale)))

    return weights_read(change)


def _bf16(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def _cut(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


SCALES = (
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
    fault("group-scale-transposed", "the scales of groups are read as if those of a channel stood side by side",
          lambda r: _groups(_transposed)(r) if r.mode.weight == "int4_g32" else None),
)
