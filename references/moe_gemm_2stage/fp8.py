"""e4m3 in its two encodings, from bits: OCP (e4m3fn) and FNUZ (e4m3fnuz). No torch float8 dtype is used to compute.

The same byte means twice as much in OCP as in FNUZ (bias 7, bias 8), but for 0x80 (-0 in OCP, NaN in FNUZ) and 0x7F
and 0xFF (NaN in OCP, +-240 in FNUZ). Sources: OCP 8-bit floating point specification 1.0; Noune et al., 8-bit
numerical formats for deep neural networks, 2022 (FNUZ).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

OVERFLOW = ("saturate", "nan")
_MANTISSA = 3
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 26}  # elements


@dataclass(frozen=True)
class Fp8:
    """``largest``: code of the largest finite magnitude. ``nan``: code that NaN is written as. ``signed_zero``:
    whether 0x80 is -0 (else it is NaN)."""

    name: str
    bias: int
    largest: int
    nan: int
    signed_zero: bool
    dtype: torch.dtype

    @property
    def maximum(self) -> float:
        return float(decode(torch.tensor([self.largest], dtype=torch.uint8), self))


OCP = Fp8("ocp", 7, 0x7E, 0x7F, True, torch.float8_e4m3fn)
FNUZ = Fp8("fnuz", 8, 0x7F, 0x80, False, torch.float8_e4m3fnuz)
FORMS = {form.name: form for form in (OCP, FNUZ)}


def decode(codes: Tensor, form: Fp8) -> Tensor:
    """fp32 values of uint8 codes. Exact for every code."""
    table = _table(form, codes.device)
    return _by_pieces(lambda piece: table[piece.long()], codes, torch.float32)


@functools.cache
def _table(form: Fp8, device: torch.device) -> Tensor:
    """The value of each of the 256 codes."""
    wide = torch.arange(256, dtype=torch.int32, device=device)
    exponent, mantissa = (wide >> _MANTISSA) & 15, wide & 7
    steps = torch.where(exponent == 0, mantissa, mantissa + 8)
    value = torch.ldexp(steps.float(), exponent.clamp(min=1) - form.bias - _MANTISSA)
    value = torch.where(wide >= 0x80, -value, value)
    is_nan = (wide & 0x7F) == 0x7F if form.signed_zero else wide == 0x80
    return value.masked_fill(is_nan, float("nan"))


def _by_pieces(step: Callable[[Tensor], Tensor], value: Tensor, dtype: torch.dtype) -> Tensor:
    """``step``, which is elementwise, of some elements at a time: its temporaries then stay in the processor's cache,
    and cost nothing to allocate."""
    out = torch.empty(value.shape, dtype=dtype, device=value.device)
    flat, result = value.reshape(-1), out.view(-1)
    size = _PIECE[value.device.type]
    for start in range(0, flat.numel(), size):
        result[start:start + size] = step(flat[start:start + size])
    return out


def encode(value: Tensor, form: Fp8, overflow: str = "saturate") -> Tensor:
    """uint8 codes nearest to fp32 values, ties to even; NaN gives NaN.

    What would round beyond the largest value, infinity too, saturates or becomes NaN (``overflow``). In FNUZ a
    negative value that rounds to zero is +0. Raises ValueError for an unknown policy.
    """
    if overflow not in OVERFLOW:
        raise ValueError(f"overflow is {overflow!r}: one of {', '.join(OVERFLOW)} is required")
    return _by_pieces(lambda piece: _encoded(piece, form, overflow), value, torch.uint8)


def _encoded(value: Tensor, form: Fp8, overflow: str) -> Tensor:
    magnitude = value.double().abs()
    is_nan = magnitude.isnan()
    magnitude = magnitude.nan_to_num(nan=0.0, posinf=2.0**20).clamp(max=2.0**20)
    lowest = 1 - form.bias
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=lowest)
    exponent = torch.where(magnitude == 0, lowest, exponent)
    steps = torch.round(torch.ldexp(magnitude, _MANTISSA - exponent))  # half to even
    code = ((exponent - lowest) << _MANTISSA) + steps.to(torch.int32)
    beyond = code > form.largest
    code = torch.where(beyond, form.largest, code)
    negative = torch.signbit(value)
    if not form.signed_zero:
        negative = negative & (code != 0)
    code = torch.where(negative, code | 0x80, code)
    is_nan = is_nan | beyond if overflow == "nan" else is_nan
    return code.masked_fill(is_nan, form.nan).to(torch.uint8)


def ocp_to_fnuz(codes: Tensor) -> Tensor:
    """OCP codes as FNUZ ones that mean half as much, exactly: the scale beside them must be doubled.

    Bytes stay as they are but for -0, which would read as NaN, and NaN, which would read as +-240.
    """
    wide = codes.to(torch.int32)
    moved = torch.where(wide == 0x80, 0, wide)
    return torch.where((wide & 0x7F) == 0x7F, FNUZ.nan, moved).to(torch.uint8)
