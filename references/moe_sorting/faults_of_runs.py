"""Faulty semantics of a sort, second part: runs laid out wrongly, routes and experts left out, weights changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.operator import Arguments
from references.moe_gemm_2stage.sorting import Sorted, local_ids, pack, sentinel, sort, unpack

Faulty = Callable[[Arguments, Sorted], Sorted]


def sorted_of(given: Arguments, **change: Tensor | None) -> Sorted:
    """The sort of a call with other ids, weights or mask; nothing is refused."""
    given = {**given, **change}
    return sort(given["topk_ids"], given["topk_weights"], given["experts"], given["block"], given["expert_mask"],
                "skip", "keep")


# ---- what is sorted -----------------------------------------------------------------------------------------------


def without(lost: Callable[[Arguments], Tensor]) -> Faulty:
    """The routes of a mask [T, k], or of what is broadcast to it, are left out."""
    return lambda given, right: sorted_of(given, topk_ids=given["topk_ids"].masked_fill(lost(given), -1))


def token(given: Arguments) -> Tensor:
    """int64 [T, 1]."""
    return torch.arange(len(given["topk_ids"]), device=given["topk_ids"].device)[:, None]


def beyond_whole(tile: int) -> Callable[[Arguments], Tensor]:
    """Tokens beyond the last whole tile; where there is none, no token."""
    return lambda given: (token(given) >= len(given["topk_ids"]) // tile * tile) & (len(given["topk_ids"]) >= tile)


def with_ids(change: Callable[[Tensor, int], Tensor]) -> Faulty:
    """Other ids, given those and E."""
    return lambda given, right: sorted_of(given, topk_ids=change(given["topk_ids"], given["experts"]))


def with_mask(change: Callable[[Tensor], Tensor]) -> Faulty:
    """Another expert_mask; a bool one will do."""
    return lambda given, right: sorted_of(given, expert_mask=change(given["expert_mask"]).to(torch.int32))


def with_weights(change: Callable[[Tensor], Tensor]) -> Faulty:
    """Other weights [T, k]."""
    return lambda given, right: sorted_of(given, topk_weights=change(given["topk_weights"]))


def contiguous(value: Tensor) -> Tensor:
    """The tensor as one that is read without its strides, where it is strided."""
    return value.as_strided(value.shape, (value.shape[1], 1))


def slot_major(value: Tensor) -> Tensor:
    """[T, k] as read at s T + t."""
    return value.reshape(value.shape[1], value.shape[0]).T.contiguous()


def cut(weights: Tensor, low_bits: int) -> Tensor:
    """fp32 with its lowest bits cleared."""
    return (weights.contiguous().view(torch.int32) & -(1 << low_bits)).view(torch.float32)


# ---- where it is put ----------------------------------------------------------------------------------------------


def _routes(given: Arguments, right: Sorted) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the routes, their local experts, and each expert's number of routes, int64 [E]."""
    row = (right.token_ids != sentinel(*given["topk_ids"].shape)).nonzero().flatten()
    expert = right.expert_ids[row // right.block].long()
    return row, expert, torch.bincount(expert, minlength=given["experts"])


def _locals(given: Arguments) -> int:
    mask = given["expert_mask"]
    return given["experts"] if mask is None else int((mask != 0).sum())


def _put(given: Arguments, right: Sorted, padded: Tensor, kept: Tensor | None = None,
         start: Tensor | None = None) -> Sorted:
    """The routes in runs of other lengths, int64 [E]. kept: mask of the routes that are written at all; start: of
    each run, where that does not follow from the lengths."""
    row, expert, counts = _routes(given, right)
    ends = padded.cumsum(0)
    start = ends - padded if start is None else start
    to = start[expert] + torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[expert]
    here = to < len(right.token_ids)
    here = here if kept is None else here & kept
    ids = torch.full_like(right.token_ids, sentinel(*given["topk_ids"].shape))
    weights = torch.zeros_like(right.weights)
    ids[to[here]], weights[to[here]] = right.token_ids[row[here]], right.weights[row[here]]
    first = torch.arange(len(right.expert_ids), device=row.device) * right.block
    owner = torch.searchsorted(ends, first, right=True)
    owner = torch.where(owner == len(ends), -1, owner).to(torch.int32)
    return replace(right, token_ids=ids, weights=weights, expert_ids=owner,
                   num_valid=torch.stack([ends[-1].to(torch.int32), right.num_valid[1]]))


def runs_of(length: Callable[[Tensor, int], Tensor]) -> Faulty:
    """Runs of another length, given the numbers of routes [E] and BM."""
    return lambda given, right: _put(given, right, length(_routes(given, right)[2], right.block))


def padded(counts: Tensor, block: int) -> Tensor:
    return (counts + block - 1) // block * block


def block_for_empty(given: Arguments, right: Sorted) -> Sorted:
    counts = _routes(given, right)[2]
    counts[: _locals(given)].clamp_(min=1)
    return _put(given, right, padded(counts, right.block))


def run_tail_lost(given: Arguments, right: Sorted) -> Sorted:
    row, expert, counts = _routes(given, right)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[expert]
    most = torch.where(counts < right.block, counts, counts // right.block * right.block)
    return _put(given, right, padded(most, right.block), rank < most[expert])


def offsets_bf16(given: Arguments, right: Sorted) -> Sorted:
    lengths = padded(_routes(given, right)[2], right.block)
    return _put(given, right, lengths, start=(lengths.cumsum(0) - lengths).bfloat16().long())


def empty_not_numbered(given: Arguments, right: Sorted) -> Sorted:
    used = _routes(given, right)[2] > 0
    number = (used.cumsum(0) - 1).to(torch.int32)
    owner = right.expert_ids
    return replace(right, expert_ids=torch.where(owner < 0, owner, number[owner.clamp(min=0).long()]))


def mask_as_map(given: Arguments, right: Sorted) -> Sorted:
    mask, blocks = given["expert_mask"], right.valid_rows // right.block
    owner = right.expert_ids.clone()
    owner[:blocks] = mask[(mask != 0).nonzero().flatten()[owner[:blocks].long()]]
    return replace(right, expert_ids=owner)


def descending(given: Arguments, right: Sorted) -> Sorted:
    """The last expert's run comes first."""
    ids, mask, experts = given["topk_ids"], given["expert_mask"], given["experts"]
    inside = (ids >= 0) & (ids < experts)
    found = sorted_of(given, topk_ids=torch.where(inside, experts - 1 - ids, ids),
                      expert_mask=None if mask is None else mask.flip(0))
    owner = found.expert_ids
    return replace(found, expert_ids=torch.where(owner < 0, owner, _locals(given) - 1 - owner))


def _reordered(given: Arguments, right: Sorted, place: Callable[[Tensor], Tensor], weights_too: bool = True) -> Sorted:
    """Each run's routes in another order, that of ``place`` (given packed ids, int64)."""
    row, expert, _ = _routes(given, right)
    order = torch.argsort(place(right.token_ids[row].long()), stable=True)
    order = order[torch.argsort(expert[order], stable=True)]
    ids, weights = right.token_ids.clone(), right.weights.clone()
    ids[row] = right.token_ids[row[order]]
    if weights_too:
        weights[row] = right.weights[row[order]]
    return replace(right, token_ids=ids, weights=weights)


def by_slot(given: Arguments, right: Sorted) -> Sorted:
    return _reordered(given, right, lambda ids: ids)  # the slot stands in the high bits


def _last_first(ids: Tensor) -> Tensor:
    """By descending token, then by descending slot."""
    token, slot = unpack(ids)
    return -(token * 256 + slot)


def backwards(given: Arguments, right: Sorted) -> Sorted:
    return _reordered(given, right, _last_first)


def unpaired(given: Arguments, right: Sorted) -> Sorted:
    return _reordered(given, right, _last_first, weights_too=False)


def inverse(given: Arguments, right: Sorted) -> Sorted:
    """At the place of each route stands what the inverse permutation has there."""
    ids, experts = given["topk_ids"], given["experts"]
    topk, mask = ids.shape[1], given["expert_mask"]
    if mask is None:
        mask = torch.ones(experts, dtype=torch.int32, device=ids.device)
    inside = (ids >= 0) & (ids < experts)
    local = torch.where(inside, local_ids(mask)[ids.clamp(0, experts - 1).long()], -1)
    number = torch.where(local < 0, experts, local).flatten()
    other = torch.argsort(torch.argsort(number, stable=True))
    row = _routes(given, right)[0]
    other = other[: len(row)]
    found, weights = right.token_ids.clone(), right.weights.clone()
    found[row] = pack(other // topk, other % topk)
    weights[row] = given["topk_weights"].flatten()[other]
    return replace(right, token_ids=found, weights=weights)


# ---- what is said of it -------------------------------------------------------------------------------------------


def valid(rows: Callable[[Arguments, Sorted], int] | None = None,
          tokens: Callable[[Arguments, Sorted], int] | None = None) -> Faulty:
    """Other numbers in num_valid_ids."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        number = right.num_valid.clone()
        if rows is not None:
            number[0] = rows(given, right)
        if tokens is not None:
            number[1] = tokens(given, right)
        return replace(right, num_valid=number)

    return change


def routes_of(given: Arguments, right: Sorted) -> int:
    return len(_routes(given, right)[0])


def rows_of_first(given: Arguments, right: Sorted) -> int:
    return int(padded(_routes(given, right)[2], right.block)[0])


def rows_with_unrouted(given: Arguments, right: Sorted) -> int:
    lost = given["topk_ids"].numel() - routes_of(given, right)
    return right.valid_rows + -(-lost // right.block) * right.block
