"""sort_torch: one stable sort of all slots by expert. Plain PyTorch, any strides, waits for no device.

Slots without a local expert sort behind all others and are written to a place of their own behind the list, so that
no shape depends on the routes and the whole can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.route import Route

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """The one path, wherever PyTorch runs; nothing is compiled."""
    return Route("sort_torch")


@kernel("moe_sorting", promise="bit-exact", about="PyTorch, one stable sort by expert", strided=True, route=route,
        role="pytorch")
def sort_torch(
    topk_ids: Tensor, topk_weights: Tensor, *, expert_mask: Tensor | None = None, experts: int, block: int, hidden: int,
    buffer_dtype: torch.dtype, invalid: str | None = None, duplicates: str | None = None,
    sorted_token_ids: Tensor, sorted_weights: Tensor, sorted_expert_ids: Tensor, num_valid_ids: Tensor, moe_buf: Tensor,
) -> None:
    """Fill the five outputs; arguments follow the operator's contract. Invalid ids have no route, duplicates two."""
    import torch

    report_path("sort_torch")
    (tokens, topk), device = topk_ids.shape, topk_ids.device
    local = _local(topk_ids, expert_mask, experts).flatten()
    expert, slot_of = torch.sort(local, stable=True)  # flat slots by expert, those of no local expert at the end
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).index_add_(0, local, torch.ones_like(local))
    counts[-1:].zero_()  # a number that is assigned to an element is copied from the host, which no graph takes
    before, padded = counts.cumsum(0) - counts, (counts + block - 1) // block * block
    ends = padded.cumsum(0)
    nowhere = len(sorted_token_ids)
    row = (ends - padded - before)[expert] + torch.arange(tokens * topk, device=device)
    row = torch.where(expert == experts, nowhere, row)

    ids = torch.full((nowhere + 1,), topk << 24 | tokens, dtype=torch.int32, device=device)
    ids[row] = ((slot_of % topk) << 24 | slot_of // topk).to(torch.int32)
    weights = torch.zeros(nowhere + 1, dtype=torch.float32, device=device)
    weights[row] = topk_weights.flatten()[slot_of]
    sorted_token_ids.copy_(ids[:nowhere])
    sorted_weights.copy_(weights[:nowhere])
    first_row = torch.arange(len(sorted_expert_ids), device=device) * block
    owner = torch.searchsorted(ends[:experts], first_row, right=True)
    sorted_expert_ids.copy_(torch.where(owner == experts, -1, owner))
    num_valid_ids[:1].copy_(ends[experts:])
    num_valid_ids[1:].fill_(tokens)
    moe_buf.zero_()


def _local(ids: Tensor, expert_mask: Tensor | None, experts: int) -> Tensor:
    """int64 [T, k]: the number of each slot's expert among the local ones, ``experts`` where it has none."""
    import torch

    nearest = ids.clamp(0, experts - 1).long()  # never used as a result, only as an index that exists
    none = nearest != ids
    if expert_mask is None:
        return nearest.masked_fill(none, experts)
    here = expert_mask != 0
    numbers = torch.where(here, here.cumsum(0) - 1, experts)
    return numbers[nearest].masked_fill(none, experts)
