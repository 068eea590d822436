"""Operands of the two products as numbers: payload, group factors, row scales; made from fp32 by a mode's rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import mx
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.quantise import quantise

FP8_TARGETS = {"ocp": "fp8_ocp", "fnuz": "fp8_fnuz"}
GROUP = 32


@dataclass(frozen=True)
class Operand:
    """Rows of a product's factor.

    payload fp32 [..., rows, K]: the stored codes as numbers. factors fp32 [..., rows, K] or None: scales of groups
    along K, applied inside the sum. scale fp32 [..., rows] or None: applied to the sum. error fp64 [..., rows, K] or
    None: how far payload * factors may be from what a right kernel has, where it was re-quantised.
    """

    payload: Tensor
    factors: Tensor | None = None
    scale: Tensor | None = None
    error: Tensor | None = None

    def value(self) -> Tensor:
        """fp64 [..., rows, K]: what is summed, exactly: the scale of the row is not in it."""
        wide = self.payload.double()
        return wide if self.factors is None else wide * self.factors.double()


def activation(value: Tensor, mode: Mode, encoding: str = "ocp", rule: str = "truncate", mx_rule: str = "floor"
               ) -> Operand:
    """fp32 [..., rows, K] in the mode's activation format.

    encoding: of fp8, "ocp" or "fnuz". rule: of integers, see `quantise`. mx_rule: see `mx.RULES`.
    """
    if mode.activation in ("f16", "bf16"):
        return Operand(value.to(torch.float16 if mode.activation == "f16" else torch.bfloat16).float())
    if mode.microscaled:
        return microscaled(value, mx.ELEMENTS[mode.activation], mx_rule)
    found = quantise(value, FP8_TARGETS[encoding] if mode.activation == "fp8" else "int8", rule)
    return Operand(found.payload(), scale=found.scale[..., 0])


def weight(value: Tensor, mode: Mode, encoding: str = "ocp", rule: str = "truncate", mx_rule: str = "floor"
           ) -> Operand:
    """fp32 [E, N, K] in the mode's weight format; parameters as of ``activation``. Group scales of bf16 modes are
    fp32 numbers; those of a16wi4 are bf16."""
    if mode.weight in ("f16", "bf16"):
        return Operand(value.to(torch.float16 if mode.weight == "f16" else torch.bfloat16).float())
    if mode.weight == "mxfp4":
        return microscaled(value, mx.FP4, mx_rule)
    if mode.weight == "int4_g32":
        found = quantise(value, "int4", rule, GROUP)
        scale = found.scale.bfloat16().float() if mode.name == "a16wi4" else found.scale
        return Operand(found.payload(), factors=scale.repeat_interleave(GROUP, dim=-1))
    found = quantise(value, FP8_TARGETS[encoding] if mode.weight == "fp8" else mode.weight, rule)
    return Operand(found.payload(), scale=found.scale[..., 0])


def named_rule(mode: Mode, rule: str) -> dict[str, str]:
    """The keyword by which ``activation`` takes one of the mode's ``rules``."""
    return {"mx_rule" if mode.microscaled else "rule": rule}


def microscaled(value: Tensor, element: mx.Element, rule: str) -> Operand:
    """fp32 [..., K] as elements with a power-of-two scale per 32 of them."""
    codes, scales = mx.quantise(value, element, rule)
    unit = torch.full_like(scales, 127)
    return Operand(mx.dequantise(codes, unit, element),
                   factors=mx.decode_e8m0(scales).repeat_interleave(mx.BLOCK, dim=-1))


def smoothed(value: Tensor, smooth: Tensor, ids: Tensor) -> Tensor:
    """int8smooth: fp32 rows [T, 1 or k, K] times the factor of each slot's expert, smooth fp32 [E, K]: [T, k, K].
    Slots without an expert (id -1) keep factor 1."""
    return value * torch.where((ids >= 0)[..., None], smooth_factors(smooth, ids), 1.0)


def smooth_factors(smooth: Tensor, ids: Tensor) -> Tensor:
    """Rows [T, k, K] of smooth [E, K]: of slots without an expert any row, and 1 where no expert is here at all."""
    if not len(smooth):
        return torch.ones((*ids.shape, smooth.shape[1]), dtype=smooth.dtype, device=smooth.device)
    return smooth[ids.clamp(min=0).long()]


def per_slot(operand: Operand, topk: int) -> Operand:
    """Rows [T, ...] of a token-major operand as [T, k, ...], the same for every slot."""
    def wide(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, None].expand(-1, topk, *value.shape[1:])

    payload = wide(operand.payload)
    assert payload is not None
    return replace(operand, payload=payload, factors=wide(operand.factors), scale=wide(operand.scale),
                   error=wide(operand.error))
