"""OCP microscaling: e2m1 and e8m0 from bits, and blocks of 32 elements that share one power-of-two scale.

Source: OCP Microscaling Formats (MX) specification 1.0. The rule that turns a block's largest magnitude into a scale
is policy: "floor" is the specification's; "up" never saturates; "even" is how aiter quantises to fp4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8

BLOCK = 32
RULES = ("floor", "even", "up")
E8M0_NAN, _BIAS = 255, 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Element:
    """Format of a block's elements. ``exponent``: of the largest value; ``maximum``: that value; ``mantissa``: bits
    after the leading one; ``lowest``: exponent of the smallest normal value."""

    name: str
    exponent: int
    maximum: float
    mantissa: int
    lowest: int


FP4 = Element("e2m1", 2, 6.0, 1, 0)
FP8 = Element("e4m3", 8, 448.0, 3, -6)
ELEMENTS = {"mxfp4": FP4, "mxfp8": FP8}  # by the names that dtypes have for them


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of uint8 codes below 16; bit 3 is the sign."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.float32, device=codes.device)
    return values[codes.long()]


def encode_e2m1(value: Tensor) -> Tensor:
    """uint8 codes nearest to fp32 values, ties to the even code, saturating at +-6. Raises ValueError for NaN, which
    the format does not have."""
    if bool(value.isnan().any()):
        raise ValueError("e2m1 has no code for NaN: the block's scale must say so")
    magnitude = value.double().abs()
    table = torch.tensor(_E2M1, dtype=torch.float64, device=value.device)
    middle = (table[1:] + table[:-1]) / 2
    above = (magnitude[..., None] > middle).sum(dim=-1)
    tied = (magnitude[..., None] == middle).any(dim=-1)
    code = above + (tied & (above % 2 == 1))  # on a midpoint ``above`` is the lower code: odd ones step up
    return (code | torch.signbit(value).long() << 3).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """fp32 2^(code - 127) of uint8 codes, 255 is NaN. Code 0 is 2^-127, a subnormal number and not 0."""
    value = torch.ldexp(torch.ones(codes.shape, dtype=torch.float64, device=codes.device), codes.long() - _BIAS)
    return value.float().masked_fill(codes == E8M0_NAN, float("nan"))


def encode_e8m0(value: Tensor) -> Tensor:
    """uint8 codes of fp32 powers of two from 2^-127 to 2^127, NaN as 255. Raises ValueError for other numbers."""
    mantissa, exponent = torch.frexp(value.double().nan_to_num(nan=1.0))
    code = exponent.long() - 1 + _BIAS
    if bool(((mantissa != 0.5) | (code < 0) | (code >= E8M0_NAN)).any()):
        raise ValueError("e8m0 holds powers of two from 2^-127 to 2^127 only")
    return code.masked_fill(value.isnan(), E8M0_NAN).to(torch.uint8)


def scale_of(amax: Tensor, element: Element, rule: str = "floor") -> Tensor:
    """uint8 e8m0 scale of blocks whose largest magnitude is ``amax`` (fp32, >= 0); NaN and infinity give NaN.

    floor: 2^(floor(log2 amax) - exponent). up: the smallest power of two that makes amax / scale <= maximum.
    even: as floor, of amax rounded (half up) to the element's own mantissa, so that for e2m1 1.75 counts as 2.
    Clamped to [2^-127, 2^127]; amax 0 gives 2^-127. Raises ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}: one of {', '.join(RULES)} is required")
    finite = amax.double().nan_to_num(nan=1.0, posinf=1.0)
    mantissa, exponent = torch.frexp(torch.where(finite == 0, 2.0**-200, finite))  # mantissa in [0.5, 1)
    power = exponent.long() - 1 - element.exponent
    if rule == "even":
        power = power + (mantissa >= 1 - 2.0 ** -(element.mantissa + 2))
    elif rule == "up":
        power = power + (mantissa * 2 > element.maximum / 2.0**element.exponent)
    code = power.clamp(-_BIAS, _BIAS) + _BIAS
    return code.masked_fill(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def quantise(value: Tensor, element: Element = FP4, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., K] one per byte, scales uint8 [..., K/32]) of fp32 [..., K].

    A block with a NaN or an infinity has scale NaN and codes 0. Raises ValueError when K is no multiple of 32.
    """
    if value.shape[-1] % BLOCK:
        raise ValueError(f"K is {value.shape[-1]}: a multiple of {BLOCK} is required")
    blocks = value.float().unflatten(-1, (value.shape[-1] // BLOCK, BLOCK))
    scales = scale_of(blocks.abs().amax(dim=-1), element, rule)
    usable = torch.where(scales == E8M0_NAN, _BIAS, scales.long())[..., None]
    scaled = torch.ldexp(blocks.double(), _BIAS - usable)
    scaled = scaled.masked_fill((scales == E8M0_NAN)[..., None], 0.0)
    codes = encode_e2m1(scaled) if element is FP4 else fp8.encode(scaled, fp8.OCP)
    return codes.view(value.shape), scales


def dequantise(codes: Tensor, scales: Tensor, element: Element = FP4) -> Tensor:
    """fp32 [..., K] of codes [..., K] and scales [..., K/32]; exact unless the product leaves fp32's range."""
    value = decode_e2m1(codes) if element is FP4 else fp8.decode(codes, fp8.OCP)
    factor = decode_e8m0(scales).double().repeat_interleave(BLOCK, dim=-1)
    return (value.double() * factor).float()
