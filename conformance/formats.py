"""Number formats: names, precision and range, ULPs in fp64, and casts whose policy is explicit.

Sources: IEEE 754 (fp16, fp32), bfloat16 as the upper half of fp32, OCP 8-bit floating point (e4m3fn).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. ``precision`` counts the hidden bit; ``minimum_exponent`` is that of the
    smallest normal number 2**minimum_exponent; ``published`` is the tolerance (atol = rtol) that the field quotes."""

    name: str
    dtype: torch.dtype
    precision: int
    minimum_exponent: int
    maximum: float
    published: float

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.precision

    def half_ulp(self, magnitude: Tensor) -> Tensor:
        """Half the spacing of this format at ``magnitude`` (fp64, >= 0), also below the normal range."""
        normal = magnitude.clamp(min=2.0**self.minimum_exponent)  # frexp calls the exponent of zero 0
        exponent = torch.frexp(normal).exponent.to(torch.float64) - 1
        return torch.exp2(exponent.sub_(self.precision))


FORMATS = {
    "fp32": Format("fp32", torch.float32, 24, -126, 3.4028234663852886e38, 1e-3),
    "fp16": Format("fp16", torch.float16, 11, -14, 65504.0, 1e-3),
    "bf16": Format("bf16", torch.bfloat16, 8, -126, 3.3895313892515355e38, 1.6e-2),
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 4, -6, 448.0, 0.1),
}
BY_DTYPE = {form.dtype: form for form in FORMATS.values()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of a dtype, None for integers and formats that no operator here uses."""
    return BY_DTYPE.get(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers of the same width: comparisons on it are bitwise."""
    return tensor.view(_BITS[tensor.element_size()])


def differs(one: Tensor, two: Tensor) -> Tensor:
    """bool [], on the device, which is not waited for: whether two tensors of one shape and dtype differ in a bit."""
    if one.is_cuda:
        return (bits(one) != bits(two)).any()
    return torch.tensor(not torch.equal(bits(one), bits(two)))  # ends at the first difference


def ulps_apart(one: Tensor, two: Tensor) -> Tensor:
    """int64: how many steps of their format lie between numbers of one floating-point dtype. Zeros of both signs are
    one number; NaN has no place among them."""
    return (_ordinal(one) - _ordinal(two)).abs()


def _ordinal(value: Tensor) -> Tensor:
    raw, half = bits(value).long(), 1 << (8 * value.element_size() - 1)
    size = raw & (half - 1)
    return torch.where(raw & half != 0, -size, size)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to ``dtype``, round to nearest even. e4m3 saturates at +-448 (infinities too), NaN stays NaN.

    The clamp is explicit because torch's own e4m3 cast gave NaN on overflow up to 2.11 and saturates since.
    """
    if dtype == torch.float8_e4m3fn:
        value = value.clamp(-448.0, 448.0)  # clamp keeps NaN
    return value.to(dtype)
