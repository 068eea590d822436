"""Faulty semantics of two-stage MoE in routes: which of them count, and the order of an expert's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faulty import Change, fault
from references.moe_gemm_2stage.reading import Reading, Routes, local_ids, routed, token_slot
from references.moe_gemm_2stage.sorting import unpack

_TILES = (16, 32, 64)


# ---- Which routes count -------------------------------------------------------------------------------------------


def _kept(keep: Callable[[Reading], Tensor]) -> Change:
    """Routes count where the mask [R] says so."""

    def change(r: Reading) -> Reading | None:
        mask = keep(r)
        return None if bool(mask.all()) else replace(r, routes=r.routes.where(mask))

    return change


def _rank(r: Reading) -> Tensor:
    """How many routes of the same expert come before each."""
    expert = r.routes.expert  # ascending
    return torch.arange(len(expert), device=expert.device) - torch.searchsorted(expert, expert)


def _alone(r: Reading) -> Tensor:
    counts = torch.bincount(r.routes.expert, minlength=1)
    return counts[r.routes.expert] == 1


def _experts(r: Reading) -> int:
    w = r.w2 if r.w1 is None else r.w1
    assert w is not None
    return len(w.payload)


def _ids(change: Callable[[Reading, Tensor, Tensor], Tensor]) -> Change:
    """Other experts: ``change(reading, local ids [T, k], global ids [T, k])``."""

    def changed(r: Reading) -> Reading | None:
        local = local_ids(r.call)
        ids = change(r, local, r.call.arguments["topk_ids"].long())
        if torch.equal(ids, local):
            return None
        return replace(r, routes=routed(ids, r.call.arguments["topk_weights"]))

    return changed


def _padding(r: Reading, token: Tensor, slot: Tensor, rows: Tensor) -> Reading | None:
    """Entries ``rows`` of the sorted lists taken for routes (token, slot)."""
    if not len(rows):
        return None
    given, block = r.call.arguments, r.call.arguments["block"]
    expert = given["sorted_expert_ids"][rows // block].long()
    inside = expert >= 0
    share, was = given["sorted_weights"][rows], r.routes
    added = (token[inside], slot[inside], expert[inside], share[inside])
    whole = [torch.cat([old, new.to(old.dtype)]) for old, new in zip((was.token, was.slot, was.expert, was.share),
                                                                     added, strict=True)]
    return replace(r, routes=Routes(*whole)) if bool(inside.any()) else None


def _padding_as(last: bool) -> Change:
    def change(r: Reading) -> Reading | None:
        given = r.call.arguments
        valid = int(given["num_valid_ids"][0])
        token, slot = (part.long() for part in unpack(given["sorted_token_ids"][:valid]))
        rows = ((token >= r.tokens) | (slot >= r.topk)).nonzero().flatten()
        token = torch.full_like(rows, r.tokens - 1 if last else 0)
        return _padding(r, token, torch.full_like(rows, r.topk - 1 if last else 0), rows)

    return change


def _tail_blocks(r: Reading) -> Reading | None:
    given = r.call.arguments
    valid, ids = int(given["num_valid_ids"][0]), given["sorted_token_ids"]
    rows = torch.arange(valid, len(ids), device=ids.device)
    token, slot = (part.long() for part in unpack(ids[valid:]))
    inside = (token < r.tokens) & (slot < r.topk)
    return _padding(r, token[inside], slot[inside], rows[inside])


def _block(r: Reading) -> Tensor:
    """The block of the sorted list in which each route stands."""
    block = r.call.arguments["block"]
    counts = torch.bincount(r.routes.expert, minlength=_experts(r))
    starts = ((counts + block - 1) // block).cumsum(0) - (counts + block - 1) // block
    return starts[r.routes.expert] + _rank(r) // block


def _before_last_block(r: Reading) -> Tensor:
    block = _block(r)
    return block < block.amax() if len(block) else block >= 0


def _in_block(r: Reading) -> Tensor:
    return _rank(r) % r.call.arguments["block"]


def _below(place: Callable[[Reading], Tensor], tile: int) -> Change:
    return _kept(lambda r: place(r) < tile)


def _previous_block(r: Reading) -> Reading | None:
    """Every block but the first is given the expert of the block before it."""
    expert = r.call.arguments["sorted_expert_ids"][(_block(r) - 1).clamp(min=0)].long()
    return None if torch.equal(expert, r.routes.expert) else replace(r, routes=replace(r.routes, expert=expert))


def _narrow_tokens(r: Reading) -> Reading | None:
    if r.tokens <= 64:
        return None
    return replace(r, routes=replace(r.routes, token=r.routes.token & 63))


# ---- The order of an expert's rows --------------------------------------------------------------------------------


def _by_count(r: Reading) -> Routes | None:
    """The routes by expert and token, where the list has another order."""
    order = torch.argsort(r.routes.expert * r.tokens + r.routes.token, stable=True)
    return None if bool((order.diff() > 0).all()) else r.routes.where(order)


def _walked_by_token(change: Change) -> Change:
    """As ``change``, of a kernel that does not take its routes from the list."""

    def changed(r: Reading) -> Reading | None:
        counted = _by_count(r)
        return None if counted is None else change(replace(r, routes=counted))

    return changed


def _mixed(change: Callable[[Reading, Routes], Reading | None], inverse: bool) -> Change:
    """A kernel with two notions of which route stands at a place of the list: what stands there, and what would if an
    expert's rows were sorted by token. ``change(reading by one of them, routes by the other)``."""

    def changed(r: Reading) -> Reading | None:
        counted = _by_count(r)
        if counted is None:
            return None
        return change(r, counted) if inverse else change(replace(r, routes=counted), r.routes)

    return changed


def _rows_of_others(r: Reading, other: Routes) -> Reading:
    source = r.source
    return replace(r, source=lambda of, routes: source(of, other))


def _between_of_others(r: Reading, other: Routes) -> Reading | None:
    return replace(r, second=lambda of, routes: token_slot(of, other)) if r.w1 and r.w2 else None


def _targets_of_others(r: Reading, other: Routes) -> Reading:
    target = r.target
    return replace(r, target=lambda of, routes: target(of, other))


def _weights_of_others(r: Reading, other: Routes) -> Reading | None:
    if r.w2 is None and r.doweight == "none":
        return None
    return replace(r, routes=replace(r.routes, share=other.share))


def _scales_of_others(r: Reading, other: Routes) -> Reading | None:
    """e8m0 scales of rows, which stand at the place in the list."""
    if not r.mode.microscaled or r.rows.factors is None:
        return None
    factors = r.rows.factors.clone()
    factors[token_slot(r, r.routes)] = r.rows.factors[token_slot(r, other)]
    return replace(r, rows=replace(r.rows, factors=factors))


_MIXED = {
    "results are written": _targets_of_others,
    "rows are read": _rows_of_others,
    "stage 1's result is read": _between_of_others,
    "routing weights are read": _weights_of_others,
    "scales of rows are read": _scales_of_others,
}


ROUTES = (
    fault("padding-row-0", "padding is read as token 0 in slot 0", _padding_as(last=False)),
    fault("padding-last-row", "padding is read as the last token in the last slot", _padding_as(last=True)),
    fault("tail-blocks", "blocks past the valid rows count", _tail_blocks),
    fault("packed-id-0-dropped", "token 0 in slot 0, packed id 0, is left out",
          _kept(lambda r: r.routes.token + r.routes.slot > 0)),
    fault("global-expert-ids", "global expert ids are used where the weights are local",
          _ids(lambda r, local, ids: torch.where(local >= 0, ids, -1))),
    fault("mask-ignored", "slots of experts that are elsewhere count", _ids(lambda r, local, ids: ids)),
    fault("next-local-expert", "local numbers of experts are one too large", _ids(
        lambda r, local, ids: local if r.call.arguments["expert_mask"] is None else torch.where(
            local >= 0, (local + 1) % _experts(r), -1))),
    fault("next-expert", "the weights of the next expert are used",
          lambda r: replace(r, payload_expert=lambda expert, count: (expert + 1) % count)),
    fault("expert-of-slot-0", "every slot is given slot 0's expert",
          _ids(lambda r, local, ids: local[:, :1].expand(local.shape))),
    fault("expert-of-previous-block", "blocks are given the expert of the block before", _previous_block),
    fault("last-slot-dropped", "the last slot is left out", _kept(lambda r: r.routes.slot < r.topk - 1)),
    fault("first-slot-dropped", "the first slot is left out", _kept(lambda r: r.routes.slot > 0)),
    fault("last-expert-dropped", "the last expert is left out", _kept(lambda r: r.routes.expert < _experts(r) - 1)),
    fault("expert-0-dropped", "expert 0 is left out", _kept(lambda r: r.routes.expert > 0)),
    fault("single-rows-dropped", "experts with a single row are left out", _kept(lambda r: ~_alone(r))),
    fault("last-row-of-block-dropped", "the last row of a full block is left out",
          _kept(lambda r: _in_block(r) < r.call.arguments["block"] - 1)),
    *(fault("rows-beyond-tile-dropped", f"rows of an expert beyond {tile} are left out", _below(_rank, tile))
      for tile in _TILES),
    *(fault("rows-beyond-tile-dropped", f"rows of a block beyond {tile} are left out", _below(_in_block, tile))
      for tile in _TILES[:-1]),
    *(fault("rows-beyond-tile-dropped", f"rows of an expert beyond {tile} are left out",
            _walked_by_token(_below(_rank, tile))) for tile in _TILES),
    fault("last-block-dropped", "the last block of rows is left out", _kept(_before_last_block)),
    fault("slots-beyond-first-dropped", "all slots but the first are left out",
          lambda r: _kept(lambda of: of.routes.slot < 1)(r) if r.topk > 2 else None),
    fault("token-6-bit", "tokens are held in 6 bits", _narrow_tokens),
    *(fault("run-order", f"{what} as if the rows of an expert stood in the order of their tokens",
            _mixed(change, inverse)) for what, change in _MIXED.items() for inverse in (False, True)),
)
