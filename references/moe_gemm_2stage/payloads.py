"""Numbers that the data of two-stage MoE is made of, fp32 and the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.data.generate import fill_rows, integers, uniform
from references.moe_gemm_2stage.mx import BLOCK


def numbers(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: multiples of 1/16 in [-8.5, 8.5]."""
    coarse = fill_rows(torch.empty((rows, width), device=device), "exact", seed)
    fine = fill_rows(torch.empty((rows, width), device=device), "exact", seed + 50021)
    return coarse.add_(fine.mul_(1 / 16))


def decades(count: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [count, 1]: between 2^-8 and 2, evenly over the exponents; the first and the last are among the larger."""
    exponent = integers((count,), -8, 1, seed, device)
    exponent[:1] = exponent[-1:] = -1
    return torch.ldexp(1.0 + uniform((count,), seed + 1, device), exponent)[:, None]


def coded(rows: int, width: int, first: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: integers from -3 to 3 that tell rows and columns apart, with any row numbered ``first``."""
    row = torch.arange(first, first + rows, device=device)[:, None]
    column = torch.arange(width, device=device)[None, :]
    return (((row * row * 5 + row * 3 + column * (2 + row % 5) + column // 16) % 7) - 3).float()


def blocks(rows: int, width: int, most: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: a power of two for each block of 32, 2^(most - 3) to 2^most: neighbours mostly differ."""
    exponent = integers((rows, width // BLOCK), most - 3, most + 1, seed, device)
    return torch.exp2(exponent.float()).repeat_interleave(BLOCK, dim=-1)


def positive(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """fp32 [rows, width]: 1/4 to 1.3, twice that in odd rows: numbers that no block rounds to 0, and of which sums are
    so near to each other that neither does a block of what stage 1 makes of them."""
    odd = torch.arange(rows, device=device)[:, None] % 2
    return (numbers(rows, width, seed, device).abs() + 2.0) * torch.where(odd == 1, 0.25, 0.125)
