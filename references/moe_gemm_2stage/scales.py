"""E8M0 scales as kernels get them: a byte per 32 elements of K, shuffled.

[M, N] is padded to multiples of 256 and 8; row m, column n lies in memory at [m/32, n/8, n%4, m%16, n%8/4, m%32/16] of
[M/32, N/8, 4, 16, 2, 2] (`layouts.shuffle_scales`).

Of activations: the row is the place of the (token, slot) in the sorted list, whatever row its elements stand in:
uint8 [P, K/32] before the shuffle. Of weights: experts one after another, uint8 [E N, K/32] before the shuffle. Rows of
padding and what the shuffle pads with are unspecified. As N is a multiple of 32, each expert's scales lie together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.moe_gemm_2stage import layouts
from references.moe_gemm_2stage.mx import BLOCK

_ONE = 127  # 2^0


def shape_of(rows: int, width: int) -> tuple[int, int]:
    """Shape of the shuffled scales of ``rows`` rows of ``width`` elements."""
    return layouts.shuffled_shape(rows, width // BLOCK)


def sort(scales: Tensor, place: Tensor, entries: int) -> Tensor:
    """Shuffled scales of the rows of uint8 [T, k, K/32]. place: int32 [T, k], the row of each route in the sorted list
    of ``entries``, -1 for none."""
    held = place >= 0
    rows = torch.full((entries, scales.shape[-1]), _ONE, dtype=torch.uint8, device=scales.device)
    rows[place[held].long()] = scales[held]
    return layouts.shuffle_scales(rows)


def unsort(stored: Tensor, place: Tensor, entries: int, width: int) -> Tensor:
    """Inverse of ``sort``: uint8 [T, k, K/32] for rows of ``width`` elements, 1.0 where a slot has no place."""
    rows = layouts.unshuffle_scales(stored, entries, width // BLOCK)
    return torch.where((place >= 0)[..., None], rows[place.clamp(min=0).long()], _ONE)


def store_channels(scales: Tensor) -> Tensor:
    """Shuffled scales of weights, uint8 [E, N, K/32]."""
    return layouts.shuffle_scales(scales.flatten(0, 1))


def read_channels(stored: Tensor, experts: int, rows: int, width: int) -> Tensor:
    """Inverse of ``store_channels``: uint8 [E, N, K/32]."""
    return layouts.unshuffle_scales(stored, experts * rows, width // BLOCK).view(experts, rows, -1)


def unused_rows(place: Tensor, entries: int, width: int) -> Tensor:
    """bool, of the stored shape: scales that belong to no route."""
    free = torch.ones((entries, width // BLOCK), dtype=torch.uint8, device=place.device)
    free[place[place >= 0].long()] = 0
    return layouts.shuffle_scales(free, 1) == 1


def unused_channels(unused: Tensor, rows: int, width: int) -> Tensor:
    """bool, of the stored shape: scales of the experts that bool [E] ``unused`` masks, and padding."""
    free = unused.to(torch.uint8)[:, None, None].expand(-1, rows, width // BLOCK)
    return layouts.shuffle_scales(free.flatten(0, 1), 1) == 1
