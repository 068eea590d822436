"""Shared by the engine's tests: exact rounding with fractions, small cases, and kernels that are never registered."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.case import Case
from conformance.kernel import Kernel
from conformance.operator import Call, Operator, Reference, Shared
from conformance.registry import matrix, operator

NAME = "moe_reduce_fused"
CPU = torch.device("cpu")
DTYPE_PAIRS = [(source, target) for source in ("fp32", "bf16", "fp16") for target in (source, "e4m3")]
# precision (with the hidden bit), exponent of the smallest normal, largest finite value: from the formats' standards
FORMS = {
    "fp32": (24, -126, (2 - Fraction(2) ** -23) * 2**127),
    "fp16": (11, -14, Fraction(65504)),
    "bf16": (8, -126, (2 - Fraction(2) ** -7) * 2**127),
    "e4m3": (4, -6, Fraction(448)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Many small tensors: more threads only get in one another's way. A module imports it to have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rounded(value: Fraction, form: str) -> float:
    """``value`` to the nearest number of a format, ties to even; e4m3 saturates, the others overflow to infinity."""
    precision, smallest, largest = FORMS[form]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    magnitude = round(magnitude / quantum) * quantum  # Python rounds fractions half to even
    if magnitude > largest:
        magnitude = largest if form == "e4m3" else None  # type: ignore[assignment]
    result = float("inf") if magnitude is None else float(magnitude)
    return -result if value < 0 else result


def e4m3_value(code: int) -> float:
    """The value of an e4m3fn byte by its definition: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code >> 7 else magnitude


@functools.cache
def edge_cases() -> tuple[Case, ...]:
    """Edge cases that run on the CPU, those which share data after one another."""
    of = matrix(NAME)
    return tuple(of.grouped(case for case in of.cases("edge") if not of.devices(case)))


def contract() -> Operator:
    return operator(NAME)


def sample(**params: Any) -> Case:
    """A small case of no tier: 5 tokens, 4 slots, 256 columns, a quarter of the slots padding; ``params`` replace."""
    standard = {"tokens": 5, "topk": 4, "hidden": 256, "routing": "padding", "weights": "yes", "in": "fp32",
                "out": "fp32", "xsf": "no"}
    return Case(NAME, {key: str(value) for key, value in (standard | params).items()})


def call_of(case: Case) -> tuple[Call, Reference]:
    """The call of a case, poison in place, and its reference."""
    shared = Shared()
    call = contract().inputs(case, "reduced", CPU, shared)
    call.set_poison(0)
    return call, contract().reference(call, shared)


def subject(function: Callable[..., Any], promise: str = "within-budget", **options: Any) -> Kernel:
    """A kernel that is in no registry."""
    known = inspect.signature(function).parameters
    rest = {name for name, one in known.items() if one.kind is one.VAR_KEYWORD}
    return Kernel(function.__name__, NAME, function, promise, parameters=frozenset(known) - rest,
                  takes_rest=bool(rest), **options)


def right(x: Tensor, token_topk_to_pos: Tensor, topk_weights: Tensor | None, x_sf: Tensor | None, sf: Tensor | None,
          dtype: torch.dtype) -> Tensor:
    """A right result by other means than the golden's: every term in fp64, one rounding to fp32, then the cast."""
    padding = token_topk_to_pos < 0
    if len(x) == 0:  # every slot is padding
        return torch.zeros((len(padding), x.shape[1]), dtype=dtype)
    rows = token_topk_to_pos.clamp(min=0).long()
    terms = x[rows].double()
    for factor in (topk_weights, None if x_sf is None else x_sf[rows]):
        terms = terms if factor is None else terms * factor[..., None].double()
    total = terms.masked_fill(padding[..., None], 0.0).sum(dim=1)
    total = total if sf is None else (total * sf.double()).masked_fill(padding.all(dim=1)[:, None], 0.0)
    return narrow(total.float(), dtype)


def narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to ``dtype``, saturating in e4m3."""
    return value.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else value.to(dtype)


def digest(tensor: Tensor) -> str:
    """16 digits of the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def mixed(counter: int, seed: int) -> int:
    """Murmur3's 32-bit finaliser, once for each half of the seed."""
    for key in (seed % 2**32, seed // 2**32 % 2**32):
        counter ^= key
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            counter = (counter ^ counter >> shift) * factor % 2**32
        counter ^= counter >> 16
    return counter
