"""Whether a sort's result is right: exact where the contract is, as a bag inside an expert's run."""

from __future__ import annotations

import torch
from torch import Tensor

from references.moe_gemm_2stage.sorting import Sorted, sentinel, unpack


def faults(actual: Sorted, expected: Sorted, topk_weights: Tensor, stable: bool = False) -> list[str]:
    """What is wrong with ``actual``, one sentence each; empty when nothing is.

    expected: the reference's ``sort`` of the same routes. topk_weights fp32 [T, k]. ``stable``: the kernel promises
    the reference's order. Padding weights, and expert ids past the valid blocks, are not looked at.
    """
    tokens, topk = topk_weights.shape
    found: list[str] = []
    for name in ("token_ids", "weights", "expert_ids", "num_valid"):
        one, two = getattr(actual, name), getattr(expected, name)
        if one.dtype != two.dtype or one.shape != two.shape:
            found.append(f"{name} is {one.dtype} {tuple(one.shape)}: {two.dtype} {tuple(two.shape)} is required")
    if found:
        return found
    if actual.num_valid.tolist() != expected.num_valid.tolist():
        return [f"num_valid is {actual.num_valid.tolist()}: {expected.num_valid.tolist()} is required"]
    rows, pad = expected.valid_rows, sentinel(tokens, topk)
    blocks = rows // expected.block
    wrong = (actual.expert_ids[:blocks] != expected.expert_ids[:blocks]).nonzero().flatten().tolist()
    if wrong:
        found.append(f"expert of {len(wrong)} of {blocks} blocks is wrong, first of block {wrong[0]}: "
                     f"{int(actual.expert_ids[wrong[0]])} instead of {int(expected.expert_ids[wrong[0]])}")
    found += _wrong_ids(actual, expected, stable)
    stray = (actual.token_ids[rows:] != pad).nonzero().flatten().tolist()
    if stray:
        found.append(f"{len(stray)} ids past the valid rows are not the sentinel, first at {rows + stray[0]}")
    found += _wrong_weights(actual, topk_weights, rows)
    return found


def buffer_faults(buffer: Tensor) -> list[str]:
    """moe_buf [T, H], which the sort zeroes because stage 2 adds to it: every byte must be 0."""
    raw = buffer.contiguous().view(torch.uint8).view(*buffer.shape[:-1], -1)
    rows = raw.any(dim=-1).nonzero().flatten().tolist()
    return [f"{len(rows)} rows of the output buffer are not zero, first row {rows[0]}"] if rows else []


def _wrong_ids(actual: Sorted, expected: Sorted, stable: bool) -> list[str]:
    """Ids of each expert's run: as they stand, or as a bag (the padding of the run included)."""
    rows, block = expected.valid_rows, expected.block
    one, two = actual.token_ids[:rows], expected.token_ids[:rows]
    if not stable:
        run = expected.expert_ids[: rows // block].repeat_interleave(block).long() << 32
        one, two = ((run + ids.long()).sort().values for ids in (one, two))
    wrong = (one != two).nonzero().flatten().tolist()
    if not wrong:
        return []
    expert = int(expected.expert_ids[wrong[0] // block])
    how = "at its place" if stable else "in the run of its expert"
    return [f"{len(wrong)} ids do not stand {how}, first in the run of local expert {expert}"]


def _wrong_weights(actual: Sorted, topk_weights: Tensor, rows: int) -> list[str]:
    """The weight beside each id must be that route's, bit by bit. Ids that are no route were reported before."""
    tokens, topk = topk_weights.shape
    token, slot = unpack(actual.token_ids[:rows])
    row = ((token < tokens) & (slot >= 0) & (slot < topk)).nonzero().flatten()
    right = topk_weights[token[row].long(), slot[row].long()]
    wrong = row[right.view(torch.int32) != actual.weights[row].view(torch.int32)].tolist()
    if not wrong:
        return []
    return [f"{len(wrong)} weights do not belong to the id beside them, first at {wrong[0]}"]
