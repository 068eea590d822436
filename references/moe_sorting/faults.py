"""Faulty semantics of a sort, from public bug reports: what a kernel with each of them returns, to explain failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conformance.operator import Arguments, Call, FaultyOutputs, Results
from references.moe_gemm_2stage.sorting import TOKEN_BITS, Sorted, pack, sentinel, unpack
from references.moe_sorting import faults_of_runs as runs
from references.moe_sorting.contract import OUTPUTS
from references.moe_sorting.faults_of_runs import Faulty, sorted_of


def _padding(value: Callable[[int, int], int]) -> Faulty:
    """Other padding ids, given T and k."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        shape = given["topk_ids"].shape
        padding = right.token_ids == sentinel(*shape)
        return replace(right, token_ids=right.token_ids.masked_fill(padding, value(*shape)))

    return change


def _ids(packed: Callable[[Tensor, Tensor], Tensor]) -> Faulty:
    """Routes packed in another way, padding as it is."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        padding = right.token_ids == sentinel(*given["topk_ids"].shape)
        return replace(right, token_ids=torch.where(padding, right.token_ids, packed(*unpack(right.token_ids))))

    return change


def _weights(token: Callable[[Tensor, int], Tensor], slot: Callable[[Tensor, int], Tensor]) -> Faulty:
    """Weights of other places, given token and T, slot and k."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        tokens, topk = given["topk_ids"].shape
        padding = right.token_ids == sentinel(tokens, topk)
        of_token, of_slot = (part.masked_fill(padding, 0).long() for part in unpack(right.token_ids))
        found = given["topk_weights"][token(of_token, tokens), slot(of_slot, topk)]
        return replace(right, weights=torch.where(padding, right.weights, found))

    return change


def _global_ids(given: Arguments, right: Sorted) -> Sorted:
    local = (given["expert_mask"] != 0).nonzero().flatten()
    blocks = right.valid_rows // right.block
    owners = right.expert_ids.clone()
    owners[:blocks] = local[owners[:blocks].long()].to(torch.int32)
    return replace(right, expert_ids=owners)


def _duplicate_lost(given: Arguments, right: Sorted) -> Sorted:
    ids = given["topk_ids"]
    before = torch.tril(ids[:, :, None] == ids[:, None, :], diagonal=-1).any(dim=2)
    return sorted_of(given, topk_ids=ids.masked_fill(before, -1))


def _tail(value: Callable[[int], int]) -> Faulty:
    """Other ids past the valid rows, given T."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        ids = right.token_ids.clone()
        ids[right.valid_rows :] = value(len(given["topk_ids"]))
        return replace(right, token_ids=ids)

    return change


def _owners(moved: Callable[[Tensor], Tensor]) -> Faulty:
    return lambda given, right: replace(right, expert_ids=moved(right.expert_ids))


def _experts_from(bound: int) -> tuple[str, str, Faulty]:
    return f"experts-from-{bound}", f"experts from {bound} on are left out", runs.without(
        lambda given: given["topk_ids"] >= bound)


_NEED_A_MASK = frozenset({"masked-kept", "mask-is-1", "mask-positive", "mask-low-byte", "mask-inverted", "mask-as-map",
                          "global-ids"})
_IDS: tuple[tuple[str, str, Faulty], ...] = (
    ("sentinel-token-0", "padding ids are 0, the first token's route", _padding(lambda tokens, topk: 0)),
    ("sentinel-no-slot", "padding ids are T without the slot's bits", _padding(lambda tokens, topk: tokens)),
    ("sentinel-minus-1", "padding ids are -1", _padding(lambda tokens, topk: -1)),
    ("sentinel-last-route", "padding ids are the last token's last route",
     _padding(lambda tokens, topk: sentinel(tokens - 1, topk - 1))),
    ("sentinel-last-token", "padding ids have the last token, and the slot's bits of padding",
     _padding(lambda tokens, topk: sentinel(tokens - 1, topk))),
    ("sentinel-last-slot", "padding ids have the last slot, and the token's bits of padding",
     _padding(lambda tokens, topk: sentinel(tokens, topk - 1))),
    ("tail-zeros", "ids past the valid rows are 0", _tail(lambda tokens: 0)),
    ("tail-no-slot", "ids past the valid rows are T without the slot's bits", _tail(lambda tokens: tokens)),
    ("slot-lost", "the slot is missing in the ids", _ids(lambda token, slot: token)),
    ("slot-from-1", "slots are counted from 1", _ids(lambda token, slot: pack(token, slot + 1))),
    ("slot-bits-16", "the slot stands in bits 16 to 23 of the ids", _ids(lambda token, slot: slot << 16 | token)),
    ("slot-6-bit", "slots are held in 6 bits", _ids(lambda token, slot: pack(token, slot & 63))),
    ("token-10-bit", "tokens are held in 10 bits", _ids(lambda token, slot: pack(token & 1023, slot))),
    ("token-16-bit", "tokens are held in 16 bits", _ids(lambda token, slot: pack(token & 0xFFFF, slot))),
    ("exchanged", "token and slot have changed places in the ids",
     _ids(lambda token, slot: token << TOKEN_BITS | slot)),
    ("ids-reversed", "the ids of a run stand in reverse order, their weights do not", runs.unpaired),
    ("backwards", "the routes of a run stand in reverse order", runs.backwards),
    ("by-slot", "the routes of a run stand by slot, then by token", runs.by_slot),
    ("inverse", "the order is the inverse of the right permutation", runs.inverse),
)
_WEIGHTS: tuple[tuple[str, str, Faulty], ...] = (
    ("weight-next-slot", "weights are those of the next slot",
     _weights(lambda token, tokens: token, lambda slot, topk: (slot + 1) % topk)),
    ("weight-token-0", "weights are those of token 0: the token's offset is left out",
     _weights(lambda token, tokens: token * 0, lambda slot, topk: slot)),
    ("weight-next-token", "weights are those of the next token",
     _weights(lambda token, tokens: (token + 1) % tokens, lambda slot, topk: slot)),
    ("weights-transposed", "weights are read slot-major, at s T + t", runs.with_weights(runs.slot_major)),
    ("weights-contiguous", "the strides of topk_weights are ignored", runs.with_weights(runs.contiguous)),
    ("weight-one", "weights are 1", runs.with_weights(torch.ones_like)),
    ("weight-doubled", "weights are multiplied by 2", runs.with_weights(lambda weights: weights * 2)),
    ("weight-twice", "weights are squared", runs.with_weights(torch.square)),
    ("weight-renormalised", "weights are divided by their token's sum",
     runs.with_weights(lambda weights: weights / weights.sum(dim=1, keepdim=True))),
    ("weight-bf16", "weights pass through bf16", runs.with_weights(lambda weights: weights.bfloat16().float())),
    ("weight-fp16", "weights pass through fp16", runs.with_weights(lambda weights: weights.half().float())),
    ("weight-truncated", "the lowest 16 bits of weights are cut off", runs.with_weights(lambda w: runs.cut(w, 16))),
    ("weight-plus-0", "a weight of -0 becomes +0", runs.with_weights(lambda weights: weights + 0.0)),
    ("weight-flushed", "weights below the normal range become 0", runs.with_weights(
        lambda weights: torch.where(weights.abs() < torch.finfo(torch.float32).tiny, 0.0, weights))),
    ("weight-nan-zero", "a weight of NaN becomes 0", runs.with_weights(lambda weights: weights.nan_to_num(
        nan=0.0, posinf=torch.inf, neginf=-torch.inf))),
    ("weight-nan-canonical", "every NaN among the weights becomes the same one", runs.with_weights(
        lambda weights: weights.masked_fill(weights.isnan(), torch.nan))),
    ("weight-finite", "an infinite weight becomes the largest finite one", runs.with_weights(
        lambda weights: weights.nan_to_num(nan=torch.nan))),
)
_EXPERTS: tuple[tuple[str, str, Faulty], ...] = (
    ("masked-kept", "experts that live elsewhere keep their routes",
     lambda given, right: sorted_of(given, expert_mask=None)),
    ("mask-is-1", "only 1 counts as true in expert_mask", runs.with_mask(lambda mask: mask == 1)),
    ("mask-positive", "negative values of expert_mask count as false", runs.with_mask(lambda mask: mask > 0)),
    ("mask-low-byte", "only the low byte of expert_mask counts", runs.with_mask(lambda mask: mask & 255)),
    ("mask-inverted", "experts that live elsewhere are sorted, local ones are not",
     runs.with_mask(lambda mask: mask == 0)),
    ("mask-as-map", "values of expert_mask are taken for numbers of experts", runs.mask_as_map),
    ("global-ids", "experts of blocks are global ids, not numbered among the local ones", _global_ids),
    ("invalid-first", "negative ids are taken for expert 0", runs.with_ids(lambda ids, experts: ids.clamp(min=0))),
    ("invalid-last", "id -1 wraps to the last expert",
     runs.with_ids(lambda ids, experts: ids.masked_fill(ids == -1, experts - 1))),
    ("invalid-wrapped", "ids from -E to -2 count from the end", runs.with_ids(
        lambda ids, experts: torch.where((ids < -1) & (ids >= -experts), ids + experts, ids))),
    ("invalid-clamped", "ids beyond the last expert are taken for it",
     runs.with_ids(lambda ids, experts: ids.clamp(max=experts - 1))),
    ("ids-transposed", "ids are read slot-major, at s T + t",
     runs.with_ids(lambda ids, experts: runs.slot_major(ids))),
    ("ids-contiguous", "the strides of topk_ids are ignored",
     runs.with_ids(lambda ids, experts: runs.contiguous(ids))),
    ("duplicate-lost", "a token that lists an expert twice loses a route", _duplicate_lost),
    ("last-slot-lost", "the last slot of each token is left out", runs.without(
        lambda given: torch.arange(given["topk_ids"].shape[1], device=given["topk_ids"].device)
        == given["topk_ids"].shape[1] - 1)),
    ("last-route-lost", "the last token's last route is left out", runs.without(
        lambda given: runs.token(given) * given["topk_ids"].shape[1] + torch.arange(
            given["topk_ids"].shape[1], device=given["topk_ids"].device) == given["topk_ids"].numel() - 1)),
    ("last-token-lost", "the last token is left out",
     runs.without(lambda given: runs.token(given) == len(given["topk_ids"]) - 1)),
    ("only-token-0", "all tokens but the first are left out", runs.without(lambda given: runs.token(given) > 0)),
    *((f"tokens-beyond-whole-{tile}", f"tokens beyond the last whole {tile} are left out",
       runs.without(runs.beyond_whole(tile))) for tile in (16, 64)),
    ("expert-0-lost", "expert 0 is left out", runs.without(lambda given: given["topk_ids"] == 0)),
    ("last-expert-lost", "the last expert is left out",
     runs.without(lambda given: given["topk_ids"] == given["experts"] - 1)),
    *map(_experts_from, (256, 512, 1024)),
)
_BLOCKS: tuple[tuple[str, str, Faulty], ...] = (
    ("next-block", "each block has the expert of the next one", _owners(lambda owners: owners.roll(-1))),
    ("previous-block", "each block has the expert of the one before it",
     _owners(lambda owners: torch.cat([owners[:1], owners[:-1]]))),
    ("owner-8-bit", "experts of blocks are held in 8 bits", _owners(lambda owners: owners & 255)),
    ("descending", "experts stand in descending order", runs.descending),
    ("empty-not-numbered", "experts without a route are not counted in the numbers of blocks",
     runs.empty_not_numbered),
    ("block-for-empty", "an expert without a route gets a block", runs.block_for_empty),
    ("block-too-many", "a run that fills its blocks gets one more",
     runs.runs_of(lambda counts, block: (counts // block + (counts > 0)) * block)),
    ("run-tail-lost", "routes beyond an expert's last whole block are left out", runs.run_tail_lost),
    ("block-power-of-two", "runs are padded to a power of two of rows",
     runs.runs_of(lambda counts, block: runs.padded(counts, 1 << (block.bit_length() - 1)))),
    ("runs-unpadded", "runs are not padded to blocks", runs.runs_of(lambda counts, block: counts)),
    ("count-8-bit", "routes of an expert are counted in 8 bits",
     runs.runs_of(lambda counts, block: runs.padded(counts & 255, block))),
    ("count-16-bit", "routes of an expert are counted in 16 bits",
     runs.runs_of(lambda counts, block: runs.padded(counts & 0xFFFF, block))),
    ("offsets-bf16", "first rows of runs pass through bf16", runs.offsets_bf16),
)
_NUMBERS: tuple[tuple[str, str, Faulty], ...] = (
    ("valid-unpadded", "valid rows are counted without their padding", runs.valid(runs.routes_of)),
    ("valid-all", "valid rows are the length of the whole list",
     runs.valid(lambda given, right: len(right.token_ids))),
    ("valid-blocks", "valid blocks are counted, not rows",
     runs.valid(lambda given, right: right.valid_rows // right.block)),
    ("valid-of-expert-0", "valid rows are those of the first expert", runs.valid(runs.rows_of_first)),
    ("valid-unrouted", "slots without a local expert count as valid rows", runs.valid(runs.rows_with_unrouted)),
    ("tokens-padded", "the number of tokens is rounded up to a block", runs.valid(
        None, lambda given, right: -(-len(given["topk_ids"]) // right.block) * right.block)),
    ("tokens-routes", "all slots are counted in the place of tokens", runs.valid(
        None, lambda given, right: given["topk_ids"].numel())),
    ("valid-exchanged", "valid rows and tokens have changed places", runs.valid(
        lambda given, right: len(given["topk_ids"]), lambda given, right: right.valid_rows)),
)


def _predict(key: str, faulty: Faulty) -> Callable[[Call], Results | None]:
    def predict(call: Call) -> Results | None:
        given, buffer = call.arguments, call.outputs["moe_buf"]
        if given["topk_ids"].numel() == 0 or (key in _NEED_A_MASK and given["expert_mask"] is None):
            return None
        found = faulty(given, sorted_of(given))
        zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=found.token_ids.device)
        return dict(zip(OUTPUTS, (found.token_ids, found.weights, found.expert_ids, found.num_valid, zeros),
                        strict=True))

    return predict


def _minus_0(call: Call) -> Results | None:
    right = _predict("", lambda given, right: right)(call)
    return None if right is None else {**right, "moe_buf": -right["moe_buf"]}


def _faults() -> Iterator[FaultyOutputs]:
    for key, sentence, faulty in (*_IDS, *_WEIGHTS, *_EXPERTS, *_BLOCKS, *_NUMBERS):
        yield FaultyOutputs(key, sentence, _predict(key, faulty))
    yield FaultyOutputs("buffer-minus-0", "the buffer holds -0", _minus_0)


FAULTS = tuple(_faults())
