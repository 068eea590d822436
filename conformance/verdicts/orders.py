"""Right results in another order: for outputs in which the contract leaves an order open."""

from __future__ import annotations

import torch
from torch import Tensor


def in_order_of(found: Tensor, golden: Tensor, groups: Tensor) -> Tensor:
    """int64 [n], a permutation: which entry of ``golden`` belongs where ``found`` stands, when entries may change
    places within their group.

    found, golden: int32 [n]; groups int64 [n], ascending, 0 <= group < 2^31. What stands where the golden has it stays;
    another entry found in the right group gets an equal one of the golden; to the others go what is left of their
    group, in the golden's order. So where ``found`` is the golden in another order, golden[permutation] equals it, and
    else differs from it in as few places as can be.
    """
    permutation = torch.arange(len(found), device=found.device)
    moved = (found != golden).nonzero().flatten()
    if len(moved):
        permutation[moved] = moved[_matched(*(_keys(values[moved], groups[moved]) for values in (found, golden)))]
    return permutation


def _keys(values: Tensor, groups: Tensor) -> Tensor:
    return groups << 32 | (values.to(torch.int64) & 0xFFFFFFFF)


def _matched(found: Tensor, golden: Tensor) -> Tensor:
    """int64 [n], a permutation: the equal entry of ``golden`` for each one found, the n-th among equals for the n-th;
    to those without an equal one go what is left, in order."""
    (ours, our_order), (theirs, their_order) = (keys.sort(stable=True) for keys in (found, golden))
    count = torch.arange(len(ours), device=ours.device)
    equal_before = count - torch.searchsorted(ours, ours)
    place = torch.searchsorted(theirs, ours) + equal_before
    there = place.clamp(max=len(theirs) - 1)
    equal = (place == there) & (theirs[there] == ours)
    permutation, left = torch.full_like(count, -1), torch.ones_like(equal)
    permutation[our_order[equal]] = their_order[place[equal]]
    left[their_order[place[equal]]] = False
    permutation[permutation < 0] = left.nonzero().flatten()
    return permutation
