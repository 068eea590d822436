"""The faulty semantics that a failure of two-stage MoE is compared with, the most specific first: routes, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faults_of_blocks import BLOCKS
from references.moe_gemm_2stage.faults_of_elements import ELEMENTS
from references.moe_gemm_2stage.faults_of_numbers import NUMBERS
from references.moe_gemm_2stage.faults_of_variants import VARIANTS
from references.moe_gemm_2stage.faulty import (
    Change,
    Place,
    Reading,
    Routes,
    by_token,
    fault,
    local_ids,
    routed,
    shares,
    slot_token,
    token_slot,
)
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


def _in_block(r: Reading) -> Tensor:
    return _rank(r) % r.call.arguments["block"]


def _below(place: Callable[[Reading], Tensor], tile: int) -> Change:
    return _kept(lambda r: place(r) < tile)


def _previous_block(r: Reading) -> Reading | None:
    """Every block but the first is given the expert of the block before it."""
    given, block = r.call.arguments, r.call.arguments["block"]
    counts = torch.bincount(r.routes.expert, minlength=_experts(r))
    starts = ((counts + block - 1) // block).cumsum(0) - (counts + block - 1) // block
    at = starts[r.routes.expert] + _rank(r) // block
    expert = given["sorted_expert_ids"][(at - 1).clamp(min=0)].long()
    return None if torch.equal(expert, r.routes.expert) else replace(r, routes=replace(r.routes, expert=expert))


# ---- Which row, expert, place -------------------------------------------------------------------------------------


def _source(place: Place) -> Change:
    """Another row is read in stage 2, and nothing changes in stage 1."""

    def change(r: Reading) -> Reading | None:
        if r.w2 is None or torch.equal(place(r, r.routes), token_slot(r, r.routes)):
            return None
        return replace(r, source=place) if r.w1 is None else replace(r, second=place)

    return change


def _slot_major(place: Place) -> Change:
    """Another row is read in stage 1, where rows are slot-major."""
    return lambda r: replace(r, source=place) if r.mode.slot_major and r.w1 is not None else None


def _row_of_slot_0(r: Reading) -> Reading | None:
    """The payload only: each slot keeps its scale."""
    if r.w1 is not None:
        return None
    return replace(r, source=lambda of, routes: routes.token * of.topk,
                   row_scale=lambda scale, row, routes: scale[row + routes.slot])


def _narrow_tokens(r: Reading) -> Reading | None:
    if r.tokens <= 64:
        return None
    return replace(r, routes=replace(r.routes, token=r.routes.token & 63))


# ---- Routing weights ----------------------------------------------------------------------------------------------


def _without_k(r: Reading, weights: Tensor) -> Tensor:
    token, slot = (torch.arange(count, device=weights.device) for count in weights.shape)
    return weights.flatten()[token[:, None] + slot]


def _normalised(r: Reading, weights: Tensor) -> Tensor:
    valid = local_ids(r.call) >= 0
    return weights / weights.masked_fill(~valid, 0.0).sum(dim=1, keepdim=True)


def _doweight(how: str) -> Change:
    """Stage 1 applies the weight as ``how`` says and not as it was told."""
    return lambda r: replace(r, doweight=how) if r.w2 is None and r.doweight != how else None


def _in_stage_1(weighted: bool) -> Change:
    return lambda r: replace(r, doweight="gate-and-up", weighted=weighted) if r.w1 and r.w2 else None


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
    fault("token-6-bit", "tokens are held in 6 bits", _narrow_tokens),
    fault("row-of-slot-0", "every slot reads the row of slot 0", _row_of_slot_0),
    fault("row-and-scale-of-slot-0", "every slot reads the row and the scale of slot 0",
          _source(lambda r, routes: routes.token * r.topk)),
    fault("row-of-token", "stage 2 reads row t in the place of t k + s", _source(by_token)),
    fault("row-of-token", "slot-major rows are read by token", _slot_major(by_token)),
    fault("rows-transposed", "slot-major rows are read as token-major", _slot_major(token_slot)),
    fault("rows-transposed", "token-major rows are read as slot-major", _source(slot_token)),
    fault("targets-transposed", "row s T + t is written in the place of t k + s",
          lambda r: None if r.adds or r.topk == 1 else replace(r, target=slot_token)),
    fault("slots-overwrite", "slots overwrite the output in the place of being added",
          lambda r: replace(r, overwrite=True) if r.adds and r.topk > 1 else None),
    fault("mean", "the sum over slots is divided by their number",
          lambda r: replace(r, divide=r.topk) if r.w2 is not None and r.topk > 1 else None),
    fault("weights-missing", "the routing weights are left out",
          shares(lambda r, weights: torch.ones_like(weights))),
    fault("weights-twice", "the routing weights are applied twice", shares(lambda r, weights: weights**2)),
    fault("weights-uniform", "1/k is used in the place of the routing weights",
          shares(lambda r, weights: torch.full_like(weights, 1 / r.topk))),
    fault("weights-normalised", "the routing weights are divided by their sum over local slots", shares(_normalised)),
    fault("weights-of-previous-slot", "a slot gets the weight of the slot before it",
          shares(lambda r, weights: weights.roll(1, 1))),
    fault("weights-of-next-slot", "a slot gets the weight of the slot after it",
          shares(lambda r, weights: weights.roll(-1, 1))),
    fault("weights-of-slot-0", "every slot gets the weight of slot 0",
          shares(lambda r, weights: weights[:, :1].expand(weights.shape))),
    fault("weights-of-previous-token", "a token gets the weights of the token before it",
          shares(lambda r, weights: weights.roll(1, 0))),
    fault("weights-of-next-token", "a token gets the weights of the token after it",
          shares(lambda r, weights: weights.roll(-1, 0))),
    fault("weights-index-without-k", "the weight's index lacks the factor k", shares(_without_k)),
    fault("weights-missing", "the routing weight is not applied in stage 1", _doweight("none")),
    fault("weights-after-activation", "stage 1 applies the routing weight after the activation", _doweight("after")),
    fault("weights-on-gate", "stage 1 applies the routing weight to the gate", _doweight("gate")),
    fault("weights-on-gate-and-up", "stage 1 applies the routing weight to gate and up", _doweight("gate-and-up")),
    fault("weights-in-stage-1", "the routing weight is applied in stage 1 and not in stage 2", _in_stage_1(False)),
    fault("weights-in-both-stages", "the routing weight is applied in stage 1 and again in stage 2", _in_stage_1(True)),
)
FAULTS = (*ROUTES, *BLOCKS, *ELEMENTS, *NUMBERS, *VARIANTS)
