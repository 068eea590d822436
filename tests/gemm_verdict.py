"""The comparison of a stage's output with its bounds: element by element, with row figures for the reader.

Elements decide. Scores of the whole tensor, and of rows, are shown beside them: cosine and relative error of a whole
tensor pass a row of NaN, ignored routing weights and a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.formats import BY_DTYPE
from conformance.operator import MINUS_INFINITY, NOT_A_NUMBER, PLUS_INFINITY
from references.moe_gemm_2stage.bounds import Bounded


@dataclass(frozen=True)
class Comparison:
    """wrong: elements over their budget, non-finite ones included. fraction: worst error over budget (infinity for
    a non-finite element). rows: indices of rows with a wrong element. relative: largest |out - exact| / |exact| of a
    row (2-norms), direction: least cosine of a row, scale: the row norm ratio furthest from 1. whole: cosine of all."""

    wrong: int
    nonfinite: int
    fraction: float
    rows: tuple[int, ...]
    relative: float
    direction: float
    scale: float
    whole: float

    @property
    def passed(self) -> bool:
        return self.wrong == 0


def compare(out: Tensor, exact: Bounded, written: Tensor | None = None) -> Comparison:
    """Judge ``out`` [..., N] of a float dtype against bounds of the same shape.

    written: bool [...], the rows that must be right; others (slots without an expert in stage 1) may hold anything.
    An infinity is right where its value, with its error, reaches the end of the format's range with the same sign, and
    where the bounds say so, as of NaN.
    """
    form = BY_DTYPE[out.dtype]
    width = out.shape[-1]
    value, error, found = (part.reshape(-1, width) for part in (exact.value, exact.error, out.double()))
    also = getattr(exact, "also", None)
    also = torch.zeros_like(value, dtype=torch.uint8) if also is None else also.reshape(-1, width)
    index = torch.arange(len(value), device=out.device)
    if written is not None:
        index = written.reshape(-1).nonzero().flatten()
        value, error, found, also = value[index], error[index], found[index], also[index]
    if not found.numel():
        return Comparison(0, 0, 0.0, (), 0.0, 1.0, 1.0, 1.0)
    reach = value.abs() + error
    fraction = ((found - value).abs() / (error + form.half_ulp(reach))).nan_to_num(nan=math.inf)
    edge = form.maximum * (1.0 + 0.5 / (2.0**form.precision - 1))
    beyond = found.isinf() & (found.sign() == value.sign()) & (reach >= edge)
    beyond |= (found == math.inf) & (also & PLUS_INFINITY > 0) | (found == -math.inf) & (also & MINUS_INFINITY > 0)
    beyond |= found.isnan() & (also & NOT_A_NUMBER > 0)
    fraction = fraction.masked_fill(beyond | error.isinf(), 0.0)
    over = fraction > 1.0
    rows = tuple(index[over.any(dim=1)].tolist())
    nonfinite = int((~found.isfinite() & over).sum())
    return Comparison(int(over.sum()), nonfinite, float(fraction.max()), rows, *_figures(found, value))


def _figures(found: Tensor, value: Tensor) -> tuple[float, float, float, float]:
    """Relative error, cosine and norm ratio of the worst row, and the cosine of everything. A row of zeros on one
    side only has cosine 0; rows of zeros on both sides are right."""
    norm, size = found.norm(dim=1), value.norm(dim=1)
    alike = (norm == 0) & (size == 0)
    off = (found - value).norm(dim=1)
    relative = (off / size).masked_fill(alike, 0.0).nan_to_num(nan=math.inf)
    cosine = ((found * value).sum(dim=1) / (norm * size)).masked_fill(alike, 1.0).nan_to_num(nan=0.0)
    ratio = (norm / size).masked_fill(alike, 1.0).nan_to_num(nan=math.inf)
    furthest = int(ratio.clamp(min=1e-300).log().abs().argmax())
    whole = float((found * value).sum() / (norm.norm() * size.norm()))
    return float(relative.max()), float(cosine.min()), float(ratio[furthest]), 0.0 if math.isnan(whole) else whole
