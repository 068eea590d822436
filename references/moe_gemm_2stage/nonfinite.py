"""NaN and infinity in rows and weights: in numbers, where their format has them, or in scales."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conformance.data.generate import integers
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.storage import ENCODINGS

_WITH_NAN = {"w1": 1, "w2": 3}  # experts, modulo 4 in a chain and else 2


def in_rows(rows: Operand, mode: Mode, seed: int) -> Operand:
    """Rows [..., rows, K] of which a quarter have a NaN in a scale, and of 8-bit floats another quarter one of their
    own; 16-bit ones as they are, see `spoil`."""
    if mode.activation in ("f16", "bf16"):
        return rows
    kind = integers(tuple(rows.payload.shape[:-1]), 0, 4, seed, rows.payload.device)
    rows = with_nan(rows, kind == 0, seed)
    return with_nan(rows, kind == 1, seed, in_payload=True) if mode.activation in ("fp8", "mxfp8") else rows


def in_channels(weight: Operand, name: str, expert: int, mode: Mode, chained: bool, seed: int) -> Operand:
    """An expert's weights [1, N, K] of which some channels have a NaN, in a scale, or every other one in a float: those
    of odd experts, in a chain some of these for w1 and others for w2, so that the one hides nothing of the other. For
    the same reason gate and up have it in different channels, in a chain, whose rows of stage 2 are NaN of either, in
    different experts."""
    step = 4 if chained else 2
    if expert % step != _WITH_NAN[name] % step:
        return weight
    row = torch.arange(weight.payload.shape[1], device=weight.payload.device)
    channel, here = row % 16, torch.ones_like(row, dtype=torch.bool)
    if name == "w1":
        up = row >= len(row) // 2
        channel = (row + 4 * up) % 16
        here = up == (expert % 8 >= 4) if chained else here
    found = with_nan(weight, (here & (channel == 3))[None], seed + expert)
    floats = mode.weight in ("fp8", "f16", "bf16")
    return with_nan(found, (here & (channel == 11))[None], seed + expert, in_payload=floats)


def spoil(stored: Tensor, seed: int) -> None:
    """Put one NaN, +infinity or -infinity in turn into a quarter of the rows of ``stored`` [R, K]; of a format without
    infinities NaN alone. Raises TypeError for integers."""
    if not stored.dtype.is_floating_point:
        raise TypeError(f"rows of {stored.dtype} hold no NaN")
    rows = (integers((len(stored),), 0, 4, seed, stored.device) == 0).nonzero().flatten()
    columns = integers((len(rows),), 0, stored.shape[1], seed, stored.device)
    if stored.element_size() == 1:
        stored.view(torch.uint8)[rows, columns] = ENCODINGS[stored.dtype].nan
        return
    known = torch.tensor([math.nan, math.inf, -math.inf], device=stored.device).to(stored.dtype)
    stored[rows, columns] = known[torch.arange(len(rows), device=stored.device) % 3]


def with_nan(of: Operand, chosen: Tensor, seed: int, in_payload: bool = False) -> Operand:
    """One NaN in each of the rows that bool [..., rows] ``chosen`` masks: in its scale or one of its scales, or, where
    there is none or ``in_payload`` is asked for, in one of its numbers."""
    rows = tuple(chosen.nonzero().T)
    width = of.payload.shape[-1]
    if of.scale is not None and not in_payload:
        return replace(of, scale=of.scale.masked_fill(chosen, math.nan))
    if of.factors is not None and not in_payload:
        block = integers((len(rows[0]),), 0, width // GROUP, seed, chosen.device)
        blocks = of.factors.unflatten(-1, (-1, GROUP)).clone()
        place = (*rows, block)
        blocks[place] = math.nan
        return replace(of, factors=blocks.flatten(-2))
    payload = of.payload.clone()
    place = (*rows, integers((len(rows[0]),), 0, width, seed, chosen.device))
    payload[place] = math.nan
    return replace(of, payload=payload)
