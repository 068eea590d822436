"""The faulty semantics that a failure of two-stage MoE is compared with, the most specific first; and of those the ones
that take another row, another place or another routing weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage.faults_of_blocks import BLOCKS
from references.moe_gemm_2stage.faults_of_elements import ELEMENTS
from references.moe_gemm_2stage.faults_of_numbers import NUMBERS
from references.moe_gemm_2stage.faults_of_routes import ROUTES
from references.moe_gemm_2stage.faults_of_storage import SUBNORMAL
from references.moe_gemm_2stage.faults_of_variants import VARIANTS
from references.moe_gemm_2stage.faulty import Change, fault, shares
from references.moe_gemm_2stage.reading import Place, Reading, by_token, local_ids, slot_token, token_slot

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


ROWS_AND_WEIGHTS = (
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
FAULTS = (*ROUTES, *ROWS_AND_WEIGHTS, *BLOCKS, *ELEMENTS, *NUMBERS, *VARIANTS, *SUBNORMAL)
