"""Faulty semantics of two-stage MoE in microscaled numbers: what a nibble, a scale byte and a block are taken for, and
how blocks are made between the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts, mx
from references.moe_gemm_2stage.faulty import Change, fault
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.reading import Reading, smoothed

Numbers = Callable[[Tensor], Tensor]
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _operands(change: Callable[[Operand], Operand], rows: bool = True, weights: bool = True,
              only: str = "") -> Change:
    """Operands with e8m0 scales read otherwise; ``only``: those of one element format."""

    def changed(r: Reading) -> Reading | None:
        row = rows and r.mode.activation in mx.ELEMENTS and only in ("", r.mode.activation)
        column = weights and r.mode.weight in mx.ELEMENTS and only in ("", r.mode.weight)
        if not row and not column:
            return None
        w1, w2 = (change(w) if column and w is not None else w for w in (r.w1, r.w2))
        return replace(r, rows=change(r.rows) if row else r.rows, w1=w1, w2=w2)

    return changed


def _payload(change: Numbers) -> Callable[[Operand], Operand]:
    return lambda of: replace(of, payload=change(of.payload))


def _factors(change: Numbers) -> Callable[[Operand], Operand]:
    """Other factors of the blocks: ``change`` gives those of all elements [..., K] of the blocks' [..., K/32]."""

    def changed(of: Operand) -> Operand:
        assert of.factors is not None
        return replace(of, factors=change(of.factors[..., ::GROUP]))

    return changed


def _each(change: Numbers) -> Callable[[Operand], Operand]:
    return _factors(lambda factors: change(factors).repeat_interleave(GROUP, dim=-1))


# ---- Elements -----------------------------------------------------------------------------------------------------


def _as_integers(value: Tensor) -> Tensor:
    """Nibbles in two's complement."""
    size = torch.searchsorted(_E2M1.to(value.device), value.abs().contiguous())
    code = size + 8 * torch.signbit(value)
    return torch.where(code > 7, code - 16, code).float()


def _zero_as_nan(value: Tensor) -> Tensor:
    return value.masked_fill((value == 0) & torch.signbit(value), torch.nan)


def _as_fnuz(value: Tensor) -> Tensor:
    """The bytes of OCP's e4m3 taken for FNUZ: half of the number, and NaN in the place of -0."""
    code = fp8.encode(value, fp8.OCP)
    return fp8.decode(code, fp8.FNUZ)


# ---- Scales -------------------------------------------------------------------------------------------------------


def _instead_of_nan(other: float) -> Numbers:
    return lambda factors: factors.masked_fill(factors.isnan(), other)


def _times(by: float) -> Numbers:
    return lambda factors: factors * by


def _of_16(factors: Tensor) -> Tensor:
    """Blocks of 16 elements, whose scales begin again where there are no more of them."""
    half = factors.repeat_interleave(GROUP // 2, dim=-1)
    return torch.cat([half, half], dim=-1)


def _of_64(factors: Tensor) -> Tensor:
    return factors.repeat_interleave(2 * GROUP, dim=-1)[..., : factors.shape[-1] * GROUP]


def _expert(which: Callable[[Tensor, int], Tensor]) -> Change:
    """Scales of another expert's weights."""
    return lambda r: replace(r, scale_expert=which) if r.mode.weight in mx.ELEMENTS else None


def _dense(r: Reading) -> Reading | None:
    """Scales of weights are read as if their rows were not padded to 8 columns."""
    if r.mode.weight not in mx.ELEMENTS:
        return None

    def changed(name: str, w: Operand | None) -> Operand | None:
        if w is None:
            return None
        experts, rows, width = w.payload.shape
        stored, blocks = r.call.arguments[f"scale_{name}"], width // GROUP
        whole = layouts.unshuffle_scales(stored, experts * rows, stored.shape[1])
        codes = whole.view(experts, -1)[:, : rows * blocks].view(experts, rows, blocks)
        return replace(w, factors=mx.decode_e8m0(codes).repeat_interleave(GROUP, dim=-1))

    return replace(r, w1=changed("w1", r.w1), w2=changed("w2", r.w2))


# ---- between the stages -------------------------------------------------------------------------------------------


def _between(change: Callable[[Tensor, Tensor, mx.Element], Tensor],
             size: Numbers = lambda blocks: blocks.abs()) -> Change:
    """Stage 2's input: ``change(blocks [T k, I/32, 32] fp64, scales [T k, I/32, 1] fp64, element)`` gives the numbers
    that stand in the place of blocks / scales, rounded. The largest ``size`` of a block makes its scale."""

    def changed(r: Reading) -> Reading | None:
        if not r.mode.microscaled or r.w1 is None or r.w2 is None:
            return None
        element = mx.ELEMENTS[r.mode.activation]

        def between(of: Reading, out1: Tensor) -> Operand:
            value = smoothed(of, out1)
            blocks = value.unflatten(-1, (-1, GROUP))
            codes = mx.scale_of(size(blocks).amax(dim=-1), element, of.call.arguments["rule"])
            scale = mx.decode_e8m0(codes).double()[..., None]
            payload = change(blocks.double(), scale, element).view(value.shape)
            return Operand(payload.float(), factors=scale[..., 0].float().repeat_interleave(GROUP, dim=-1))

        return replace(r, between=between)

    return changed


def _rounded(ratio: Tensor, element: mx.Element, whole: Numbers) -> Tensor:
    """``ratio``, saturating, in steps of the element's format, each size made whole by ``whole``."""
    size = ratio.abs().clamp(max=element.maximum)  # which keeps NaN
    exponent = (torch.frexp(size)[1] - 1).clamp(min=element.lowest) - element.mantissa
    step = torch.exp2(exponent.double())
    return (whole(size / step) * step).clamp(max=element.maximum) * ratio.sign()


def _wrapped(blocks: Tensor, scale: Tensor, element: mx.Element) -> Tensor:
    """What is beyond the largest number is 0, as a code with a carry is."""
    ratio = blocks / scale
    beyond = ratio.abs() >= element.maximum + 2.0 ** (element.exponent - element.mantissa - 1)
    return _rounded(ratio, element, torch.round).masked_fill(beyond, 0.0)


def _zero_blocks(blocks: Tensor, scale: Tensor, element: mx.Element) -> Tensor:
    found = _rounded(blocks / scale, element, torch.round)
    return found.masked_fill((blocks == 0).all(dim=-1, keepdim=True), torch.nan)


def _up_early(r: Reading) -> Reading | None:
    """By the rule up, a block whose largest is the format's largest gets the next scale."""
    def change(blocks: Tensor, scale: Tensor, element: mx.Element) -> Tensor:
        top = blocks.abs().amax(dim=-1, keepdim=True)
        more = torch.where(top == element.maximum * scale, 2.0, 1.0).double()
        return _rounded(blocks / (scale * more), element, torch.round) * more

    return _between(change)(r) if r.call.arguments.get("rule") == "up" else None


def _of_row(r: Reading) -> Reading | None:
    """One scale for the whole row."""
    if not r.mode.microscaled or r.w1 is None or r.w2 is None:
        return None
    element = mx.ELEMENTS[r.mode.activation]

    def between(of: Reading, out1: Tensor) -> Operand:
        value = smoothed(of, out1)
        codes = mx.scale_of(value.abs().amax(dim=-1, keepdim=True), element, of.call.arguments["rule"])
        scale = mx.decode_e8m0(codes)
        payload = _rounded(value.double() / scale.double(), element, torch.round)
        return Operand(payload.float(), factors=scale.expand(value.shape))

    return replace(r, between=between)


ELEMENTS = (
    fault("e2m1-unsigned", "the sign of e2m1 elements is not read", _operands(_payload(torch.abs), only="mxfp4")),
    fault("e2m1-integers", "e2m1 elements are taken for 4-bit integers",
          _operands(_payload(_as_integers), only="mxfp4")),
    fault("e2m1-subnormal", "the e2m1 number 0.5 counts as 0",
          _operands(_payload(lambda value: value.masked_fill(value.abs() == 0.5, 0.0)), only="mxfp4")),
    fault("e2m1-minus-zero", "the e2m1 number -0 is taken for NaN", _operands(_payload(_zero_as_nan), only="mxfp4")),
    fault("fp8-encoding-rows", "e4m3 rows are read in the other encoding",
          _operands(_payload(_as_fnuz), weights=False, only="mxfp8")),
    *(fault("e8m0-bias", f"e8m0 scales of {what} have a bias of {127 - shift}",
            _operands(_each(_times(2.0**shift)), rows="rows" in what, weights="weights" in what))
      for shift in (-1, 1) for what in ("rows and weights", "weights", "rows")),
    *(fault("e8m0-255", f"an e8m0 scale of 255 is {other:g} and not NaN", _operands(_each(_instead_of_nan(other))))
      for other in (1.0, 0.0)),
    fault("block-of-16", "blocks of 16 elements share a scale", _operands(_factors(_of_16))),
    fault("block-of-64", "blocks of 64 elements share a scale", _operands(_factors(_of_64))),
    fault("scales-of-expert-0", "weights have the scales of expert 0", _expert(lambda expert, count: expert * 0)),
    fault("scales-of-next-expert", "weights have the scales of the next expert",
          _expert(lambda expert, count: (expert + 1) % count)),
    fault("scales-dense", "scales of weights are read as if their rows were not padded", _dense),
    fault("requantise-ties", "ties between the stages are rounded up",
          _between(lambda blocks, scale, of: _rounded(blocks / scale, of, lambda size: (size + 0.5).floor()))),
    fault("requantise-cut", "elements between the stages are cut",
          _between(lambda blocks, scale, of: _rounded(blocks / scale, of, torch.floor))),
    fault("requantise-wraps", "elements between the stages wrap and do not saturate", _between(_wrapped)),
    fault("requantise-zero-blocks", "blocks of zeros between the stages are divided by 0", _between(_zero_blocks)),
    fault("requantise-nonfinite", "infinities between the stages saturate by their block's finite elements",
          _between(lambda blocks, scale, of: _rounded(blocks / scale, of, torch.round),
                   size=lambda blocks: blocks.abs().masked_fill(~blocks.isfinite(), 0.0))),
    fault("requantise-up-early", "the rule up takes the next scale where the largest is the format's largest",
          _up_early),
    fault("requantise-per-row", "one scale is taken for each row between the stages", _of_row),
)
