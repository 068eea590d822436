"""Faulty semantics of a sort, from public bug reports: what a kernel with each of them returns, to explain failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conformance.operator import Arguments, Call, FaultyOutputs, Results
from references.moe_gemm_2stage.sorting import TOKEN_BITS, Sorted, pack, sentinel, sort, unpack
from references.moe_sorting.contract import OUTPUTS


def _sorted(given: Arguments, **change: Tensor | None) -> Sorted:
    """The sort of a call with other ids, weights or mask; nothing is refused."""
    given = {**given, **change}
    return sort(given["topk_ids"], given["topk_weights"], given["experts"], given["block"], given["expert_mask"],
                "skip", "keep")


def _padding(value: Callable[[int, int], int]) -> Callable[[Arguments, Sorted], Sorted]:
    """Other padding ids, given T and k."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        shape = given["topk_ids"].shape
        padding = right.token_ids == sentinel(*shape)
        return replace(right, token_ids=right.token_ids.masked_fill(padding, value(*shape)))

    return change


def _ids(packed: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Arguments, Sorted], Sorted]:
    """Routes packed in another way, padding as it is."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        padding = right.token_ids == sentinel(*given["topk_ids"].shape)
        return replace(right, token_ids=torch.where(padding, right.token_ids, packed(*unpack(right.token_ids))))

    return change


def _weights(token: Callable[[Tensor, int], Tensor], slot: Callable[[Tensor, int], Tensor]
             ) -> Callable[[Arguments, Sorted], Sorted]:
    """Weights of other places, given token and T, slot and k."""

    def change(given: Arguments, right: Sorted) -> Sorted:
        tokens, topk = given["topk_ids"].shape
        padding = right.token_ids == sentinel(tokens, topk)
        of_token, of_slot = (part.masked_fill(padding, 0).long() for part in unpack(right.token_ids))
        found = given["topk_weights"][token(of_token, tokens), slot(of_slot, topk)]
        return replace(right, weights=torch.where(padding, right.weights, found))

    return change


def _invalid_as(expert: Callable[[int], int]) -> Callable[[Arguments, Sorted], Sorted]:
    return lambda given, right: _sorted(given, topk_ids=given["topk_ids"].masked_fill(
        given["topk_ids"] == -1, expert(given["experts"])))


def _global_ids(given: Arguments, right: Sorted) -> Sorted:
    local = (given["expert_mask"] != 0).nonzero().flatten()
    blocks = right.valid_rows // right.block
    owners = right.expert_ids.clone()
    owners[:blocks] = local[owners[:blocks].long()].to(torch.int32)
    return replace(right, expert_ids=owners)


def _duplicate_lost(given: Arguments, right: Sorted) -> Sorted:
    ids = given["topk_ids"]
    before = torch.tril(ids[:, :, None] == ids[:, None, :], diagonal=-1).any(dim=2)
    return _sorted(given, topk_ids=ids.masked_fill(before, -1))


def _last_slot_lost(given: Arguments, right: Sorted) -> Sorted:
    ids = given["topk_ids"].clone()
    ids[:, -1] = -1
    return _sorted(given, topk_ids=ids)


def _next_block(given: Arguments, right: Sorted) -> Sorted:
    return replace(right, expert_ids=right.expert_ids.roll(-1))


def _count(given: Arguments, right: Sorted, rows: int) -> Sorted:
    return replace(right, num_valid=torch.stack([right.num_valid.new_tensor(rows), right.num_valid[1]]))


def _routes(given: Arguments, right: Sorted) -> int:
    return int((right.token_ids != sentinel(*given["topk_ids"].shape)).sum())


def _tail_of_zeros(given: Arguments, right: Sorted) -> Sorted:
    ids = right.token_ids.clone()
    ids[right.valid_rows :] = 0
    return replace(right, token_ids=ids)


_MASKED = ("masked-kept", "mask-is-1", "global-ids")  # need a mask
_TABLE: tuple[tuple[str, str, Callable[[Arguments, Sorted], Sorted]], ...] = (
    ("sentinel-token-0", "padding ids are 0, the first token's route", _padding(lambda tokens, topk: 0)),
    ("sentinel-no-slot", "padding ids are T without the slot's bits", _padding(lambda tokens, topk: tokens)),
    ("sentinel-minus-1", "padding ids are -1", _padding(lambda tokens, topk: -1)),
    ("sentinel-last-route", "padding ids are the last token's last route",
     _padding(lambda tokens, topk: sentinel(tokens - 1, topk - 1))),
    ("tail-zeros", "ids past the valid rows are 0", _tail_of_zeros),
    ("slot-lost", "the slot is missing in the ids", _ids(lambda token, slot: token)),
    ("slot-from-1", "slots are counted from 1", _ids(lambda token, slot: pack(token, slot + 1))),
    ("slot-bits-16", "the slot stands in bits 16 to 23 of the ids", _ids(lambda token, slot: slot << 16 | token)),
    ("exchanged", "token and slot have changed places in the ids",
     _ids(lambda token, slot: token << TOKEN_BITS | slot)),
    ("weight-next-slot", "weights are those of the next slot",
     _weights(lambda token, tokens: token, lambda slot, topk: (slot + 1) % topk)),
    ("weight-token-0", "weights are those of token 0: the token's offset is left out",
     _weights(lambda token, tokens: token * 0, lambda slot, topk: slot)),
    ("weight-next-token", "weights are those of the next token",
     _weights(lambda token, tokens: (token + 1) % tokens, lambda slot, topk: slot)),
    ("masked-kept", "experts that live elsewhere keep their routes", lambda given, right: _sorted(
        given, expert_mask=None)),
    ("mask-is-1", "only 1 counts as true in expert_mask", lambda given, right: _sorted(
        given, expert_mask=(given["expert_mask"] == 1).to(torch.int32))),
    ("global-ids", "experts of blocks are global ids, not numbered among the local ones", _global_ids),
    ("invalid-first", "id -1 is taken for expert 0", _invalid_as(lambda experts: 0)),
    ("invalid-last", "id -1 wraps to the last expert", _invalid_as(lambda experts: experts - 1)),
    ("duplicate-lost", "a token that lists an expert twice loses a route", _duplicate_lost),
    ("last-slot-lost", "the last slot of each token is left out", _last_slot_lost),
    ("next-block", "each block has the expert of the next one", _next_block),
    ("valid-unpadded", "valid rows are counted without their padding",
     lambda given, right: _count(given, right, _routes(given, right))),
    ("valid-all", "valid rows are the length of the whole list",
     lambda given, right: _count(given, right, len(right.token_ids))),
    ("valid-blocks", "valid blocks are counted, not rows",
     lambda given, right: _count(given, right, right.valid_rows // right.block)),
)


def _predict(key: str, faulty: Callable[[Arguments, Sorted], Sorted]) -> Callable[[Call], Results | None]:
    def predict(call: Call) -> Results | None:
        given, buffer = call.arguments, call.outputs["moe_buf"]
        if given["topk_ids"].numel() == 0 or (key in _MASKED and given["expert_mask"] is None):
            return None
        found = faulty(given, _sorted(given))
        zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=found.token_ids.device)
        return dict(zip(OUTPUTS, (found.token_ids, found.weights, found.expert_ids, found.num_valid, zeros),
                        strict=True))

    return predict


def _faults() -> Iterator[FaultyOutputs]:
    for key, sentence, faulty in _TABLE:
        yield FaultyOutputs(key, sentence, _predict(key, faulty))


FAULTS = tuple(_faults())
