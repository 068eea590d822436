"""The rows of an expert in no order: what is drawn, that kernels which take each row from its place in the list pass,
and that those which count places, as if rows were sorted by token, fail and are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.case import Case, parse_case
from conformance.diagnosis.diagnose import diagnose
from conformance.diagnosis.evidence import gather
from conformance.errors import ConformanceError
from conformance.operator import Call, Reference, Shared
from conformance.registry import matrix, operator
from references.moe_gemm_2stage import sorting

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
_POINT = "tokens:37-hidden:128-inter:64-experts:5-topk:3-bm:16-in:{}-mode:{}-out:{}-mask:yes-runs:shuffled"


def cases(name: str) -> list[Case]:
    found = [case for case in matrix(name).cases("edge") if case.family == "F10-run-order"]
    assert found
    return found


def by_token(call: Call) -> sorting.Sorted:
    """What a stable sort makes of the call's routes."""
    given = call.arguments
    mask = given["expert_mask"]
    experts = given["w2" if "w2" in given else "w1"].shape[0] if mask is None else len(mask)
    return sorting.sort(given["topk_ids"], given["topk_weights"], experts, given["block"], mask)


@every_operator
def test_each_run_has_the_same_rows_in_another_order_and_its_padding_behind_them(name: str) -> None:
    for case in cases(name):
        call, _ = prepared(case.id)
        given, known = call.arguments, by_token(call)
        pad = sorting.sentinel(*given["topk_ids"].shape)
        rows = known.valid_rows
        assert int(given["num_valid_ids"]) == rows
        ids = given["sorted_token_ids"][:rows]
        assert torch.equal(ids == pad, known.token_ids[:rows] == pad)
        descents = 0
        blocks = known.expert_ids[: rows // known.block].repeat_interleave(known.block)
        for expert in blocks.unique().tolist():
            here = (blocks == expert) & (ids != pad)
            assert torch.equal(ids[here].sort().values, known.token_ids[:rows][here].sort().values)
            descents += int((sorting.unpack(ids[here])[0].diff() < 0).sum())
        assert descents > 9
        token, slot = sorting.unpack(ids[ids != pad])
        shares = given["topk_weights"][token.long(), slot.long()]
        assert torch.equal(given["sorted_weights"][:rows][ids != pad], shares)


def test_the_order_is_the_same_each_time() -> None:
    case = cases("moe_gemm2")[0]
    first, second = (operator("moe_gemm2").inputs(case, "reduced", CPU, Shared()).arguments["sorted_token_ids"]
                     for _ in range(2))
    assert torch.equal(first, second)


@every_operator
def test_a_kernel_that_takes_rows_from_the_list_passes(name: str) -> None:
    for case in cases(name):
        call, reference = prepared(case.id)
        assert verdict(result(per_expert(name), call), call, reference).passed, case.id


def named(call: Call, reference: Reference, found: Tensor) -> str | None:
    """The key of what explains a wrong result best."""
    diagnosis = diagnose([gather(found, call, reference, 1)], operator(call.case.operator).faults)
    return None if diagnosis is None else diagnosis.key


def counted(call: Call) -> tuple[Tensor, Tensor]:
    """(places t k + s as they stand in the list, and as they would after a stable sort), place by place."""
    found = []
    for ids in (call.arguments["sorted_token_ids"], by_token(call).token_ids):
        token, slot = sorting.unpack(ids[: int(call.arguments["num_valid_ids"])].long())
        here = token < len(call.arguments["topk_ids"])
        found.append((token * call.arguments["topk_ids"].shape[1] + slot)[here])
    return found[0], found[1]


def at_places(values: Tensor, of: Tensor, at: Tensor) -> Tensor:
    """[T k, ...] with what stood at the places ``of`` at the places ``at``."""
    moved = values.clone()
    moved[at] = values[of]
    return moved


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("name", "dtype", "mode", "what"), [
    ("moe_gemm1", "bf16", "atomic", "results"),
    ("moe_gemm2", "int8", "reduce", "results"),
    ("moe_gemm2", "bf16", "atomic", "rows"),
    ("moe_gemm2", "fp8", "atomic", "weights"),
    ("moe_gemm_2stage", "int8", "reduce", "weights"),
    ("moe_gemm1", "fp4", "atomic", "scales"),
    ("moe_gemm2", "a8w4", "reduce", "scales"),
])
def test_who_counts_places_fails_and_is_named(name: str, dtype: str, mode: str, what: str, inverse: bool) -> None:
    """Results are put back, rows, weights or e8m0 scales are read as if an expert's rows were sorted by token; or they
    are computed in that order, and taken for those of the list."""
    call, reference = prepared(f"{name}/F/{_POINT.format(dtype, mode, 'f16')}")
    given = call.arguments
    of, at = counted(call)[::-1] if inverse else counted(call)
    changed: dict[str, Any] = {}
    if what == "rows":
        rows = given["a2"].flatten(0, 1)
        changed["a2"] = at_places(rows, of, at).view(given["a2"].shape)
    elif what == "weights":
        changed["topk_weights"] = at_places(given["topk_weights"].flatten(), of, at).view(given["topk_weights"].shape)
    elif what == "scales":
        ids = given["sorted_token_ids"].clone()
        listed = (ids[: int(given["num_valid_ids"])] & sorting.MOST_TOKENS) < len(given["topk_ids"])
        topk = given["topk_ids"].shape[1]
        packed = sorting.pack(torch.arange(len(given["topk_ids"])).repeat_interleave(topk),
                              torch.arange(topk).repeat(len(given["topk_ids"])))
        order = torch.empty_like(packed)  # the place whose scale each route is given
        order[of] = packed[at]
        ids[: len(listed)][listed] = order[counted(call)[0]]
        changed["sorted_token_ids"] = ids
    found = result(per_expert(name), call, **changed)
    if what == "results":
        found = at_places(found, of, at)
    assert not verdict(found, call, reference).passed
    assert named(call, reference, found) == "run-order"


def test_whose_rows_are_walked_by_token_is_named_by_what_it_drops() -> None:
    """The 16 rows that such a kernel takes of each expert are not the first ones of the list."""
    call, reference = prepared(f"moe_gemm2/F/{_POINT.format('bf16', 'reduce', 'f16')}")
    plain = by_token(call)
    ids = plain.token_ids[: plain.valid_rows]
    token, slot = (part.long() for part in sorting.unpack(ids))
    expert = plain.expert_ids[: len(ids) // 16].repeat_interleave(16)
    late = (token < 37) & (torch.arange(len(ids)) - torch.searchsorted(expert, expert) >= 16)
    assert bool(late.any())
    found = result(per_expert("moe_gemm2"), call)
    found[(token * 3 + slot)[late]] = 0.0
    assert named(call, reference, found) == "rows-beyond-tile-dropped"


def test_an_unknown_order_is_refused() -> None:
    case = parse_case(f"moe_gemm2/F/{_POINT.format('bf16', 'reduce', 'f16')}")
    wrong = replace(case, params={**case.params, "runs": "sorted"})
    with pytest.raises(ConformanceError, match="runs:sorted is none of by_token, shuffled"):
        operator("moe_gemm2").inputs(wrong, "reduced", CPU, Shared())
