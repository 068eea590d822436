"""Shared by the tests of two-stage MoE: operands of every mode, and evaluations in fp32 that share no code with the
references: other orders of summation, roundings where kernels have them, and faults on request."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import operands
from references.moe_gemm_2stage.dtypes import MODES, Mode
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.rounding import round_out
from references.moe_gemm_2stage.stages import Routes

# The published shapes with their experts and slots, and extents that a CPU is done with at once: T, H, I, E, k.
SHAPES = {
    "S": (24, 256, 128, 4, 2), "M": (21, 256, 128, 8, 2), "L": (19, 256, 128, 17, 9), "FP4-S": (16, 128, 192, 4, 2),
    "FP4-M": (23, 256, 96, 8, 2), "FP4-L": (28, 192, 128, 8, 2),
}
TARGET = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, eq=False)
class Sample:
    """Operands of one point. a2 is stage 2's own input, distinct per slot; smooth2 belongs to int8smooth; policies
    are those of `operands.activation`."""

    mode: Mode
    rows: Operand
    w1: Operand
    w2: Operand
    a2: Operand
    routes: Routes
    smooth2: Tensor | None = None
    policies: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def sample(name: str, shape: str = "S", seed: int = 0, **policies: str) -> Sample:
    """Signed data; rows and channels spread over three decades; gate and up of different distributions; strongly
    uneven routing weights; a sixth of the slots without an expert."""
    mode, (tokens, hidden, inner, experts, topk) = MODES[name], SHAPES[shape]
    generator = torch.Generator().manual_seed(seed * 1000 + len(name) * 31 + hidden + inner)

    def normal(*extents: int) -> Tensor:
        return torch.randn(extents, generator=generator)

    def decades(*extents: int) -> Tensor:
        return 10 ** (3 * torch.rand(extents, generator=generator) - 2.3)

    ids = torch.rand((tokens, experts), generator=generator).argsort(dim=1)[:, :topk].to(torch.int32)
    drop = torch.rand((tokens, topk), generator=generator) < 1 / 6
    drop[:, 0] &= torch.arange(tokens) % 5 == 0
    drop[0], drop[-1] = False, False
    ids = torch.where(drop, -1, ids)
    uneven = torch.rand((tokens, topk), generator=generator) ** 4 + 0.02
    routes = Routes(ids, uneven / uneven.sum(dim=1, keepdim=True))
    x = normal(tokens, hidden) * decades(tokens, 1)
    w1 = normal(experts, 2 * inner, hidden) * decades(experts, 2 * inner, 1) / hidden**0.5
    w1[:, :inner] = w1[:, :inner].abs() * 0.3 + w1[:, :inner] * 0.7  # gate: skewed, up: not
    w2 = normal(experts, hidden, inner) * decades(experts, hidden, 1) / inner**0.5
    a2 = normal(tokens, topk, inner) * decades(tokens, topk, 1)
    smooth1 = torch.rand((experts, hidden), generator=generator) / 2 + 0.75
    smooth2 = torch.rand((experts, inner), generator=generator) / 2 + 0.75
    if mode.slot_major:
        rows = operands.activation(operands.smoothed(x[:, None].expand(-1, topk, -1), smooth1, ids), mode, **policies)
    else:
        rows = operands.per_slot(operands.activation(x, mode, **policies), topk)
    return Sample(mode, rows, operands.weight(w1, mode, **policies), operands.weight(w2, mode, **policies),
                  operands.activation(a2, mode, **policies), routes, smooth2 if mode.slot_major else None, policies)


def product(rows: Operand, weights: Operand, routes: Routes, order: Sequence[int], integer: bool) -> Tensor:
    """fp32 [T, k, N]: sums over chunks of 32 elements of K, taken in ``order``; group scales applied to the chunks'
    sums; then the channel's scale and the row's. ``integer``: the sums are exact."""
    (tokens, topk), width = routes.ids.shape, weights.payload.shape[1]
    acc = torch.zeros((tokens, topk, width), dtype=torch.float64 if integer else torch.float32)
    for expert in routes.ids.unique().tolist():
        if expert < 0:
            continue
        here = routes.ids == expert
        left, right = rows.payload[here], weights.payload[expert]
        scales = (None if rows.factors is None else rows.factors[here],
                  None if weights.factors is None else weights.factors[expert])
        for chunk in order:
            cut = slice(32 * chunk, 32 * chunk + 32)
            part = left[:, cut].to(acc.dtype) @ right[:, cut].to(acc.dtype).T
            if scales[0] is not None:
                part = part * scales[0][:, 32 * chunk, None]
            if scales[1] is not None:
                part = part * scales[1][None, :, 32 * chunk]
            acc[here] += part
    found = acc.float()
    if weights.scale is not None:
        found = found * weights.scale[routes.ids.clamp(min=0).long()]
    return found if rows.scale is None else found * rows.scale[..., None]


def orders(width: int) -> list[list[int]]:
    count = width // 32
    return [list(range(count)), list(range(count))[::-1], [*range(0, count, 2), *range(1, count, 2)]]


@functools.lru_cache(maxsize=128)
def run_stage1(of: Sample, out: str, order: int = 0, doweight: str = "none") -> Tensor:
    """Stage 1 as a kernel would: silu by exp and a quotient, one cast. Slots without an expert are NaN.
    The result is kept for the next caller, so nobody may change it."""
    width = of.rows.payload.shape[-1]
    gate, up = product(of.rows, of.w1, of.routes, orders(width)[order], of.mode.integer).chunk(2, dim=-1)
    factor = of.routes.weights[..., None]
    if doweight in ("gate", "gate-and-up"):
        gate = gate * factor
    if doweight == "gate-and-up":
        up = up * factor
    y = gate / (1 + torch.exp(-gate)) * up
    y = y * factor if doweight == "after" else y
    return y.to(TARGET[out]).masked_fill((of.routes.ids < 0)[..., None], float("nan"))


@functools.lru_cache(maxsize=128)
def run_stage2(of: Sample, out: str, how: str, order: int = 0, doweight: bool = True, bf16_rule: str = "half-even"
               ) -> Tensor:
    """Stage 2 as a kernel would. how: "reduce", or "atomic", which adds slots in an order that ``order`` shuffles."""
    width = of.a2.payload.shape[-1]
    z = product(of.a2, of.w2, of.routes, orders(width)[order % 3], of.mode.integer)
    parts = round_out(z * of.routes.weights[..., None] if doweight else z, out, bf16_rule)
    acc = torch.zeros((z.shape[0], z.shape[2]), dtype=torch.float32 if how == "reduce" else parts.dtype)
    slots = list(range(z.shape[1]))
    if how == "atomic":
        slots = torch.randperm(len(slots), generator=torch.Generator().manual_seed(order)).tolist()
    for slot in slots:
        acc = torch.where(of.routes.valid[:, slot, None], acc + parts[:, slot].to(acc.dtype), acc)
    return acc.to(parts.dtype)


def requantised(out1: Tensor, of: Sample) -> Operand:
    """Stage 2's input from a kernel's own out1 [T, k, I]."""
    value = out1.float().nan_to_num(nan=0.0)
    if of.smooth2 is not None:
        value = value * of.smooth2[of.routes.ids.clamp(min=0).long()]
    return operands.activation(value, of.mode, **of.policies)


def run_chain(of: Sample, out: str, how: str, order: int = 0) -> Tensor:
    return run_stage2(replace(of, a2=requantised(run_stage1(of, "f16", order), of)), out, how, order)


def combinations(mode: Mode) -> list[tuple[str, str]]:
    """(how, out) that the mode has."""
    return [(how, out) for how in mode.modes for out in mode.outputs if (how, out) != ("reduce", "f32")]
