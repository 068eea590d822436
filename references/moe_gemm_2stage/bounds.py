"""Numbers with the error that correct arithmetic may make, element by element, in fp64.

First-order terms are exact; where a step is not linear its second order is added, so that each bound holds and is no
estimate, but for one: sums. A sum of n terms of S = sum |terms| is allowed min(lambda sqrt(n), n) u S, which random
rounding errors exceed with a probability of at most 2 n exp(-lambda^2 / 2) (Higham and Mary, A new approach to
probabilistic rounding error analysis, 2019). lambda is 6 here: below 1e-3 for any n that occurs, and far less for
data of both signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.formats import BY_DTYPE, Format
from conformance.operator import MINUS_INFINITY, NOT_A_NUMBER, PLUS_INFINITY
from references.moe_gemm_2stage.rounding import OUTPUTS

LAMBDA = 6.0
U = 2.0**-24  # unit roundoff of fp32
# Of an fp32 quotient, however it is spelled: a / b; a (1 / b) with a reciprocal that is off by an ULP (2 U), and U for
# the product; or the fast division of GPUs, which is off by 2 ULPs (CUDA C++ programming guide, __fdividef).
DIVISION = 4 * U
_TINY = 2.0**-149
_EXACT_INTEGERS = 2.0**24


@dataclass(frozen=True)
class Arithmetic:
    """How sums are computed. unit: roundoff of the accumulator (fp32 unless an instruction sums in less). integer:
    the accumulator is int32. bf16_weights: weights times their scales may be rounded to bf16 before the product, or
    not."""

    unit: float = U
    integer: bool = False
    bf16_weights: bool = False


@dataclass(frozen=True)
class Bounded:
    """fp64 values and, of the same shape, how far a right kernel's fp32 number may be from each."""

    value: Tensor
    error: Tensor

    def times(self, factor: Tensor) -> Bounded:
        """By an exact fp32 factor (broadcastable), rounded once."""
        value = self.value * factor.double()
        error = self.error * factor.double().abs()
        return Bounded(value, error + U * (value.abs() + error) + _TINY)

    def by(self, other: Bounded) -> Bounded:
        """By another bounded number, rounded once."""
        value = self.value * other.value
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Bounded(value, error + U * (value.abs() + error) + _TINY)

    def through(self, step: Callable[[Tensor], Tensor]) -> Bounded:
        """Through a monotone function of fp32 numbers, such as a cast: where both ends of an element's interval meet
        in one number, no error is left."""
        centre, low, high = (
            step(end.float()).double() for end in (self.value, self.value - self.error, self.value + self.error))
        error = torch.maximum((high - centre).abs(), (centre - low).abs())
        return Bounded(centre, error.nan_to_num(nan=math.inf, posinf=math.inf))


@dataclass(frozen=True)
class Combined(Bounded):
    """Sums of slots: what each is when none of its steps overflows, and in ``also`` (uint8, see
    `conformance.operator.OracleRows`) what it is besides where one may."""

    also: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, error: Tensor, plus: Tensor, minus: Tensor) -> Combined:
        """``plus``, ``minus``: where some order or width of the sum meets that infinity; NaN comes of both."""
        also = plus * PLUS_INFINITY + minus * MINUS_INFINITY + (plus & minus) * NOT_A_NUMBER
        return cls(value, error, also.to(torch.uint8) if bool(also.any()) else None)


def dot_error(total: Tensor, size: Tensor, terms: int, arithmetic: Arithmetic, grouped: bool = False) -> Tensor:
    """Error of a sum of ``terms`` products whose exact value is at most ``total`` and whose magnitudes sum to ``size``.

    Products of two 16-bit or narrower floats are exact in fp32. ``grouped``: group scales cost one rounding more.
    An int32 sum is exact, and so is its conversion to fp32 up to 2^24.
    """
    if arithmetic.integer:
        return torch.where(total.abs() > _EXACT_INTEGERS, U * total.abs(), 0.0)
    roundings = min(LAMBDA * math.sqrt(terms), float(terms)) + grouped
    return roundings * arithmetic.unit * size + terms * _TINY


def silu(x: Bounded) -> Bounded:
    """x / (1 + exp(-x)), as kernels compute it: a fast exponential, a reciprocal and a product.

    The argument's error acts through the derivative s (1 + x (1 - s)), s = sigmoid(x), and at most half of the
    largest second derivative, 1/2. Fast exponentials are off by 2 + 1.16 |x| ULPs (CUDA's __expf; hardware's exp2 of
    an argument that was rounded is better), which moves the result by that times 1 - s; all else is 8 u. Below -80 the
    exponential may overflow and the result be 0.
    """
    s = torch.sigmoid(x.value)
    rest = torch.sigmoid(-x.value)  # 1 - s, also where s is near 1
    value = x.value * s
    slope = s * (1 + x.value * rest)
    error = slope.abs() * x.error + 0.25 * x.error**2
    error = error + (8 + (4 + 2.32 * x.value.abs()) * rest) * U * value.abs() + _TINY
    return Bounded(value, error + torch.where(x.value < -80, value.abs(), 0.0))


def format_of(out: str) -> Format:
    """The number format of an output name. Raises KeyError for an unknown one."""
    return BY_DTYPE[OUTPUTS[out]]


def overflows(form: Format) -> float:
    """The least magnitude that is rounded to infinity: halfway from the largest number to the next power of two."""
    return form.maximum * (1.0 + 0.5 / (2.0**form.precision - 1))


def rounded(x: Bounded, out: str) -> Tensor:
    """fp64: the error of ``x`` after one rounding to an output format, by either rule of ties."""
    return x.error + format_of(out).half_ulp(x.value.abs() + x.error)
