"""Correctly rounded arithmetic on tensors, with the same bits on every device: fused multiply-add, division."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_TIE_MASK = (1 << 29) - 1  # fp64 has 29 mantissa bits more than fp32
_TIE = 1 << 28
_SMALLEST_NORMAL = 2.0**-126


def fma(x: Tensor, scale: Tensor, acc: Tensor, out: Tensor | None = None) -> Tensor:
    """``acc + x * scale`` with one rounding to fp32, element by element.

    x, acc: fp32 of one shape; scale: fp32, broadcastable; out: where the result goes, may be acc. On CUDA
    ``torch.addcmul`` is one fused multiply-add; that is checked once per device with operands that tell the two
    apart. Elsewhere the sum is taken in fp64.
    """
    if acc.is_cuda and _addcmul_is_fused(acc.device.index or 0):
        return torch.addcmul(acc, x, scale, out=out)
    result = _fma_through_fp64(x, scale, acc)
    return result if out is None else out.copy_(result)


def divided(value: Tensor, number: float) -> Tensor:
    """``value / number``, each element rounded once. By a Python number CUDA multiplies by the reciprocal instead,
    which is another number in some of ten cases; it divides by a tensor."""
    return value / torch.full((), number, dtype=value.dtype, device=value.device)


def _fma_through_fp64(x: Tensor, scale: Tensor, acc: Tensor) -> Tensor:
    """fp64 holds the product exactly; the sum is rounded twice, which only matters when the fp64 sum lies on an
    fp32 midpoint or below the normal range. There it is first rounded to odd (Boldo and Melquiond, 2008)."""
    wide = acc.double()
    product = x.double().mul_(scale.double())
    total = product + wide
    raw = total.view(torch.int64)
    risky = ((raw & _TIE_MASK) == _TIE) | (total.abs() < _SMALLEST_NORMAL)
    if bool(risky.any()):
        p, a, t = product[risky], wide[risky], total[risky]
        b = t - p  # TwoSum (Knuth): error = exact(p + a) - t
        error = (p - (t - b)) + (a - b)
        odd = t.view(torch.int64)
        inexact = (error != 0) & torch.isfinite(error) & ((odd & 1) == 0)
        # One step of the bit pattern moves away from zero; step towards the exact sum.
        away = torch.where((error > 0) == (t > 0), 1, -1)
        total[risky] = torch.where(inexact, odd + away, odd).view(torch.float64)
    return total.float()


@functools.cache
def _addcmul_is_fused(index: int) -> bool:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 when fused and 0 when the product is rounded first."""
    value = torch.full((64,), 1.0 + 2.0**-12, device=f"cuda:{index}")
    acc = torch.full_like(value, -(1.0 + 2.0**-11))
    return bool((torch.addcmul(acc, value, value) == 2.0**-24).all())
