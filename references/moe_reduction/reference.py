"""Golden and oracle of moe_reduction."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.formats import cast
from conformance.operator import Arguments, Call, OracleRows, Reference, Shared
from references.moe_reduction.contract import valid_slots, validate

_U = 2.0**-24  # unit roundoff of fp32


def _chunks(part: Tensor) -> Iterator[tuple[int, int]]:
    """Token ranges whose fp64 temporaries stay in cache on a CPU, and fill a GPU with few launches."""
    tokens, _, hidden = part.shape
    step = max(1, (1 << 27 if part.is_cuda else 1 << 17) // hidden)
    for start in range(0, tokens, step):
        yield start, min(tokens, start + step)


def _rows(part: Tensor, valid: Tensor | None, start: int, stop: int) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Per slot, ascending: the tokens of [start, stop) that have it, as int64 indices from ``start`` (None: all of
    them), and their rows [n, H]. Rows of invalid slots are never read."""
    for slot in range(part.shape[1]):
        rows = part[start:stop, slot]
        if valid is None:
            yield None, rows
            continue
        token = valid[start:stop, slot].nonzero().flatten()
        if len(token):
            yield token, rows.index_select(0, token)


def accumulate(arguments: Arguments) -> Tensor:
    """fp32 [T, H]: the accumulator after the last slot, before the cast."""
    part, valid = arguments["part"], valid_slots(arguments)
    acc = torch.zeros((part.shape[0], part.shape[2]), dtype=torch.float32, device=part.device)
    for start, stop in _chunks(part):
        here = acc[start:stop]
        for token, rows in _rows(part, valid, start, stop):
            if token is None:
                here += rows.float()
            else:
                here.index_copy_(0, token, here.index_select(0, token) + rows.float())
    return acc


def golden(
    part: Tensor, valid_mask: Tensor | None = None, topk_ids: Tensor | None = None, expert_mask: Tensor | None = None
) -> Tensor:
    """The reference result [T, H] in the documented order of roundings. Raises as ``validate`` does."""
    arguments = dict(part=part, valid_mask=valid_mask, topk_ids=topk_ids, expert_mask=expert_mask)
    validate(arguments, None, strided=True)
    return cast(accumulate(arguments), part.dtype)


def oracle(arguments: Arguments) -> Iterator[OracleRows]:
    """The exact sum in fp64 with its error bound, some tokens at a time.

    A sum of m terms needs m - 1 additions in any order. With n = m - 1 and S = sum of |terms|: |error| <=
    n u / (1 - n u) * S, u = 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Additions are
    exact below the normal range, so that no term for underflow is needed. The fp64 sum of up to 127 terms is itself
    exact to 127 * 2**-53 * S, which the last factor covers together with the rounding of S to fp32.
    """
    part, valid = arguments["part"], valid_slots(arguments)
    _, topk, hidden = part.shape
    for start, stop in _chunks(part):
        total = torch.zeros((stop - start, hidden), dtype=torch.float64, device=part.device)
        size = torch.zeros_like(total)
        for slot in range(topk):
            term = part[start:stop, slot].double()
            if valid is not None:
                term.masked_fill_(~valid[start:stop, slot, None], 0.0)
            total += term
            size += term.abs_()
        terms = torch.full((stop - start, 1), topk, device=part.device)
        if valid is not None:
            terms = valid[start:stop].sum(dim=1, keepdim=True)
        n = (terms - 1).clamp(min=0).double()
        relative = n * _U / (1 - n * _U) * (1 + 2.0**-20) + (n > 0) * 2.0**-44
        yield OracleRows(start, stop, total, (size * relative).float() * (1 + 2.0**-22))


def reference(call: Call, shared: Shared) -> Reference:
    """Golden and oracle of a call."""
    return Reference(cast(accumulate(call.arguments), call.output.dtype), lambda: oracle(call.arguments))
