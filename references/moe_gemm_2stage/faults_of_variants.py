"""Faulty semantics of two-stage MoE that are right elsewhere: another activation, factors held in 16 bits, weights by
another rule. Of faults that fit as well, those of the other modules are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faults_of_numbers import activation, silu
from references.moe_gemm_2stage.faulty import Change, fault, shares
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.reading import Reading

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- The activation -----------------------------------------------------------------------------------------------


def _biased(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _gate_and_up(dtype: torch.dtype) -> Change:
    return activation(lambda gate, up: silu(gate.to(dtype).float()) * up.to(dtype).float())


# ---- Factors and weights ------------------------------------------------------------------------------------------


def _factors(dtype: torch.dtype) -> Change:
    """All fp32 scales in 16 bits: of rows, of channels, of groups."""
    def cut(value: Tensor) -> Tensor:
        return value.to(dtype).float()

    def change(r: Reading) -> Reading | None:
        def of(w: Operand | None) -> Operand | None:
            return w if w is None or w.factors is None else replace(w, factors=cut(w.factors))

        if r.mode.weight not in ("fp8", "int8", "int4", "int4_g32"):
            return None
        return replace(r, w1=of(r.w1), w2=of(r.w2), channel_scale=lambda s, e, c: cut(s[e[:, None], c]),
                       row_scale=lambda s, row, routes: cut(s[row]))

    return change


def _channels(dtype: torch.dtype) -> Change:
    def change(r: Reading) -> Reading | None:
        scaled = any(w is not None and w.scale is not None for w in (r.w1, r.w2))
        return replace(r, channel_scale=lambda s, e, c: s[e[:, None], c].to(dtype).float()) if scaled else None

    return change


def _rows(dtype: torch.dtype) -> Change:
    return lambda r: None if r.rows.scale is None else replace(
        r, row_scale=lambda s, row, routes: s[row].to(dtype).float())


def _rounded(dtype: torch.dtype) -> Callable[[Reading, Tensor], Tensor]:
    return lambda r, weights: weights.to(dtype).float()


def _without_first(tile: int) -> Change:
    """Sums lack their first elements, as of a pipeline whose first stage is not waited for."""
    return lambda r: replace(r, terms=lambda size: slice(tile if size > tile else 0, size))


VARIANTS = (
    fault("relu", "the gate is activated by ReLU", activation(lambda gate, up: gate.relu() * up)),
    fault("hardswish", "the gate is activated by hard swish",
          activation(lambda gate, up: torch.nn.functional.hardswish(gate) * up)),
    fault("silu-of-up", "up is activated as well", activation(lambda gate, up: silu(gate) * silu(up))),
    fault("silu-of-product", "the product of gate and up is activated", activation(lambda gate, up: silu(gate * up))),
    fault("up-plus-one", "the activated gate is multiplied by up + 1",
          activation(lambda gate, up: silu(gate) * (up + 1))),
    fault("swiglu-biased", "the activation is that of gpt-oss: clamped to 7, 1.702 x in the exponent, times up + 1",
          activation(_biased)),
    *(fault("gate-up-rounded", f"gate and up are rounded to {name} before the activation", _gate_and_up(dtype))
      for name, dtype in _HALVES.items()),
    *(fault("scales-rounded", f"the scales of {what} are held in {name}", change(dtype))
      for name, dtype in _HALVES.items()
      for what, change in (("channels", _channels), ("rows", _rows), ("both operands", _factors))),
    *(fault("weights-rounded", f"the routing weights are rounded to {name}",
            shares(_rounded(dtype))) for name, dtype in _HALVES.items()),
    fault("weights-absolute", "the sign of the routing weights is lost", shares(lambda r, weights: weights.abs())),
    fault("weights-negative", "negative routing weights count as 0", shares(lambda r, weights: weights.clamp(min=0.0))),
    fault("weights-softmax", "the routing weights go through a softmax once more",
          shares(lambda r, weights: weights.softmax(dim=1))),
    fault("weights-sorted", "the routing weights are sorted, and the experts are not",
          shares(lambda r, weights: weights.sort(dim=1, descending=True)[0])),
    *(fault("k-head-dropped", f"the first {tile} elements of the sum are left out", _without_first(tile))
      for tile in (16, 32, 64, 128)),
)
