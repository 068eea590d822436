"""Mutants of precision and of the final cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.mutants.reduce_fused import steps
from kernels.mutants.reduce_fused.steps import E4M3, Work, wrong

_wrong = partial(wrong, __name__)


def _mantissa(value: Tensor, dropped: int, mode: str) -> Tensor:
    """fp32 with its last ``dropped`` mantissa bits rounded off: towards zero, or to nearest with ties away."""
    raw = value.view(torch.int32)
    if mode == "away":
        raw = raw + (1 << (dropped - 1))
    return torch.where(value.isfinite(), (raw & -(1 << dropped)).view(torch.float32), value)


# ---- PRECISION ---------------------------------------------------------------------------------------------------


_Combine = Callable[[Work, Tensor, "Tensor | None"], Tensor]


def _in_order(step: Callable[[Work, Tensor, Tensor, Tensor], Tensor]) -> _Combine:
    """Slots in ascending order; ``step(w, acc, row, scale)`` is the accumulator after one more slot."""

    def combine(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
        total = torch.zeros((rows.shape[0], rows.shape[2]), device=rows.device)
        scale = torch.ones(rows.shape[:2], device=rows.device) if scale is None else scale
        for slot in range(rows.shape[1]):
            after = step(w, total, rows[:, slot], scale[:, slot, None])
            total = torch.where(w.valid[:, slot, None], after, total)
        return total

    return combine


def _held_in(dtype: torch.dtype) -> _Combine:
    return _in_order(lambda w, acc, row, scale: (acc + row * scale).to(dtype).float())


def _rounded_weights(w: Work) -> None:
    w.weights = None if w.weights is None else w.weights.bfloat16().float()


def _tf32(w: Work) -> Tensor:
    rows = steps.gather(w)
    return _mantissa(rows, 13, "away") if w.x.dtype == torch.float32 else rows


_wrong("precision_bf16_sum", "PRECISION", "The accumulator is bf16.", "acc-bf16", combine=_held_in(torch.bfloat16))
_wrong("precision_fp16_sum", "PRECISION", "The accumulator is fp16.", "acc-fp16", combine=_held_in(torch.float16))
_wrong("precision_products", "PRECISION", "Products are rounded to x's dtype before they are added.",
       "products-rounded", combine=_in_order(lambda w, acc, row, scale: acc + (row * scale).to(w.x.dtype).float()))
_wrong("precision_weights", "PRECISION", "The weights are rounded to bf16.", "weights-bf16", begin=_rounded_weights)
_wrong("precision_tf32", "PRECISION", "fp32 rows are rounded to TF32.", "x-tf32", gather=_tf32)


# ---- OVERFLOW ----------------------------------------------------------------------------------------------------


def _e4m3(change: Callable[[Work, Tensor], Tensor]) -> Callable[[Work, Tensor], Tensor]:
    return lambda w, total: change(w, total) if w.out.dtype == E4M3 else steps.narrow(w, total)


def _nan_beyond(w: Work, total: Tensor) -> Tensor:
    codes = steps.narrow(w, total).view(torch.uint8)
    return torch.where(total.abs() > 464.0, torch.full_like(codes, 0x7F), codes).view(E4M3)


def _saturated(w: Work, total: Tensor) -> Tensor:
    return steps.narrow(w, total.clamp(-65504.0, 65504.0) if w.out.dtype == torch.float16 else total)


_wrong("overflow_nan", "OVERFLOW", "e4m3 overflow gives NaN.", "overflow-nan", narrow=_e4m3(_nan_beyond))
_wrong("overflow_240", "OVERFLOW", "e4m3 saturates at 240, the limit of the fnuz format.", "overflow-240",
       narrow=_e4m3(lambda w, total: total.clamp(-240.0, 240.0).to(E4M3)))
_wrong("overflow_fp16", "OVERFLOW", "fp16 saturates where it must become infinite.", "overflow-saturates",
       narrow=_saturated)
_wrong("overflow_before_sf", "OVERFLOW", "The sum is clamped to 448 before sf.", "clamped-before-sf",
       rescale=lambda w, total: steps.rescale(w, total if w.sf is None else total.clamp(-448.0, 448.0)))

# ---- CASTROUND ---------------------------------------------------------------------------------------------------
_DROPPED = {torch.bfloat16: 16, torch.float16: 13, E4M3: 20}


def _cast(mode: str) -> Callable[[Work, Tensor], Tensor]:
    def narrow(w: Work, total: Tensor) -> Tensor:
        dropped = _DROPPED.get(w.out.dtype)
        if dropped is None:
            return steps.narrow(w, total)
        smallest = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14, E4M3: 2.0**-6}[w.out.dtype]
        return steps.narrow(w, torch.where(total.abs() < smallest, total, _mantissa(total, dropped, mode)))

    return narrow


_wrong("cast_truncated", "CASTROUND", "The final cast truncates.", "cast-truncates", narrow=_cast("truncate"))
_wrong("cast_half_away", "CASTROUND", "The final cast rounds ties away from zero.", "cast-ties-away",
       narrow=_cast("away"))
_wrong("cast_via_bf16", "CASTROUND", "The cast to e4m3 goes through bf16.", "cast-via-bf16",
       narrow=_e4m3(lambda w, total: steps.narrow(w, total.bfloat16().float())))
_wrong("cast_flushed", "CASTROUND", "e4m3 subnormals are flushed to zero.", "cast-flushes",
       narrow=_e4m3(lambda w, total: steps.narrow(w, torch.where(total.abs() < 2.0**-6, total * 0.0, total))))
_wrong("cast_before_sf", "CASTROUND", "The sum is rounded to bf16 before sf.", "rounded-before-sf",
       rescale=lambda w, total: steps.rescale(w, total if w.sf is None else total.bfloat16().float()))
