"""Faulty semantics of two-stage MoE between its stages: the rounding of stage 1's result, smoothing, scales and codes
of rows. Those of microscaled blocks are in `faults_of_elements`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from conformance.data.arithmetic import divided
from conformance.operator import Fault
from references.moe_gemm_2stage import fp8
from references.moe_gemm_2stage.faulty import Change, chained, fault
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.reading import Reading, encoding, local_ids, quantised, smoothed

# What quantisers hold a row's largest magnitude or its scale above, or add to them, lest they divide by 0.
_FLOORS = {"magnitude": (1e-2, 1 / 512, 1e-3, 1e-4, 1e-5), "scale": (1e-4, 1e-5, 1e-6, 1e-7)}
_ADDED = {"magnitude": (1e-4, 1e-5, 1e-6), "scale": (1e-5, 1e-6, 1e-7, 1e-8)}


# ---- The format of stage 1's result -------------------------------------------------------------------------------


def _bf16_between(r: Reading) -> Reading:
    return replace(r, between=lambda of, out1: quantised(of, smoothed(of, out1.bfloat16())))


def _held(dtype: torch.dtype, *, but: str) -> Change:
    """Another format in the place of f16, where what follows is no cast to ``but``, which would be the same."""
    return chained(lambda r: None if r.mode.activation == but else replace(r, held=dtype))


def _as_it_is(dtype: torch.dtype) -> Change:
    """No cast and no re-quantisation of what is held in ``dtype``."""

    def change(r: Reading) -> Reading | None:
        if dtype == torch.float16 and r.mode.activation == "f16":
            return None
        return replace(r, held=dtype, between=lambda of, out1: Operand(smoothed(of, out1)))

    return chained(change)


# ---- Smoothing ----------------------------------------------------------------------------------------------------


def _smooth(function: Callable[[Reading, Tensor], Tensor]) -> Change:
    """Other factors [T k or 1, I], made of smooth2 [E, I]."""

    def change(r: Reading) -> Reading | None:
        smooth = r.call.arguments["smooth2"]
        if smooth is None or not len(smooth):
            return None
        return replace(r, between=lambda of, out1: quantised(of, smoothed(of, out1, function(of, smooth))))

    return chained(change)


def _by_global_id(beyond: str) -> Change:
    """``beyond``: what an id past the last local expert reads: the last one, one from the front again, or NaN."""

    def factors(r: Reading, smooth: Tensor) -> Tensor:
        ids = r.call.arguments["topk_ids"].long().flatten()
        found = smooth[ids % len(smooth) if beyond == "wraps" else ids.clamp(max=len(smooth) - 1)]
        return found.masked_fill((ids >= len(smooth))[:, None], torch.nan) if beyond == "nan" else found

    def change(r: Reading) -> Reading | None:
        return None if r.call.arguments["expert_mask"] is None else _smooth(factors)(r)

    return chained(change)


# ---- Scales and codes of rows -------------------------------------------------------------------------------------


def _between(function: Callable[[Reading, Tensor], Operand], *activations: str) -> Change:
    """Another quantisation of fp32 [T k, I] between the stages, of these formats."""
    return chained(lambda r: replace(r, between=lambda of, out1: function(of, smoothed(of, out1)))
                   if r.mode.activation in (activations or ("fp8", "int8")) else None)


def _largest(r: Reading) -> float:
    """The largest number of the rows' format."""
    return 127.0 if r.mode.activation == "int8" else fp8.FORMS[encoding(r.call)].maximum


def _rescaled(scale_of: Callable[[Reading, Tensor, Tensor], Tensor]) -> Change:
    """Other scales [T k, 1]: ``scale_of(reading, values [T k, I], right scales [T k, 1])``."""

    def between(r: Reading, value: Tensor) -> Operand:
        right = quantised(r, value).scale
        assert right is not None
        scale = scale_of(r, value, right[:, None])
        ratio = value / scale
        if r.mode.activation == "int8":
            cut = torch.trunc if r.call.arguments["rule"] == "truncate" else torch.round
            return Operand(cut(ratio).clamp(-127, 127), scale=scale[:, 0])
        form = fp8.FORMS[encoding(r.call)]
        return Operand(fp8.decode(fp8.encode(ratio, form), form), scale=scale[:, 0])

    return _between(between)


def _with_epsilon(what: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Another largest magnitude [T k, 1] of each row, or another scale, as ``what`` says."""

    def scale_of(r: Reading, value: Tensor, scale: Tensor) -> Tensor:
        size = value.abs().amax(dim=1, keepdim=True)
        return divided(change(size), _largest(r)) if what == "magnitude" else change(divided(size, _largest(r)))

    return _rescaled(scale_of)


def _epsilons() -> Iterator[Fault]:
    names = {"magnitude": "a row's largest magnitude between the stages", "scale": "a row's scale between the stages"}
    for what, name in names.items():
        for least in _FLOORS[what]:
            yield fault("requantise-epsilon", f"{name} is held at or above {least:.3g}",
                        _with_epsilon(what, partial(torch.clamp, min=least)))
        for more in _ADDED[what]:
            yield fault("requantise-epsilon", f"{more:g} is added to {name}",
                        _with_epsilon(what, partial(torch.add, other=more)))


def _of_numbers(r: Reading, value: Tensor, scale: Tensor) -> Tensor:
    found = divided(value.amax(dim=1, keepdim=True), _largest(r))
    return torch.where(found == 0, 1.0, found)


def _of_token(r: Reading, value: Tensor, scale: Tensor) -> Tensor:
    slots = scale.view(r.tokens, r.topk).masked_fill(local_ids(r.call) < 0, 0.0)  # their rows are 0, and scales 1
    largest = slots.amax(dim=1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest).expand(slots.shape).reshape(-1, 1)


def _other_largest(r: Reading, value: Tensor, scale: Tensor) -> Tensor:
    """By 240 in the place of 448, 224 of 240, 128 of 127."""
    by = 127 / 128 if r.mode.activation == "int8" else 448 / 240 if encoding(r.call) == "ocp" else 240 / 224
    return scale * by


def _per_tensor(r: Reading, value: Tensor) -> Operand:
    right = quantised(r, value.view(1, -1))
    assert right.scale is not None
    return Operand(right.payload.view(value.shape), scale=right.scale.expand(len(value)))


def _other_rule(r: Reading, value: Tensor) -> Operand:
    return quantised(r, value, "nearest" if r.call.arguments["rule"] == "truncate" else "truncate")


def _cut(r: Reading, value: Tensor) -> Operand:
    """Codes that are too large are one less."""
    right, form = quantised(r, value), fp8.FORMS[encoding(r.call)]
    assert right.scale is not None
    less = fp8.decode(fp8.encode(right.payload.abs(), form) - 1, form).copysign(right.payload)
    beyond = right.payload.abs() > (value / right.scale[:, None]).abs()
    return replace(right, payload=torch.where(beyond, less, right.payload))


def _zero_rows(r: Reading, value: Tensor) -> Operand:
    """0 / 0 is NaN, which integers do not hold."""
    right = quantised(r, value)
    zero = (right.payload == 0).all(dim=1)
    assert right.scale is not None
    payload = right.payload.masked_fill(zero[:, None], torch.nan) if r.mode.activation == "fp8" else right.payload
    return Operand(payload, scale=right.scale.masked_fill(zero, 0.0))


REQUANTISED = (
    fault("between-bf16", "stage 1's result is held in bf16 between the stages", chained(_bf16_between)),
    fault("between-bf16", "stage 1's result is held in bf16 between the stages", _held(torch.bfloat16, but="bf16")),
    fault("requantise-per-tensor", "one scale is taken for the whole intermediate", _between(_per_tensor)),
    fault("requantise-half", "re-quantisation uses half of the format's range",
          _rescaled(lambda r, value, scale: scale * 2)),
    fault("requantise-other-rule", "integers between the stages are rounded by the other rule",
          _between(_other_rule, "int8")),
    fault("smooth-missing", "the smoothing factors are left out",
          _smooth(lambda r, smooth: torch.ones_like(smooth[:1]))),
    fault("smooth-of-expert-0", "rows are smoothed by the factors of expert 0", _smooth(lambda r, smooth: smooth[:1])),
    fault("zero-rows", "rows of zeros are re-quantised by dividing by 0", _between(_zero_rows)),
    fault("requantise-token-scale", "one scale is taken for all slots of a token between the stages",
          _rescaled(_of_token)),
    fault("requantise-power-of-two", "scales between the stages are rounded up to powers of two",
          _rescaled(lambda r, value, scale: scale.log2().ceil().exp2())),
    fault("requantise-unscaled", "stage 1's result is cast and not scaled between the stages",
          _rescaled(lambda r, value, scale: torch.ones_like(scale))),
    fault("requantise-other-largest", "the largest magnitude between the stages is divided by another format's "
          "largest number", _rescaled(_other_largest)),
    fault("between-unrounded", "stage 1's result is not rounded to f16 between the stages",
          _held(torch.float32, but="f16")),
    fault("between-unrounded", "stage 1's result is held in fp32 between the stages, without a cast",
          _as_it_is(torch.float32)),
    fault("requantise-missing", "stage 1's result stays f16 between the stages", _as_it_is(torch.float16)),
    fault("requantise-cut", "fp8 numbers between the stages are rounded towards zero", _between(_cut, "fp8")),
    fault("requantise-signed", "scales between the stages are made of a row's largest number and not of its largest "
          "magnitude", _rescaled(_of_numbers)),
    *(fault("smooth-by-global-id", "rows are smoothed by the factors of their global expert id, where they are local",
            _by_global_id(beyond)) for beyond in ("clamps", "wraps", "nan")),
    *_epsilons(),
)
