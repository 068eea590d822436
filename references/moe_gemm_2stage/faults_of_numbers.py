"""Faulty semantics of two-stage MoE in numbers: activation, length and precision of sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faults_of_requantising import REQUANTISED
from references.moe_gemm_2stage.faults_of_scales import SCALES
from references.moe_gemm_2stage.faults_of_storage import STORAGE
from references.moe_gemm_2stage.faulty import Change, chained, fault
from references.moe_gemm_2stage.reading import Reading

_TAILS = (16, 32, 64, 128)
_NARROW = (16, 20, 22, 24)
_LIMITS = (1024, 2048, 4096, 8192)


# ---- The activation -----------------------------------------------------------------------------------------------


def activation(function: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """``function(gate, up)`` in the place of silu(gate) up."""
    return lambda r: None if r.w1 is None else replace(r, activate=function)


def silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def _clamped(limit: float) -> Change:
    return activation(lambda gate, up: silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


def _interleaved(r: Reading) -> Reading | None:
    """Row 2i is taken for gate i, row 2i + 1 for up i."""
    if r.w1 is None:
        return None
    def split(value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)

    payload = split(r.w1.payload)
    assert payload is not None
    return replace(r, w1=replace(r.w1, payload=payload, factors=split(r.w1.factors), scale=split(r.w1.scale)))


# ---- Length and precision of sums ---------------------------------------------------------------------------------


def _without_last(tail: int) -> Change:
    """Sums lack their last elements."""
    return lambda r: replace(r, terms=lambda size: slice(size - tail if size > tail else size))


def _whole(tile: int) -> Change:
    """Sums end with a whole tile."""
    return lambda r: replace(r, terms=lambda size: slice(max(tile, size // tile * tile)))


def _limited(limit: int) -> Change:
    """Sums end there, however long the rows are."""
    return lambda r: replace(r, terms=lambda size: slice(min(size, limit)))


def _rounded(dtype: torch.dtype) -> Change:
    return lambda r: None if r.mode.integer else replace(r, sum=lambda total: total.to(dtype).float())


def _wrapped(bits: int) -> Change:
    """Sums of integers modulo 2^bits."""
    half = 2.0 ** (bits - 1)
    return lambda r: replace(r, sum=lambda total: (total + half) % (2 * half) - half) if r.mode.integer else None


def _term_bf16(r: Reading) -> Reading | None:
    if r.w2 is None:
        return None
    share = r.routes.share[:, None]
    return replace(r, weighted=False, term=lambda value: value.bfloat16().float() * share)


def _cut(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    dropped = 16 if dtype == torch.bfloat16 else 13
    return lambda value: (value.contiguous().view(torch.int32) & -(1 << dropped)).view(torch.float32)


NUMBERS = (
    fault("gate-up-swapped", "gate and up have changed places", activation(lambda gate, up: silu(up) * gate)),
    fault("gate-up-interleaved", "gate and up rows are taken for interleaved", _interleaved),
    fault("silu-missing", "the gate is not activated", activation(lambda gate, up: gate * up)),
    fault("up-missing", "the activated gate is not multiplied by up", activation(lambda gate, up: silu(gate))),
    fault("gelu", "the gate is activated by GELU", activation(lambda g, up: torch.nn.functional.gelu(g) * up)),
    fault("sigmoid", "the gate is activated by the sigmoid", activation(lambda gate, up: torch.sigmoid(gate) * up)),
    fault("silu-alpha", "SiLU has 1.702 x in the exponent",
          activation(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up)),
    fault("silu-base-2", "SiLU takes powers of 2 in the place of e",
          activation(lambda gate, up: gate / (1 + torch.exp2(-gate)) * up)),
    *(fault("swiglu-limit", f"gate and up are clamped to {limit:g} before the activation", _clamped(limit))
      for limit in (0.5, 7.0)),
    fault("silu-bf16", "SiLU is computed in bf16", activation(lambda g, up: silu(g.bfloat16()).float() * up)),
    *SCALES,
    *STORAGE,
    *(fault("k-tail-dropped", f"the last {tail} elements of the sum are left out", _without_last(tail))
      for tail in _TAILS),
    *(fault("k-tail-dropped", f"the sum ends with the last whole {tile} elements", _whole(tile))
      for tile in _TAILS[2:]),
    *(fault("k-limit", f"elements of the sum beyond {limit} are left out", _limited(limit)) for limit in _LIMITS),
    fault("acc-bf16", "sums are rounded to bf16", _rounded(torch.bfloat16)),
    fault("acc-fp16", "sums are rounded to fp16", _rounded(torch.float16)),
    *(fault(f"acc-int{bits}", f"sums of integers are held in {bits} bits", _wrapped(bits)) for bits in _NARROW),
    fault("terms-bf16", "terms are rounded to bf16 before they are weighted", _term_bf16),
    fault("terms-cut", "terms are truncated to 16 bits before they are added",
          lambda r: replace(r, term=_cut(r.dtype)) if r.adds and r.dtype != torch.float32 else None),
    fault("partials-added-narrow", "partials are added in their own format",
          chained(lambda r: None if r.adds else replace(r, partial=r.dtype))),
    *REQUANTISED,
)
