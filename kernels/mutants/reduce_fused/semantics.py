"""Mutants that compute another function: factors left out or applied twice, other meanings, lost NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from conformance.mutants import mutant
from kernels.mutants.reduce_fused import steps
from kernels.mutants.reduce_fused.steps import Work, wrong

_wrong = partial(wrong, __name__)


def _set(name: str, change: Callable[[Work, Tensor], Tensor | None]) -> Callable[[Work], None]:
    """Replace one given tensor of the call; absent ones stay absent."""

    def begin(w: Work) -> None:
        value = getattr(w, name)
        if value is not None:
            setattr(w, name, change(w, value))

    return begin


def _power_of_two(w: Work, value: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - (mantissa.abs() == 0.5).int()  # a power of two is one already
    return torch.where(value == 0, value, torch.ldexp(torch.sign(mantissa), exponent))


def _normalised(w: Work, value: Tensor) -> Tensor:
    valid = w.positions >= 0
    return value / value.masked_fill(~valid, 0.0).sum(dim=1, keepdim=True)


def _flushed(value: Tensor) -> Tensor:
    return value.masked_fill(value.abs() < 2.0**-126, 0.0)


def _default(w: Work) -> None:
    if w.weights is None:
        w.weights = torch.full(w.positions.shape, 1 / w.positions.shape[1], device=w.x.device)


def _mean(w: Work, total: Tensor) -> Tensor:
    return steps.rescale(w, total / w.valid.sum(dim=1, keepdim=True).clamp(min=1))


def _times(factor: float) -> Callable[[Work, Tensor], Tensor]:
    return lambda w, total: steps.rescale(w, total) * factor


# ---- SCALE -------------------------------------------------------------------------------------------------------
_wrong("scale_rows_missing", "SCALE", "x_sf is left out.", "x_sf-missing", begin=_set("x_sf", lambda w, v: None))
_wrong("scale_rows_twice", "SCALE", "x_sf is applied twice.", "x_sf-twice", begin=_set("x_sf", lambda w, v: v * v))
_wrong("scale_rows_power", "SCALE", "x_sf is rounded up to a power of two.", "x_sf-power-of-two",
       begin=_set("x_sf", _power_of_two))
_wrong("scale_missing", "SCALE", "sf is left out.", "sf-missing", begin=_set("sf", lambda w, v: None))
_wrong("scale_twice", "SCALE", "sf is applied twice.", "sf-twice", begin=_set("sf", lambda w, v: v * v))
_wrong("scale_reciprocal", "SCALE", "The sum is divided by sf.", "sf-reciprocal",
       begin=_set("sf", lambda w, v: 1 / v))
_wrong("scale_by_reciprocal", "SCALE", "The sum is divided by the reciprocal of sf.", "sf-by-reciprocal",
       rescale=lambda w, total: total if w.sf is None else (total / (1 / w.sf)).masked_fill(w.empty, 0.0))
_wrong("scale_rows_by_reciprocal", "SCALE", "Rows are divided by the reciprocals of x_sf.", "x_sf-by-reciprocal",
       begin=_set("x_sf", lambda w, v: 1 / (1 / v)))
_wrong("scale_weights_by_reciprocal", "SCALE", "Rows are divided by the reciprocals of weights.",
       "weights-by-reciprocal", begin=_set("weights", lambda w, v: 1 / (1 / v)))
_wrong("scale_flushed", "SCALE", "An sf below 2^-126 counts as 0.", "sf-flushed sf-by-reciprocal",  # 0 either way
       begin=_set("sf", lambda w, v: _flushed(v)))
_wrong("scale_rows_flushed", "SCALE", "x_sf below 2^-126 counts as 0.", "x_sf-flushed",
       begin=_set("x_sf", lambda w, v: _flushed(v)))
_wrong("scale_weights_flushed", "SCALE", "Weights below 2^-126 count as 0.", "weights-flushed",
       begin=_set("weights", lambda w, v: _flushed(v)))
_wrong("scale_zero", "SCALE", "An sf of 0 is taken for 'not given'.", "zero-sf-ignored sf-missing",
       begin=_set("sf", lambda w, v: torch.where(v == 0, torch.ones_like(v), v)))

# ---- SEMANTIC ----------------------------------------------------------------------------------------------------
_wrong("semantic_unweighted", "SEMANTIC", "The weights are left out.", "weights-missing",
       begin=_set("weights", lambda w, v: None))
_wrong("semantic_weighted_twice", "SEMANTIC", "The weights are applied twice.", "weights-twice",
       begin=_set("weights", lambda w, v: v * v))
_wrong("semantic_normalised", "SEMANTIC", "The weights are divided by their sum.", "weights-normalised",
       begin=_set("weights", _normalised))
_wrong("semantic_default", "SEMANTIC", "Absent weights count as 1 / K.", "weights-default", begin=_default)
_wrong("semantic_mean", "SEMANTIC", "The sum is divided by the number of valid slots.", "mean", rescale=_mean)
_wrong("semantic_percent", "SEMANTIC", "The result is 1 % too large.", "constant-factor", rescale=_times(1.01))
_wrong("semantic_double", "SEMANTIC", "The result is twice as large.", "constant-factor", rescale=_times(2.0))



def _wrong_type(x: Tensor, token_topk_to_pos: Tensor, *, topk_weights: Tensor | None = None,
                x_sf: Tensor | None = None, sf: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Returns x's dtype whatever output is asked for."""
    out = torch.empty((len(token_topk_to_pos), x.shape[1]), dtype=x.dtype, device=x.device)
    steps.Steps().run(Work(x, token_topk_to_pos, topk_weights, x_sf, sf, out, None, token_topk_to_pos, out))
    return out


mutant(steps.OPERATOR, "semantic_output_type", _wrong_type, fault="SEMANTIC",
       wrong="The requested output type is ignored.", twin=steps.TWIN, diagnosis=("form",), promise="within-budget",
       strided=True)

# ---- NONFINITE ---------------------------------------------------------------------------------------------------


def _rows(change: Callable[[Tensor], Tensor]) -> Callable[[Work], Tensor]:
    return lambda w: change(steps.gather(w))


def _skip_zero(w: Work) -> tuple[Tensor, Tensor]:
    index, valid = steps.locate(w)
    return index, valid if w.weights is None else valid & (w.weights != 0)


_wrong("nonfinite_nan", "NONFINITE", "NaN in x counts as 0.", "x-nan-as-zero",
       gather=_rows(lambda rows: torch.where(rows.isnan(), torch.zeros_like(rows), rows)))
_wrong("nonfinite_infinity", "NONFINITE", "Infinity in x becomes the largest finite number.", "x-infinity-clamped",
       gather=_rows(lambda rows: rows.clamp(-3.4028234663852886e38, 3.4028234663852886e38)))
_wrong("nonfinite_zero_weight", "NONFINITE", "A slot of weight 0 is skipped, so that its NaN is lost.",
       "zero-weight-skipped", locate=_skip_zero)
