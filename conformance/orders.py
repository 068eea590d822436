"""Right results in another order: for outputs in which the contract leaves an order open."""

from __future__ import annotations

import torch
from torch import Tensor


def in_order_of(found: Tensor, golden: Tensor, groups: Tensor) -> Tensor:
    """int64 [n], a permutation: which entry of ``golden`` belongs where ``found`` stands, when entries may change
    places within their group.

    found, golden: int32 [n]; groups int64 [n], ascending, 0 <= group < 2^31. An entry found in the right group gets an
    equal one of the golden; to the others go what is left of their group, in the golden's order. So where ``found`` is
    the golden in another order, golden[permutation] equals it, and else differs from it in as few places as can be.
    """
    keys = [groups << 32 | (values.to(torch.int64) & 0xFFFFFFFF) for values in (found, golden)]
    (ours, our_order), (theirs, their_order) = (key.sort(stable=True) for key in keys)
    count = torch.arange(len(ours), device=ours.device)
    equal_before = count - torch.searchsorted(ours, ours)
    place = torch.searchsorted(theirs, ours) + equal_before
    there = place.clamp(max=max(0, len(theirs) - 1))
    matched = (place == there) & (theirs[there] == ours)
    permutation = torch.full_like(count, -1)
    permutation[our_order[matched]] = their_order[place[matched]]
    left = torch.ones_like(matched)
    left[their_order[place[matched]]] = False
    permutation[permutation < 0] = left.nonzero().flatten()
    return permutation
