"""moe_reduce_fused, moe_reduction and moe_sorting at the ends of what they take: slot counts that no model has, an x
without rows, scales below the normal range, special sf, ids outside, and what is remembered from the call before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import CPU, call_of, right, sample, subject
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.case import Case, data_seed, other_draw
from conformance.data.routing import as_mask, pattern
from conformance.errors import ConformanceError
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.operator import NOT_A_NUMBER, Shared
from conformance.registry import kernels, matrix, operator
from conformance.result import Result, Settings
from conformance.verdicts.verdict import Verdict, judge
from conformance.zoo.kill_matrix import cause_of
from references.moe_reduction import valid_slots

Given = dict[str, Any]


def family(name: str, wanted: str) -> list[Case]:
    found = [case for case in matrix(name).cases("edge") if case.family == wanted]
    assert found
    return found


def all_judged(kernel: Kernel, cases: list[Case]) -> list[Result]:
    found = Judge(Settings())
    return [found.run(case, kernel) for case in matrix(cases[0].operator).grouped(cases)]


def changing(change: Callable[[Given], None]) -> Kernel:
    """The right weighted reduction of arguments that ``change`` has edited."""

    def changed(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
        given = {"x": x, "token_topk_to_pos": token_topk_to_pos, "topk_weights": topk_weights, "x_sf": x_sf, "sf": sf}
        change(given)
        out.copy_(right(**given, dtype=out.dtype))

    return subject(changed)


def edited(kernel: str, name: str, change: Callable[[Given], None]) -> Kernel:
    """A shipped kernel of an operator on arguments that ``change`` has edited."""
    (shipped,) = kernels(name, [kernel])

    def changed(**given: Any) -> Any:
        change(given)
        return shipped.function(**given)

    return Kernel("changed", name, changed, "within-budget", parameters=shipped.parameters)


def failing(results: list[Result]) -> int:
    assert {result.state for result in results} <= {"pass", "fail"}, [r.message for r in results if r.state == "error"]
    return sum(result.state == "fail" for result in results)


# ---- moe_reduce_fused -----------------------------------------------------------------------------------------------

FUSED = ("F06-no-rows", "F07-odd-tokens", "F11-many-slots", "F18-scale-range", "F18-special-sf", "F34-routing")


@pytest.mark.parametrize("wanted", FUSED)
def test_a_right_kernel_of_another_kind_passes(wanted: str) -> None:
    assert failing(all_judged(changing(lambda given: None), family("moe_reduce_fused", wanted))) == 0


def slots_left_out(least: int, most: int) -> Callable[[Given], None]:
    """Of calls with ``least`` to ``most`` slots, the last one."""
    def change(given: Given) -> None:
        if least <= given["token_topk_to_pos"].shape[1] <= most:
            given["token_topk_to_pos"] = given["token_topk_to_pos"].clone()
            given["token_topk_to_pos"][:, -1] = -1

    return change


@pytest.mark.parametrize("slots", [10, 11, 13, 14, 15, 18, 31, 33, 63, 65, 127, 128])
def test_each_slot_count_is_tried(slots: int) -> None:
    cases = [case for case in family("moe_reduce_fused", "F11-many-slots") if case.number("topk") == slots]
    assert failing(all_judged(changing(slots_left_out(slots, slots)), cases)) == len(cases) > 0


def flushed(value: Tensor | None) -> Tensor | None:
    return None if value is None else torch.where(value.abs() < 2.0**-126, 0.0, value)


def flush(given: Given) -> None:
    given["topk_weights"], given["x_sf"] = flushed(given["topk_weights"]), flushed(given["x_sf"])


def flush_sf(given: Given) -> None:
    given["sf"] = flushed(given["sf"])


def clamp_sf(given: Given) -> None:
    given["sf"] = None if given["sf"] is None else given["sf"].clamp(-1e30, 1e30)


@pytest.mark.parametrize(("change", "seen"), [
    (flush, lambda case: case.get("scales") == "subnormal"), (flush_sf, lambda case: case.get("sf") == "subnormal"),
    (clamp_sf, lambda case: case.get("sf") == "greatest"),
])
def test_scales_that_are_flushed_or_clamped_are_seen(change: Callable[[Given], None],
                                                     seen: Callable[[Case], bool]) -> None:
    cases = family("moe_reduce_fused", "F18-scale-range")
    results = {result.case: result.state for result in all_judged(changing(change), cases)}
    assert [case.id for case in cases if results[case.id] != ("fail" if seen(case) else "pass")] == []


def reciprocal(value: Tensor | None) -> Tensor | None:
    """What dividing by the reciprocal multiplies by."""
    return None if value is None else 1 / (1 / value)


@pytest.mark.parametrize(("name", "changed", "expected"), [
    ("sf", reciprocal, {"sf-by-reciprocal"}), ("sf", flushed, {"sf-by-reciprocal", "sf-flushed"}),  # 0 either way
    ("x_sf", reciprocal, {"x_sf-by-reciprocal"}), ("x_sf", flushed, {"x_sf-flushed"}),
    ("topk_weights", reciprocal, {"weights-by-reciprocal"}), ("topk_weights", flushed, {"weights-flushed"}),
])
def test_reciprocals_that_overflow_and_scales_that_are_flushed_are_told_apart(
        name: str, changed: Callable[[Tensor | None], Tensor | None], expected: set[str]) -> None:
    def change(given: Given) -> None:
        given[name] = changed(given[name])

    results = all_judged(changing(change), family("moe_reduce_fused", "F18-scale-range"))
    causes = Counter(cause_of(result.record()) for result in results if result.state == "fail")
    del causes[None]  # of many failures some are diagnosed
    assert causes.most_common(1)[0][0] in expected, causes


def test_subnormal_scales_are_subnormal_and_their_products_are_not_rounded() -> None:
    for case in family("moe_reduce_fused", "F18-scale-range"):
        if case.get("scales") != "subnormal":
            continue
        given = call_of(case)[0].arguments
        small = given["topk_weights"] if case.params["xsf"] == "no" else given["x_sf"].nan_to_num(0.0)
        used = small[small != 0]
        for low, high in ((0.0, 2.0**-128), (2.0**-128, 2.0**-126), (2.0**-126, 1.0)):  # 1 / the first is infinite
            assert bool(((used.abs() >= low) & (used.abs() < high)).any())
        if given["topk_weights"] is not None and given["x_sf"] is not None:
            assert set(given["topk_weights"].unique().tolist()) <= {1.0, 2.0, 4.0}
    with pytest.raises(ConformanceError, match="scales:tiny is none of usual, subnormal"):
        call_of(sample(scales="tiny"))


def test_sf_of_0_times_infinity_is_nan() -> None:
    def skipped(given: Given) -> None:
        if given["sf"] is not None and float(given["sf"]) == 0:
            given["x"] = given["x"].float().nan_to_num(0.0, 0.0, 0.0).to(given["x"].dtype)
            for name in ("topk_weights", "x_sf"):
                given[name] = None if given[name] is None else given[name].nan_to_num(0.0, 0.0, 0.0)

    cases = [case for case in family("moe_reduce_fused", "F18-special-sf")
             if case.params["sf"] == "zero" and case.params["data"] == "nonfinite"]
    assert failing(all_judged(changing(skipped), cases)) == len(cases) > 2


@pytest.mark.parametrize("sf", ["nan", "infinite"])
def test_a_token_with_padding_only_may_be_nan_where_0_times_sf_is(sf: str) -> None:
    """Upstream's kernel multiplies its accumulator by sf; the golden gives +0. Nothing else is right."""
    case = sample(**{"in": "fp32", "out": "e4m3", "sf": sf, "routing": "some_empty", "tokens": 9, "topk": 2})
    call, reference = call_of(case)
    empty = (call.arguments["token_topk_to_pos"] < 0).all(dim=1)
    assert empty.tolist().count(True) >= 3
    assert bool((reference.golden[empty].float() == 0).all())
    rows = list(reference.oracle())
    also = torch.cat([part.also for part in rows])
    assert torch.equal(also == NOT_A_NUMBER, empty[:, None].expand(also.shape))

    def judged(value: float, promise: str = "within-budget") -> Verdict:
        result = reference.golden.float()
        result[empty] = value
        return judge(result.to(torch.float8_e4m3fn), call, reference, promise, 0.0)

    assert judged(0.0).level == "bit-exact"
    assert (judged(math.nan).kind, judged(math.nan).level) == (None, "within-budget")
    assert judged(math.nan, "bit-exact").kind == "bits"
    for wrong in (448.0, -448.0, 1.0):
        assert not judged(wrong).passed
    full = torch.where(empty[:, None], reference.golden.float(), math.nan if sf == "infinite" else 1.0)
    assert judge(full.to(torch.float8_e4m3fn), call, reference, "within-budget", 0.0).kind == "nan-map"


def test_no_rows() -> None:
    positions, rows = pattern("no_rows", 5, 3, 1, CPU)
    assert (rows, positions.shape, bool((positions == -1).all())) == (0, (5, 3), True)
    for case in family("moe_reduce_fused", "F06-no-rows"):
        call, reference = call_of(case)
        assert call.arguments["x"].shape == (0, 256)
        assert reference.golden.shape[0] == case.number("tokens")
        assert not bool(reference.golden.float().any())

    def left(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
        if len(x):
            out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))

    assert failing(all_judged(subject(left), family("moe_reduce_fused", "F06-no-rows"))) == 8


FACTS: dict[str, Callable[[Tensor], Any]] = {
    "most valid slots of a token": lambda valid: valid.sum(dim=1).max() if valid.numel() else 0,
    "valid slots": lambda valid: valid.sum(),
    "whether there is padding": lambda valid: bool((~valid).any()),
    "which slots are valid": lambda valid: valid.clone(),
}


def limited(valid: Tensor, fact: str, known: Any) -> Tensor:
    """The slots that a kernel takes which goes by a fact about an earlier call."""
    if fact == "most valid slots of a token":
        return valid & (valid.cumsum(dim=1) <= known)
    if fact == "valid slots":
        return valid & (valid.flatten().cumsum(0).view(valid.shape) <= known)
    if fact == "whether there is padding":
        return valid if known else torch.ones_like(valid)
    return valid & known


@pytest.mark.parametrize("by", ["shape", "address"])
@pytest.mark.parametrize("fact", FACTS)
def test_facts_about_the_first_routing_are_forgotten(fact: str, by: str) -> None:
    def kernel() -> Kernel:
        kept: dict[Any, Any] = {}

        def remembers(given: Given) -> None:
            positions = given["token_topk_to_pos"]
            key = positions.shape if by == "shape" else (positions.data_ptr(), positions.shape)
            known = kept.setdefault(key, FACTS[fact](positions >= 0))
            taken = limited(positions >= 0, fact, known)
            given["token_topk_to_pos"] = torch.where(taken, positions.clamp(min=0), -1)

        return changing(remembers)

    cases = family("moe_reduce_fused", "F34-routing")
    found = [Judge(Settings()).run(case, kernel()) for case in cases]
    assert failing(found) >= 3
    assert all("other values at the same addresses" in one.message for one in found if one.state == "fail")


# ---- moe_reduction --------------------------------------------------------------------------------------------------


def wraps_negative(given: Given) -> None:
    if (ids := given["topk_ids"]) is not None:
        experts = len(given["expert_mask"])
        given["topk_ids"] = torch.where((ids < -1) & (ids >= -experts), ids + experts, ids)


def wraps_modulo(given: Given) -> None:
    if (ids := given["topk_ids"]) is not None:
        experts = len(given["expert_mask"])
        given["topk_ids"] = torch.where((ids > experts) & (ids < 1 << 20), ids % experts, ids)


def clamps(given: Given) -> None:
    if given["topk_ids"] is not None:
        given["topk_ids"] = given["topk_ids"].clamp(0, len(given["expert_mask"]) - 1)


def one_is_none(given: Given) -> None:
    if given["expert_mask"] is not None and len(given["expert_mask"]) == 1:
        given["expert_mask"] = torch.zeros_like(given["expert_mask"])


@pytest.mark.parametrize("change", [wraps_negative, wraps_modulo, clamps, one_is_none])
def test_ids_outside_are_no_index_of_any_kind(change: Callable[[Given], None]) -> None:
    cases = family("moe_reduction", "F01-ids")
    assert failing(all_judged(edited("reduction_torch", "moe_reduction", lambda given: None), cases)) == 0
    assert failing(all_judged(edited("reduction_torch", "moe_reduction", change), cases)) >= 4


def test_ids_of_masked_slots_point_at_local_experts_when_they_are_wrapped() -> None:
    wrapped: list[Tensor] = []
    for case in family("moe_reduction", "F01-ids"):
        call = operator("moe_reduction").inputs(case, "reduced", CPU, Shared())
        ids, known = call.arguments["topk_ids"].long(), call.arguments["expert_mask"]
        outside = ids[~valid_slots(call.arguments)]
        assert bool(((outside < 0) | (outside >= len(known))).all())
        near = outside[(outside >= -len(known)) & (outside < 2 * len(known))]
        wrapped.append(known[near % len(known)] != 0)
        assert (len(known) == 1) == (case.params["ids"] == "one")
    assert float(torch.cat(wrapped).double().mean()) > 0.5


def test_masks_of_the_first_call_are_forgotten() -> None:
    for name in ("valid_mask", "topk_ids", "expert_mask"):
        def kernel(name: str = name) -> Kernel:
            kept: dict[Any, Tensor] = {}

            def remembers(given: Given) -> None:
                if (value := given[name]) is not None:
                    given[name] = kept.setdefault((value.data_ptr(), value.shape), value.clone())

            return edited("reduction_torch", "moe_reduction", remembers)

        cases = [case for case in family("moe_reduction", "F34-masks")
                 if (case.params["mask"] == "valid") == (name == "valid_mask")]
        assert failing([Judge(Settings()).run(case, kernel()) for case in cases]) >= len(cases) // 2


# ---- moe_sorting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topk_ids", "expert_mask"])
def test_routes_of_the_first_call_are_forgotten(name: str) -> None:
    (shipped,) = kernels("moe_sorting", ["sort_torch"])
    failed = 0
    cases = family("moe_sorting", "F34-routes")
    for case in cases:
        kept: dict[Any, Tensor] = {}

        def remembers(kept: dict[Any, Tensor] = kept, **given: Any) -> Any:
            if (value := given.get(name)) is not None:
                given[name] = kept.setdefault((value.data_ptr(), value.shape), value.clone())
            return shipped.function(**given)

        found = Judge(Settings()).run(case, Kernel("remembers", "moe_sorting", remembers, "within-budget",
                                                   parameters=shipped.parameters))
        assert found.state in ("pass", "fail"), found.message
        failed += found.state == "fail"
    assert failed >= (len(cases) * 3 // 4 if name == "topk_ids" else 5)


# ---- what they share ------------------------------------------------------------------------------------------------


def test_the_other_draw() -> None:
    case = Case("op", {"a": "1", "b": "2", "again_b": "3", "launch": "redraw"}, "F")
    assert other_draw(case) == Case("op", {"a": "1", "b": "3", "launch": "redraw", "draw": "2"}, "F")
    assert other_draw(Case("op", {"a": "1"})).params == {"a": "1", "draw": "2"}
    assert data_seed(case, ("launch",)) == data_seed(Case("op", {"a": "1", "b": "2"}, "F"), ())
    assert data_seed(case, ("launch",)) != data_seed(other_draw(case), ("launch",))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_masks_are_true_in_many_ways(dtype: torch.dtype) -> None:
    valid = torch.arange(600) % 3 != 0
    plain, every = as_mask(valid, dtype, "one", 1), as_mask(valid, dtype, "any", 1)
    assert (plain.dtype, every.dtype) == (dtype, dtype)
    assert torch.equal(plain != 0, valid)
    assert torch.equal(every != 0, valid)
    assert set(plain.tolist()) == {0, 1}
    assert len(set(every.tolist())) == (5 if dtype == torch.uint8 else 7)
    with pytest.raises(ConformanceError, match="unknown values of a mask 'some'"):
        as_mask(valid, dtype, "some", 1)
