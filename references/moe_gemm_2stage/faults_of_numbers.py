"""Faulty semantics of two-stage MoE in numbers: activation, scales, layouts, precision, what passes between stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts
from references.moe_gemm_2stage.faulty import Change, Reading, Routes, encoding, fault, quantised, smoothed
from references.moe_gemm_2stage.operands import GROUP, Operand

_TAILS = (16, 32, 64, 128)


# ---- The activation -----------------------------------------------------------------------------------------------


def _activation(function: Callable[[Tensor, Tensor], Tensor]) -> Change:
    return lambda r: None if r.w1 is None else replace(r, activate=function)


def _silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def _clamped(limit: float) -> Change:
    return _activation(lambda gate, up: _silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


def _interleaved(r: Reading) -> Reading | None:
    """Row 2i is taken for gate i, row 2i + 1 for up i."""
    if r.w1 is None:
        return None
    def split(value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)

    payload = split(r.w1.payload)
    assert payload is not None
    return replace(r, w1=replace(r.w1, payload=payload, factors=split(r.w1.factors), scale=split(r.w1.scale)))


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


def _without_last(tail: int) -> Change:
    """Sums lack their last elements."""
    return lambda r: replace(r, terms=lambda size: slice(size - tail if size > tail else size))


def _whole(tile: int) -> Change:
    """Sums end with a whole tile."""
    return lambda r: replace(r, terms=lambda size: slice(max(tile, size // tile * tile)))


# ---- Precision ----------------------------------------------------------------------------------------------------


def _rounded(dtype: torch.dtype) -> Change:
    return lambda r: None if r.mode.integer else replace(r, sum=lambda total: total.to(dtype).float())


def _wrapped(r: Reading) -> Reading | None:
    if not r.mode.integer:
        return None
    return replace(r, sum=lambda total: (total + 32768) % 65536 - 32768)


def _term_bf16(r: Reading) -> Reading | None:
    if r.w2 is None:
        return None
    share = r.routes.share[:, None]
    return replace(r, weighted=False, term=lambda value: value.bfloat16().float() * share)


def _chain(change: Change) -> Change:
    return lambda r: change(r) if r.w1 is not None and r.w2 is not None else None


def _cut(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    dropped = 16 if dtype == torch.bfloat16 else 13
    return lambda value: (value.contiguous().view(torch.int32) & -(1 << dropped)).view(torch.float32)


# ---- between the stages -------------------------------------------------------------------------------------------


def _between(function: Callable[[Reading, Tensor], Operand]) -> Change:
    """Another quantisation of fp32 [T k, I] between the stages, where there is one."""
    return _chain(lambda r: replace(r, between=lambda of, out1: function(of, smoothed(of, out1)))
                  if r.mode.activation in ("fp8", "int8") else None)


def _per_tensor(r: Reading, value: Tensor) -> Operand:
    right = quantised(r, value.view(1, -1))
    assert right.scale is not None
    return Operand(right.payload.view(value.shape), scale=right.scale.expand(len(value)))


def _half_range(r: Reading, value: Tensor) -> Operand:
    """Codes up to half of the largest, and a scale that is twice as large."""
    scale = quantised(r, value).scale
    assert scale is not None
    ratio = value / (scale * 2)[:, None]
    if r.mode.activation == "int8":
        cut = torch.trunc if r.call.arguments["rule"] == "truncate" else torch.round
        return Operand(cut(ratio), scale=scale * 2)
    form = fp8.FORMS[encoding(r.call)]
    return Operand(fp8.decode(fp8.encode(ratio, form), form), scale=scale * 2)


def _other_rule(r: Reading, value: Tensor) -> Operand:
    return quantised(r, value, "nearest" if r.call.arguments["rule"] == "truncate" else "truncate")


def _zero_rows(r: Reading, value: Tensor) -> Operand:
    """0 / 0 is NaN, which integers do not hold."""
    right = quantised(r, value)
    zero = (right.payload == 0).all(dim=1)
    assert right.scale is not None
    payload = right.payload.masked_fill(zero[:, None], torch.nan) if r.mode.activation == "fp8" else right.payload
    return Operand(payload, scale=right.scale.masked_fill(zero, 0.0))


def _bf16_between(r: Reading) -> Reading:
    return replace(r, between=lambda of, out1: quantised(of, smoothed(of, out1.bfloat16())))


def _smooth(function: Callable[[Tensor], Tensor]) -> Change:
    def change(r: Reading) -> Reading | None:
        smooth = r.call.arguments["smooth2"]
        if smooth is None:
            return None
        return replace(r, between=lambda of, out1: quantised(of, smoothed(of, out1, function(smooth))))

    return _chain(change)


NUMBERS = (
    fault("gate-up-swapped", "gate and up have changed places", _activation(lambda gate, up: _silu(up) * gate)),
    fault("gate-up-interleaved", "gate and up rows are taken for interleaved", _interleaved),
    fault("silu-missing", "the gate is not activated", _activation(lambda gate, up: gate * up)),
    fault("up-missing", "the activated gate is not multiplied by up", _activation(lambda gate, up: _silu(gate))),
    fault("gelu", "the gate is activated by GELU", _activation(lambda g, up: torch.nn.functional.gelu(g) * up)),
    fault("sigmoid", "the gate is activated by the sigmoid", _activation(lambda gate, up: torch.sigmoid(gate) * up)),
    fault("silu-alpha", "SiLU has 1.702 x in the exponent",
          _activation(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up)),
    fault("silu-base-2", "SiLU takes powers of 2 in the place of e",
          _activation(lambda gate, up: gate / (1 + torch.exp2(-gate)) * up)),
    *(fault("swiglu-limit", f"gate and up are clamped to {limit:g} before the activation", _clamped(limit))
      for limit in (0.5, 7.0)),
    fault("silu-bf16", "SiLU is computed in bf16", _activation(lambda g, up: _silu(g.bfloat16()).float() * up)),
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
    *(fault("k-tail-dropped", f"the last {tail} elements of the sum are left out", _without_last(tail))
      for tail in _TAILS),
    *(fault("k-tail-dropped", f"the sum ends with the last whole {tile} elements", _whole(tile))
      for tile in _TAILS[2:]),
    fault("acc-bf16", "sums are rounded to bf16", _rounded(torch.bfloat16)),
    fault("acc-fp16", "sums are rounded to fp16", _rounded(torch.float16)),
    fault("acc-int16", "sums of integers are held in 16 bits", _wrapped),
    fault("terms-bf16", "terms are rounded to bf16 before they are weighted", _term_bf16),
    fault("terms-cut", "terms are truncated to 16 bits before they are added",
          lambda r: replace(r, term=_cut(r.dtype)) if r.adds and r.dtype != torch.float32 else None),
    fault("partials-added-narrow", "partials are added in their own format",
          _chain(lambda r: None if r.adds else replace(r, partial=r.dtype))),
    fault("between-bf16", "stage 1's result is held in bf16 between the stages", _chain(_bf16_between)),
    fault("requantise-per-tensor", "one scale is taken for the whole intermediate", _between(_per_tensor)),
    fault("requantise-half", "re-quantisation uses half of the format's range", _between(_half_range)),
    fault("requantise-other-rule", "integers between the stages are rounded by the other rule", _between(_other_rule)),
    fault("smooth-missing", "the smoothing factors are left out", _smooth(lambda smooth: torch.ones_like(smooth[:1]))),
    fault("smooth-of-expert-0", "rows are smoothed by the factors of expert 0", _smooth(lambda smooth: smooth[:1])),
    fault("zero-rows", "rows of zeros are re-quantised by dividing by 0", _between(_zero_rows)),
)
