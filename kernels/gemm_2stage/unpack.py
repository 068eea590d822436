"""Stored weights of two-stage MoE as fp32 numbers, in PyTorch: what the plain kernels multiply with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32  # elements of K that share a scale in int4_bf16_g32


def weight_matrix(stored: Tensor) -> Tensor:
    """fp32 [N, K] of one expert's weights: [N, K] preshuffled, or uint8 [N, K/2] of packed int4.

    Preshuffled means [N/16, K/V, 16, V] in memory, V being the elements of 16 bytes. int4 is packed after that, eight
    neighbours v0..v7 in four bytes, v0..v3 in the low nibbles.
    """
    import torch

    if stored.dtype == torch.uint8:
        rows, half = stored.shape
        groups = stored.reshape(-1, 4).to(torch.int32)
        both = torch.cat([groups & 15, groups >> 4], dim=1)
        stored = torch.where(both > 7, both - 16, both).to(torch.int8).reshape(rows, half * 2)
    rows, columns = stored.shape
    width = 16 // stored.element_size()
    tiles = stored.reshape(rows // 16, columns // width, 16, width).transpose(1, 2)
    return tiles.reshape(rows, columns).float()


def product(left: Tensor, right: Tensor, exact: bool, group_scale: Tensor | None = None) -> Tensor:
    """fp32 [M, N] = left [M, K] x right [N, K]. ``exact``: integers whose sums must not be rounded on the way.
    ``group_scale`` fp32 [K/32, N]: scales that are applied to the sums of 32 elements."""
    if exact:
        return (left.double() @ right.double().T).float()
    if group_scale is None:
        return left.float() @ right.T
    total = left.new_zeros((len(left), len(right)), dtype=right.dtype)
    for number, scale in enumerate(group_scale):
        part = slice(number * GROUP, (number + 1) * GROUP)
        total += (left[:, part].float() @ right[:, part].T) * scale
    return total
