"""The right outputs of moe_sorting, what they leave open, and any order within an expert's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from conformance.operator import Call, Reference, References, Results, Shared
from conformance.verdicts.orders import in_order_of
from references.moe_gemm_2stage.sorting import Sorted, sentinel, sort
from references.moe_sorting.contract import policies_of


def golden(call: Call) -> Sorted:
    """The sort in the documented order: experts ascending, within an expert by token."""
    given = call.arguments
    return sort(given["topk_ids"], given["topk_weights"], given["experts"], given["block"], given["expert_mask"],
                *policies_of(given))


def reference(call: Call, shared: Shared) -> References:
    """Every bit of every output, but for weights of padding and experts of blocks past the valid ones."""
    found, buffer = golden(call), call.outputs["moe_buf"]
    tokens, topk = call.arguments["topk_ids"].shape
    block = torch.arange(len(found.expert_ids), device=found.expert_ids.device)
    right = {
        "sorted_token_ids": Reference(found.token_ids),
        "sorted_weights": Reference(found.weights, open=found.token_ids == sentinel(tokens, topk)),
        "sorted_expert_ids": Reference(found.expert_ids, open=block * found.block >= found.valid_rows),
        "num_valid_ids": Reference(found.num_valid),
        "moe_buf": Reference(torch.zeros(buffer.shape, dtype=buffer.dtype, device=found.token_ids.device)),
    }
    return References(right, lambda results: _settled(results, right, found))


def _settled(results: Results, right: Mapping[str, Reference], found: Sorted) -> dict[str, Reference]:
    """Ids, each with its weight, in the order of the results within every expert's run; the padding of a run is part of
    it, and what stands behind the last one is a run of its own."""
    row = torch.arange(len(found.token_ids), device=found.token_ids.device)
    run = found.expert_ids.long()[row // found.block].masked_fill_(row >= found.valid_rows, len(row))
    order = in_order_of(results["sorted_token_ids"], found.token_ids, run)
    moved = {}
    for name in ("sorted_token_ids", "sorted_weights"):
        one = right[name]
        moved[name] = replace(one, golden=one.golden[order], open=None if one.open is None else one.open[order])
    return {**right, **moved}
