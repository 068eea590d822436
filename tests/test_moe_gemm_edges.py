"""Two-stage MoE at the ends: overflow that order and width of a sum decide, signs of weights, masks, many slots,
routes that change between calls. Each fault that such a case is for fails it; right kernels of other kinds pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance import Kernel
from conformance.case import Case, other_draw
from conformance.judging.judge import Judge
from conformance.judging.vacuity import accepted
from conformance.operator import (
    MINUS_INFINITY,
    NOT_A_NUMBER,
    PLUS_INFINITY,
    Call,
    OracleRows,
    Output,
    Reference,
    Shared,
)
from conformance.registry import matrix, operator
from conformance.result import Settings
from references.moe_gemm_2stage.bounds import Bounded, Combined
from references.moe_gemm_2stage.sorting import routed
from references.moe_gemm_2stage.stages import Routes, combine_atomic, combine_reduce

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
INF, NAN = math.inf, math.nan
Change = Callable[[dict[str, Any]], dict[str, Any]]


def family(name: str, wanted: str) -> list[Case]:
    found = [case for case in matrix(name).cases("edge") if case.family == wanted]
    assert found
    return found


# ---- sums of slots of which some overflow ---------------------------------------------------------------------------


def combined(how: str, *terms: float) -> Combined:
    """Bounds of one f16 output of exact terms."""
    values = torch.tensor([[[term] for term in terms]], dtype=torch.float64)
    routes = Routes(torch.zeros((1, len(terms)), dtype=torch.int32), torch.ones((1, len(terms))))
    combine = combine_atomic if how == "atomic" else combine_reduce
    return combine(Bounded(values, torch.zeros_like(values)), routes, "f16")


def judged(bounds: Combined, golden: float, found: float) -> str | None:
    """The kind of failure of one f16 number, None where it is right."""
    rows = OracleRows(0, 1, bounds.value, bounds.error.float(), bounds.also)
    reference = Reference(torch.tensor([[golden]]).half(), lambda: iter((rows,)), 0.5)
    call = Call(Case("op", {}), {}, Output((1, 1), torch.float16), lambda which: None)
    return verdict(torch.tensor([[found]]).half(), call, reference).kind


@pytest.mark.parametrize(("terms", "golden", "right", "wrong"), [
    # partial sums overflow in one order: infinity, or the sum of who adds in another order or in fp32
    ((60000.0, 60000.0, -60000.0), INF, (INF, 60000.0), (-INF, NAN, 50000.0, 65504.0)),
    ((60000.0, 60000.0, -60000.0, -60000.0), 0.0, (0.0, INF, -INF, NAN), (1000.0, 65504.0)),
    ((90000.0, -80000.0), NAN, (NAN, INF, -INF, 10000.0), (0.0, 65504.0, -14496.0)),
    ((90000.0, -10000.0), INF, (INF,), (65504.0, -INF, NAN, 55504.0)),  # beyond the range either way
    ((70000.0, -10000.0), INF, (INF, 60000.0), (55504.0, -INF, NAN)),
    ((-70000.0,), -INF, (-INF,), (-65504.0, INF, NAN)),
    ((65000.0, 500.0), 65504.0, (65504.0, INF), (64000.0, -INF, NAN)),
    ((30000.0, 30000.0), 60000.0, (60000.0,), (INF, NAN, 59000.0)),
])
def test_atomic_sums_that_overflow(terms: tuple[float, ...], golden: float, right: tuple[float, ...],
                                   wrong: tuple[float, ...]) -> None:
    bounds = combined("atomic", *terms)
    assert [judged(bounds, golden, found) for found in right] == [None] * len(right)
    assert None not in [judged(bounds, golden, found) for found in wrong]


@pytest.mark.parametrize(("terms", "golden", "right", "wrong"), [
    ((60000.0, 60000.0, -60000.0), 60000.0, (60000.0,), (INF, NAN)),  # fp32 sums of partials that are all finite
    ((70000.0, -10000.0), INF, (INF, 60000.0), (-INF, NAN, 55504.0)),
    ((90000.0, -80000.0), NAN, (NAN, INF, -INF, 10000.0), (0.0, 65504.0)),
    ((40000.0, 40000.0), INF, (INF,), (65504.0, NAN, -INF)),
])
def test_reduced_sums_that_overflow(terms: tuple[float, ...], golden: float, right: tuple[float, ...],
                                    wrong: tuple[float, ...]) -> None:
    bounds = combined("reduce", *terms)
    assert [judged(bounds, golden, found) for found in right] == [None] * len(right)
    assert None not in [judged(bounds, golden, found) for found in wrong]


def test_what_else_is_right_is_said_only_where_something_is() -> None:
    assert combined("atomic", 30000.0, 1.0).also is None
    assert combined("reduce", 60000.0, 60000.0).also is None
    assert combined("atomic", 60000.0, 60000.0, -60000.0).also.tolist() == [[PLUS_INFINITY]]
    assert combined("atomic", -60000.0, -60000.0).also.tolist() == [[MINUS_INFINITY]]
    assert combined("reduce", 90000.0, -80000.0).also.tolist() == [[PLUS_INFINITY + MINUS_INFINITY + NOT_A_NUMBER]]


def saturated(out: Tensor) -> Tensor:
    return out.clamp(-65504, 65504)


@every_operator
def test_who_saturates_fp16_fails_each_case_of_overflow(name: str) -> None:
    for case in family(name, "F23-overflow"):
        call, reference = prepared(case.id)
        found = result(per_expert(name), call)
        assert verdict(found, call, reference).passed, case.id
        assert int(found.isinf().sum()) > 9
        assert verdict(saturated(found), call, reference).kind == ("nan-map" if bool(
            found.isnan().any() & ~reference.golden.isnan().any()) else "inf-map"), case.id
        assert verdict(-found, call, reference).kind in ("inf-map", "nan-map", "budget")
        assert accepted(call, reference) is None, case.id


def oracle_of(reference: Reference) -> tuple[Tensor, Tensor]:
    rows = list(reference.oracle())
    return torch.cat([part.value for part in rows]), torch.cat([part.error for part in rows])


@pytest.mark.parametrize("name", ["moe_gemm2", "moe_gemm_2stage"])
def test_who_rounds_once_passes_where_sums_overflow(name: str) -> None:
    """It meets no NaN where the golden's partial sums do, and no infinity where the whole sum is in range."""
    met = 0
    for case in family(name, "F23-overflow"):
        call, reference = prepared(case.id)
        value, _ = oracle_of(reference)
        exact = value.half()
        met += int((reference.golden.isnan() & exact.isfinite()).sum())
        assert verdict(exact, call, reference).passed, case.id
    assert met > 50


def test_who_adds_in_f16_in_reverse_passes_where_sums_overflow() -> None:
    met = 0
    for case in family("moe_gemm2", "F23-overflow"):
        if case.params["mode"] == "reduce":
            continue
        call, reference = prepared(case.id)
        parts = replace(call, arguments=call.arguments | {"combine": "reduce"}, form=replace(
            call.output, shape=(call.arguments["topk_ids"].numel(), call.output.shape[1])))
        terms = result(per_expert("moe_gemm2"), parts).view(*call.arguments["topk_ids"].shape, -1)
        out = torch.zeros_like(reference.golden)
        for slot in reversed(range(terms.shape[1])):
            out = out + terms[:, slot]
        met += int((out.isnan() != reference.golden.isnan()).sum()) + int(
            (out.isinf() != reference.golden.isinf()).sum())
        assert verdict(out, call, reference).passed, case.id
    assert met > 0


# ---- masks, slots and weights ---------------------------------------------------------------------------------------


def only_ones(given: dict[str, Any]) -> dict[str, Any]:
    return {"expert_mask": (given["expert_mask"] == 1).to(torch.int32)}


def at_most(count: int) -> Change:
    """Slots from ``count`` on are left out: their rows are read as zeros."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        weights = given["topk_weights"].clone()
        weights[:, count:] = 0.0
        return {"topk_weights": weights}

    return change


def absolute(given: dict[str, Any]) -> dict[str, Any]:
    return {"topk_weights": given["topk_weights"].abs()}


def clamped(given: dict[str, Any]) -> dict[str, Any]:
    return {"topk_weights": given["topk_weights"].clamp(min=0.0)}


def changed(case: Case, change: Change) -> str | None:
    """The kind of failure of the plain kernel on changed arguments; the unchanged ones pass."""
    call, reference = prepared(case.id)
    kernel = per_expert(case.operator)
    assert verdict(result(kernel, call), call, reference).passed, case.id
    return verdict(result(kernel, call, **change(call.arguments)), call, reference).kind


@every_operator
def test_a_mask_is_true_wherever_it_is_not_0(name: str) -> None:
    seen = 0
    for case in family(name, "F02-mask-values"):
        mask = prepared(case.id)[0].arguments["expert_mask"]
        assert bool((mask == 0).any())
        if bool(((mask != 0) & (mask != 1)).any()):
            assert changed(case, only_ones) is not None, case.id
            seen += 1
    assert seen > 10


@every_operator
def test_the_other_mask_has_as_many_experts_and_not_the_same(name: str) -> None:
    point = f"{name}/F/tokens:5-hidden:32-inter:32-experts:7-topk:2-bm:16-in:fp8-mode:atomic-out:f16-mask:"
    one, other = (prepared(point + which)[0].arguments["expert_mask"] for which in ("yes", "other"))
    assert one.tolist() == [1, 0, 0, 1, 0, 0, 1]
    assert other.tolist() == [1, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("name", ["moe_gemm2", "moe_gemm_2stage"])
@pytest.mark.parametrize("count", [16, 32, 64])
def test_slots_past_a_limit_count(name: str, count: int) -> None:
    cases = family(name, "F11-many-slots")
    assert {case.number("topk") for case in cases} == {17, 33, 65, 127}
    for case in cases:
        if case.number("topk") > count + 8 and case.params["mode"] == "atomic":
            assert changed(case, at_most(count)) is not None, case.id


@every_operator
@pytest.mark.parametrize("change", [absolute, clamped])
def test_the_sign_of_a_routing_weight_counts(name: str, change: Change) -> None:
    for case in family(name, "F18-weight-signs"):
        given = prepared(case.id)[0].arguments
        weights = given["topk_weights"][routed(given["topk_ids"], given["w1" if name == "moe_gemm1" else "w2"].shape[0],
                                               given["expert_mask"])]
        assert bool((weights < 0).any())
        assert bool((weights == 0).any())
        assert changed(case, change) is not None, case.id


def test_a_weight_of_0_is_no_mask() -> None:
    """0 times NaN and 0 times infinity is NaN; a kernel that leaves such slots out, or scrubs NaN, is seen."""
    def scrubbed(given: dict[str, Any]) -> dict[str, Any]:
        return {"a2": given["a2"].float().nan_to_num(0.0, 0.0, 0.0).to(given["a2"].dtype)}

    def without_zero(given: dict[str, Any]) -> dict[str, Any]:
        none = given["topk_weights"] == 0
        return {"a2": given["a2"].float().masked_fill(none[..., None], 0.0).to(given["a2"].dtype)}

    seen = 0
    for case in family("moe_gemm2", "F25-nonfinite"):
        assert changed(case, scrubbed) == "nan-map", case.id
        if case.params["weights"] == "signed":
            seen += changed(case, without_zero) == "nan-map"
    assert seen >= 3  # of the others no row of weight 0 holds one


# ---- routes of the call before --------------------------------------------------------------------------------------


def remembering(*names: str) -> Kernel:
    """The plain kernel of stage 2 with arguments as they were when it was first called with such tensors."""
    kept: dict[Any, Any] = {}

    def remembers(**given: Any) -> None:
        for name in names:
            value = given[name]
            if value is not None:
                given[name] = kept.setdefault((name, value.data_ptr(), value.shape), value.clone())
        per_expert("moe_gemm2").function(**given)

    parameters = frozenset(operator("moe_gemm2").arguments) | {"out"}
    return Kernel("remembers", "moe_gemm2", remembers, "within-budget", parameters=parameters)


@pytest.mark.parametrize("names", [("topk_ids",), ("expert_mask",), ("topk_ids", "expert_mask", "topk_weights")])
def test_routes_that_are_remembered_are_seen(names: tuple[str, ...]) -> None:
    cases = [case for case in family("moe_gemm2", "F34-routes") if case.params["mask"] == "yes"]
    judge = Judge(Settings())
    for case in cases:
        assert judge.run(case, remembering()).state == "pass"
        found = judge.run(case, remembering(*names))
        assert found.state == "fail", (case.id, names)
        assert "other values at the same addresses" in found.message


def test_a_number_of_rows_that_is_remembered_is_seen() -> None:
    """How many rows the sort made: more in the other draw in some cases, fewer in others."""
    more, fewer = 0, 0
    for case in family("moe_gemm2", "F34-routes"):
        shared = Shared()
        rows = [int(operator("moe_gemm2").inputs(one, "reduced", CPU, shared).arguments["num_valid_ids"])
                for one in (case, other_draw(case))]
        more, fewer = more + (rows[1] > rows[0]), fewer + (rows[1] < rows[0])
    assert more >= 3
    assert fewer >= 3
