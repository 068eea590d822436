"""The stages in fp32, every rounding where it is documented; sums are correctly rounded, as no order is prescribed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.rounding import round_out
from references.moe_gemm_2stage.stages import Routes, totals

_LOG2_E = math.log2(math.e)


def silu(x: Tensor) -> Tensor:
    """fp32 x * (1 / (1 + exp2(-log2(e) * x))), each step rounded."""
    return x * (1.0 / (1.0 + torch.exp2(-_LOG2_E * x)))


def scaled_sums(rows: Operand, weights: Operand, routes: Routes) -> Tensor:
    """fp32 [T, k, N]: the exact sum rounded once, times the channel's scale, times the row's."""
    acc = totals(rows, weights, routes).float()
    if weights.scale is not None:
        acc = acc * weights.scale[routes.ids.clamp(min=0).long()]
    return acc if rows.scale is None else acc * rows.scale[..., None]


def stage1(rows: Operand, w1: Operand, routes: Routes, out: str = "f16", doweight: str = "none",
           bf16_rule: str = "half-even") -> Tensor:
    """[T, k, I] in ``out``; slots without an expert are 0. ``doweight`` as in `stages.stage1`."""
    return activated(scaled_sums(rows, w1, routes), routes, out, doweight, bf16_rule)


def activated(both: Tensor, routes: Routes, out: str, doweight: str = "none", bf16_rule: str = "half-even") -> Tensor:
    """What stage 1 makes of its sums, gate and up."""
    gate, up = both.split(both.shape[-1] // 2, dim=-1)
    factor = routes.weights[..., None]
    gate = gate * factor if doweight in ("gate", "gate-and-up") else gate
    up = up * factor if doweight == "gate-and-up" else up
    y = silu(gate) * up
    return round_out(y * factor if doweight == "after" else y, out, bf16_rule)


def stage2_parts(rows: Operand, w2: Operand, routes: Routes, out: str, doweight: bool = True,
                 bf16_rule: str = "half-even") -> Tensor:
    """The rounded terms [T, k, H] in ``out``: what reduce mode stores, and what atomics add."""
    return weighted(scaled_sums(rows, w2, routes), routes, out, doweight, bf16_rule)


def weighted(z: Tensor, routes: Routes, out: str, doweight: bool = True, bf16_rule: str = "half-even") -> Tensor:
    """What stage 2 makes of its sums, before slots are combined."""
    return round_out(z * routes.weights[..., None] if doweight else z, out, bf16_rule)


def combine(parts: Tensor, routes: Routes, how: str) -> Tensor:
    """[T, H] in the parts' dtype. "reduce": fp32 sum of valid slots, ascending, one cast. "atomic": the same order,
    every sum rounded to the output's format."""
    acc = torch.zeros(parts[:, 0].shape, dtype=torch.float32, device=parts.device)
    for slot in range(parts.shape[1]):
        after = acc + parts[:, slot].float()
        after = after.to(parts.dtype).float() if how == "atomic" else after
        acc = torch.where(routes.valid[:, slot, None], after, acc)
    return acc.to(parts.dtype)
