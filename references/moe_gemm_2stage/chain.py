"""From the output of stage 1 to the input of stage 2, and both stages end to end.

The end-to-end reference never sees a kernel's intermediate. It carries each element's interval through the cast and
the re-quantisation, which are monotone: far from a decision point a right kernel has the very same code, near one
it may have the neighbour, and only there a step of the format is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.data.arithmetic import divided
from references.moe_gemm_2stage import dtypes, fp8, mx
from references.moe_gemm_2stage.bounds import DIVISION, Arithmetic, Bounded, format_of, overflows
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.operands import FP8_TARGETS, Operand, smooth_factors
from references.moe_gemm_2stage.quantise import TARGETS, Target
from references.moe_gemm_2stage.rounding import round_out
from references.moe_gemm_2stage.stages import Routes, combine_atomic, combine_reduce, stage1, stage2


def intermediate(y: Bounded, mode: Mode, routes: Routes, smooth2: Tensor | None = None, encoding: str = "ocp",
                 rule: str = "truncate", mx_rule: str = "floor") -> Operand:
    """Stage 2's input [T, k, I] of stage 1's result, with what a right kernel's may differ by.

    Cast to f16, multiplied by smooth2 fp32 [E, I] > 0 (int8smooth), then cast to bf16 or re-quantised by row or
    block, as the mode says. Policies as in `operands.activation`. A NaN, and what f16 certainly has no number for, are
    as they are in f16 and bf16, and make their block NaN; of a row that is re-quantised with such a number, and of what
    may overflow or not, nothing is known: the error is infinite.
    """
    certain = _beyond_f16(y)
    out1 = y.through(lambda value: round_out(value, "f16").float())
    lost = ~(out1.value.isfinite() & out1.error.isfinite())
    known = Bounded(out1.value.masked_fill(lost, 0.0), out1.error.masked_fill(lost, 0.0))
    found = _stored(known, mode, routes, smooth2, encoding, rule, mx_rule)
    assert found.error is not None
    if not bool(lost.any()):
        return found
    if mode.microscaled:
        nan, lost = (mask.unflatten(-1, (-1, mx.BLOCK)).any(dim=-1).repeat_interleave(mx.BLOCK, dim=-1)
                     for mask in (certain, lost & ~certain))
        assert found.factors is not None
        found = replace(found, factors=found.factors.masked_fill(nan, math.nan))
        lost = lost & ~nan
    elif mode.row_quantised:
        lost = lost.any(dim=-1, keepdim=True)
    else:
        found = replace(found, payload=torch.where(certain, out1.value.float(), found.payload))
        lost = lost & ~certain
    assert found.error is not None
    return replace(found, error=found.error.masked_fill(lost, math.inf))


def _beyond_f16(y: Bounded) -> Tensor:
    """bool, of y's shape: what is NaN, or infinite once it is cast to f16, in every right kernel."""
    return ~y.value.isfinite() | (y.value.abs() - y.error >= overflows(format_of("f16")))


def _stored(out1: Bounded, mode: Mode, routes: Routes, smooth2: Tensor | None, encoding: str, rule: str,
            mx_rule: str) -> Operand:
    if mode.slot_major:
        if smooth2 is None:
            raise ValueError(f"{mode.name} needs smooth2")
        factor = smooth_factors(smooth2, routes.ids)
        out1 = out1.through(lambda value: value * factor)
    if mode.activation == "f16":
        return Operand(out1.value.float(), error=out1.error)
    if mode.activation == "bf16":
        found = out1.through(lambda value: value.bfloat16().float())
        return Operand(found.value.float(), error=found.error)
    if mode.microscaled:
        return _blocks(out1, mx.ELEMENTS[mode.activation], mx_rule)
    return _row_quantised(out1, TARGETS[FP8_TARGETS[encoding] if mode.activation == "fp8" else "int8"], rule)


def chain(rows: Operand, w1: Operand, w2: Operand, routes: Routes, mode: Mode, combine: str, out: str, *,
          doweight_stage1: str = "none", smooth2: Tensor | None = None, encoding: str = "ocp", rule: str = "truncate",
          mx_rule: str = "floor", arithmetic: Arithmetic | None = None) -> Bounded:
    """out [T, H] of both stages. The routing weight is applied once: in stage 2 unless in stage 1.

    ``arithmetic``: how sums are computed, by default as the mode says.
    Raises ValueError where `dtypes.check` does.
    """
    dtypes.check(mode, combine, out)
    arithmetic = arithmetic or mode.arithmetic
    y = stage1(rows, w1, routes, doweight_stage1, arithmetic)
    between = intermediate(y, mode, routes, smooth2, encoding, rule, mx_rule)
    terms = stage2(between, w2, routes, doweight_stage1 == "none", arithmetic)
    return (combine_atomic if combine == "atomic" else combine_reduce)(terms, routes, out)


def _codes(target: Target, rule: str) -> Callable[[Tensor], Tensor]:
    """The monotone step from a ratio (fp32 or fp64) to the number that its code stands for."""
    encoding = target.encoding
    if encoding is not None:
        return lambda ratio: fp8.decode(fp8.encode(ratio, encoding), encoding)
    cut = torch.trunc if rule == "truncate" else torch.round
    return lambda ratio: cut(ratio).clamp(-target.largest, target.largest)


def _row_quantised(x: Bounded, target: Target, rule: str) -> Operand:
    """One scale per row, largest magnitude over the format's largest value; scale and code move together, and both
    divisions may be off by `bounds.DIVISION`, so that beside a decision point either code is right."""
    step = _codes(target, rule)
    low, high = x.value - x.error, x.value + x.error
    size = x.value.abs()
    tops = (size - x.error).clamp(min=0).amax(dim=-1), size.amax(dim=-1), (size + x.error).amax(dim=-1)
    scale = _scale(tops[1].float(), target)
    least, most = (_moved(_scale(top, target), side)[..., None] for top, side in ((tops[0], -1), (tops[2], 1)))
    payload = step(x.value.float() / scale[..., None])
    code_low = step(_moved(low / torch.where(low < 0, least, most), -1))
    code_high = step(_moved(high / torch.where(high < 0, most, least), 1))
    ends = [code.double() * factor for code in (code_low, code_high) for factor in (least, most)]
    centre = payload.double() * scale[..., None].double()
    error = torch.stack([(end - centre).abs() for end in ends]).amax(dim=0)
    # A row that may be all zeros has no scale to speak of; its numbers stay below its largest magnitude.
    vanishing = ((tops[0] == 0) & (tops[2] > 0))[..., None]
    error = torch.where(vanishing, centre.abs() + tops[2][..., None], error)
    return Operand(payload, scale=scale, error=error / scale[..., None].double())


def _moved(quotient: Tensor, side: int) -> Tensor:
    """The quotient as far down (-1) or up (1) as an fp32 division may leave it."""
    return quotient + quotient.abs() * (side * DIVISION)


def _scale(top: Tensor, target: Target) -> Tensor:
    scale = divided(top, target.largest)
    return torch.where(scale == 0, 1.0, scale)


def _blocks(x: Bounded, element: mx.Element, rule: str) -> Operand:
    """A power-of-two scale per 32 elements, which near a decision point may be one of two."""
    shape = x.value.shape
    blocks = Bounded(*(part.unflatten(-1, (shape[-1] // mx.BLOCK, mx.BLOCK)) for part in (x.value, x.error)))
    size = blocks.value.abs()
    tops = (size - blocks.error).clamp(min=0).amax(dim=-1), size.amax(dim=-1), (size + blocks.error).amax(dim=-1)
    least, middle, most = (mx.decode_e8m0(mx.scale_of(top.float(), element, rule))[..., None] for top in tops)

    def stored(value: Tensor, scale: Tensor) -> Tensor:
        ratio = value.double() / scale.double()
        one = mx.decode_e2m1(mx.encode_e2m1(ratio)) if element is mx.FP4 else fp8.decode(
            fp8.encode(ratio, fp8.OCP), fp8.OCP)
        return one.double() * scale.double()

    centre = stored(blocks.value.float(), middle)
    error = torch.zeros_like(centre)
    for end in (blocks.value - blocks.error, blocks.value + blocks.error):
        for scale in (least, most):
            error = torch.maximum(error, (stored(end.float(), scale) - centre).abs())
    factors = middle.expand(blocks.value.shape)
    payload = (centre / factors.double()).float()
    return Operand(payload.reshape(shape), factors.reshape(shape), error=error.reshape(shape))
