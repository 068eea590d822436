"""Right kernels that go about the sum in another way than the mutants' twins: they must not be flagged either."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.mutants import control
from kernels.mutants.reduce_fused.steps import OPERATOR, Steps, Work, as_function


def _reversed(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
    total = torch.zeros((rows.shape[0], rows.shape[2]), device=rows.device)
    for slot in reversed(range(rows.shape[1])):
        term = rows[:, slot] if scale is None else rows[:, slot] * scale[:, slot, None]
        total = torch.where(w.valid[:, slot, None], total + term, total)
    return total


def _wide(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
    terms = rows.double() if scale is None else rows.double() * scale.double()[..., None]
    return terms.masked_fill(~w.valid[..., None], 0.0).sum(dim=1).float()


for _name, _steps, _about in (
    ("control_reversed", Steps(combine=_reversed), "slots in descending order, each product rounded"),
    ("control_fp64", Steps(combine=_wide), "the sum in fp64, rounded once"),
):
    control(OPERATOR, _name, as_function(_name, _steps, __name__), _about, promise="within-budget", strided=True)
