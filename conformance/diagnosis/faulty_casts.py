"""Faults of the last step, the cast to the output's format, predicted from the exact values before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from conformance.formats import Format, cast

Predicted = tuple[str, str, Tensor]
_E4M3 = torch.float8_e4m3fn
_OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def casts(exact: Tensor, form: Format) -> Iterator[Predicted]:
    """(key, sentence, result) for each fault that the format ``form`` can have; ``exact`` is fp64 [T, C]."""
    value = exact.float()
    for key, sentence, change in _GENERAL:
        yield key, sentence, change(value, form)
    if form.dtype in _OTHER:
        other = _OTHER[form.dtype]
        yield "out-bits", "the output holds the bits of the other 16-bit format", value.to(other).view(form.dtype)
        if form.name == "fp16":
            clamped = value.clamp(-form.maximum, form.maximum)
            yield "overflow-saturates", "values beyond the largest finite one saturate", cast(clamped, form.dtype)
    if form.dtype == _E4M3:
        for key, sentence, change in _OF_E4M3:
            yield key, sentence, change(value, form)


def _rounded(value: Tensor, form: Format, how: Callable[[Tensor], Tensor]) -> Tensor:
    """``value`` in units of the format's last place, made integral by ``how``; exact in fp64."""
    if form.name == "fp32":
        return value
    magnitude = value.double()
    exponent = torch.frexp(magnitude).exponent.double().sub_(1).clamp_(min=form.minimum_exponent)
    step = torch.exp2(exponent - (form.precision - 1))
    whole = how(magnitude / step) * step
    return cast(torch.where(value.isfinite(), whole, magnitude).float(), form.dtype)


def _half_away(units: Tensor) -> Tensor:
    return torch.trunc(units + torch.sign(units) * 0.5)


def _nan_beyond(value: Tensor, form: Format) -> Tensor:
    codes = cast(value, _E4M3).view(torch.uint8)
    return torch.where(value.abs() > 464.0, torch.full_like(codes, 0x7F), codes).view(_E4M3)


def _via(dtype: torch.dtype) -> Callable[[Tensor, Format], Tensor]:
    return lambda value, form: cast(value.to(dtype).float(), form.dtype)


def _flushed(value: Tensor, form: Format) -> Tensor:
    return cast(torch.where(value.abs() < 2.0**form.minimum_exponent, value * 0.0, value), form.dtype)


_GENERAL: tuple[tuple[str, str, Callable[[Tensor, Format], Tensor]], ...] = (
    ("cast-truncates", "the final cast truncates", lambda v, form: _rounded(v, form, torch.trunc)),
    ("cast-rounds-down", "the final cast rounds down", lambda v, form: _rounded(v, form, torch.floor)),
    ("cast-rounds-up", "the final cast rounds up", lambda v, form: _rounded(v, form, torch.ceil)),
    ("cast-ties-away", "the final cast rounds ties away from zero", lambda v, form: _rounded(v, form, _half_away)),
    ("cast-half-up", "the final cast rounds ties up", lambda v, f: _rounded(v, f, lambda u: torch.floor(u + 0.5))),
    ("cast-flushes", "results below the normal range are flushed to zero", _flushed),
)
_OF_E4M3: tuple[tuple[str, str, Callable[[Tensor, Format], Tensor]], ...] = (
    ("overflow-nan", "e4m3 overflow gives NaN in the place of 448", _nan_beyond),
    ("infinity-nan", "infinity gives NaN in e4m3, in the place of 448",
     lambda v, form: cast(v.masked_fill(v.isinf(), torch.nan), form.dtype)),
    ("nan-448", "NaN gives 448 in e4m3", lambda v, form: cast(v.nan_to_num(448.0, 448.0, -448.0), form.dtype)),
    ("overflow-240", "e4m3 saturates at 240, the limit of the fnuz format",
     lambda v, form: cast(v.clamp(-240.0, 240.0), form.dtype)),
    ("overflow-256", "e4m3 saturates at 256", lambda v, form: cast(v.clamp(-256.0, 256.0), form.dtype)),
    ("cast-via-bf16", "the cast to e4m3 goes through bf16 and rounds twice", _via(torch.bfloat16)),
    ("cast-via-fp16", "the cast to e4m3 goes through fp16 and rounds twice", _via(torch.float16)),
)
