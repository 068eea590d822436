"""The 15 mutations of ../shared/flydsl.md, table 3.3, which published gates pass, applied to either stage.

Each is a function that changes a sample before a stage is evaluated, or the stage's output afterwards; both None
where the mutation does not exist for a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gemm_samples import Sample, requantised, run_stage1
from torch import Tensor

from references.moe_gemm_2stage import layouts
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.stages import Routes

Before = Callable[[Sample], "Sample | None"]
After = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Mutation:
    """before: (stage 1, stage 2) changes of the sample. after: change of the output."""

    name: str
    before: tuple[Before, Before] | None = None
    after: After | None = None


def _routes(change: Callable[[Routes], Routes]) -> tuple[Before, Before]:
    def before(of: Sample) -> Sample:
        return replace(of, routes=change(of.routes))

    return before, before


def _swapped_halves(of: Operand) -> Operand:
    """The weights as a kernel reads them that takes low nibbles for high ones: k and k + 4 in groups of 8 exchanged.
    4-bit weights go through the packed form, others through the same permutation."""
    if of.payload.abs().max() <= 8 and bool((of.payload == of.payload.round()).all()):
        packed = layouts.pack_int4(of.payload.to(torch.int8))
        return replace(of, payload=layouts.unpack_int4(packed << 4 | packed >> 4).float())
    groups = of.payload.unflatten(-1, (-1, 2, 4))
    return replace(of, payload=groups.flip(-2).flatten(-3))


def _gate_up(of: Sample) -> Sample:
    half = of.w1.payload.shape[1] // 2

    def roll(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.roll(half, dims=1)

    payload = roll(of.w1.payload)
    assert payload is not None
    return replace(of, w1=replace(of.w1, payload=payload, factors=roll(of.w1.factors), scale=roll(of.w1.scale)))


def _gate_up_before_stage2(of: Sample) -> Sample:
    return replace(of, a2=requantised(run_stage1(_gate_up(of), "f16"), of))


def _slot_0(of: Operand) -> Operand:
    def first(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, :1].expand_as(value)

    payload = first(of.payload)
    assert payload is not None
    return replace(of, payload=payload, factors=first(of.factors), scale=first(of.scale))


def _expert_of_slot_0(of: Sample) -> Sample:
    """What the slot-0 gather is in stage 1, whose rows do not differ by slot: slot 0's result for all slots."""
    first = of.routes.ids[:, :1].expand_as(of.routes.ids)
    return replace(of, rows=_slot_0(of.rows), routes=replace(of.routes, ids=torch.where(of.routes.valid, first, -1)))


def _next_expert(of: Sample) -> Sample:
    following = (of.routes.ids + 1) % of.w1.payload.shape[0]
    return replace(of, routes=replace(of.routes, ids=torch.where(of.routes.valid, following, -1)))


def _scale_of_token_0(of: Operand) -> Operand | None:
    if of.scale is not None:
        return replace(of, scale=of.scale[:1, :1].expand_as(of.scale))
    if of.factors is not None:
        return replace(of, factors=of.factors[:1, :1].expand_as(of.factors))
    return None


def _rows(change: Callable[[Operand], Operand | None]) -> tuple[Before, Before]:
    def before(of: Sample) -> Sample | None:
        rows = change(of.rows)
        return None if rows is None else replace(of, rows=rows)

    def before2(of: Sample) -> Sample | None:
        a2 = change(of.a2)
        return None if a2 is None else replace(of, a2=a2)

    return before, before2


def _without_last_slot(routes: Routes) -> Routes:
    ids = routes.ids.clone()
    ids[:, -1] = -1
    return replace(routes, ids=ids)


def _row(change: Callable[[Tensor], None]) -> After:
    """Change one row in the middle that is written."""
    def after(out: Tensor) -> Tensor:
        out = out.clone()
        rows = out.view(-1, out.shape[-1])
        written = (~rows.isnan().any(dim=1)).nonzero().flatten()
        change(rows[written[len(written) // 2]])
        return out

    return after


def _last_row(out: Tensor) -> Tensor:
    out = out.clone()
    out.view(-1, out.shape[-1])[-1] = 0
    return out


def _last_columns(out: Tensor) -> Tensor:
    return torch.cat([out[..., :-64], torch.zeros_like(out[..., -64:])], dim=-1)


def _garbage(row: Tensor) -> None:
    row.copy_(3 * row.abs().max() * torch.linspace(-1, 1, len(row)))


def _nan(row: Tensor) -> None:
    row.fill_(float("nan"))


MUTATIONS = (
    Mutation("all zeros", after=torch.zeros_like),
    Mutation("slot-0 gather", before=(_expert_of_slot_0, _rows(_slot_0)[1])),
    Mutation("wrong expert", before=(_next_expert, _next_expert)),
    Mutation("gate and up swapped", before=(_gate_up, _gate_up_before_stage2)),
    Mutation("nibble halves swapped", before=(
        lambda of: replace(of, w1=_swapped_halves(of.w1)), lambda of: replace(of, w2=_swapped_halves(of.w2)))),
    Mutation("last slot dropped", before=_routes(_without_last_slot)),
    Mutation("routing weights ignored", before=_routes(
        lambda routes: replace(routes, weights=torch.full_like(routes.weights, 1 / routes.ids.shape[1])))),
    Mutation("routing weights twice", before=_routes(lambda routes: replace(routes, weights=routes.weights**2))),
    Mutation("output doubled", after=lambda out: out * 2),
    Mutation("output halved", after=lambda out: out / 2),
    Mutation("one row NaN", after=_row(_nan)),
    Mutation("one row garbage", after=_row(_garbage)),
    Mutation("last row unwritten", after=_last_row),
    Mutation("last 64 columns zero", after=_last_columns),
    Mutation("scale of token 0 for all", before=_rows(_scale_of_token_0)),
    Mutation("bf16 bits read as f16", after=lambda out: out.bfloat16().view(torch.float16).to(out.dtype)),
)
