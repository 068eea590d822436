"""NaN and infinity in rows and weights: in numbers, where their format has them, or in scales."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conformance.generate import integers
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.storage import ENCODINGS


def spoil(stored: Tensor, chosen: Tensor, seed: int) -> None:
    """Put one NaN, +infinity or -infinity in turn into the rows of ``stored`` [R, K] that ``chosen`` [R] masks; of a
    format without infinities NaN alone. Raises TypeError for integers."""
    if not stored.dtype.is_floating_point:
        raise TypeError(f"rows of {stored.dtype} hold no NaN")
    rows = chosen.nonzero().flatten()
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
