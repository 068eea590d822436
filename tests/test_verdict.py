"""Verdicts: each seeded fault gets its kind and its place, and nothing that is right is called wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import CPU, call_of, narrow, right, sample
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.case import Case
from conformance.data.values import PATTERNS
from conformance.formats import FORMATS, bits
from conformance.operator import Call, OracleRows, Output, Reference
from conformance.verdicts import measurement
from conformance.verdicts.verdict import Verdict, check_form, golden_fraction, judge

INF, NAN = math.inf, math.nan
COMBINATIONS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3")]
every_combination = pytest.mark.parametrize(("source", "target"), COMBINATIONS)


def judged(result: Tensor, call: Call, reference: Reference, promise: str = "within-budget") -> Verdict:
    assert check_form(result, call.output, CPU) is None
    return judge(result, call, reference, promise, golden_fraction(reference)())


def made(values: list[list[float]], errors: float | list[list[float]], form: str,
         golden: list[list[float]] | None = None, regime: str = "real", fixed: list[bool] | None = None,
         chunk: int = 1) -> tuple[Call, Reference]:
    """A call and reference with given exact values (fp64), errors before the cast, and golden (else: cast values)."""
    value = torch.tensor(values, dtype=torch.float64)
    error = torch.tensor(errors, dtype=torch.float32).expand_as(value)
    dtype = FORMATS[form].dtype
    best = narrow(value.float(), dtype) if golden is None else torch.tensor(golden).to(dtype)
    rows = None if fixed is None else torch.tensor(fixed)
    call = Call(Case("op", {}), {}, Output(tuple(value.shape), dtype), lambda which: None, regime, rows)
    parts = [OracleRows(n, min(n + chunk, len(value)), value[n : n + chunk], error[n : n + chunk])
             for n in range(0, len(value), chunk)]
    return call, Reference(best, lambda: iter(parts))


def of(form: str, *rows: list[float]) -> Tensor:
    return torch.tensor(rows).to(FORMATS[form].dtype)


def next_up(value: Tensor, steps: int = 1) -> Tensor:
    """The number ``steps`` places further from zero in value's own format."""
    raw = bits(value)
    return (raw + steps).to(raw.dtype).view(value.dtype)


# ---- what is right --------------------------------------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("promise", ["bit-exact", "within-budget", "published"])
def test_the_golden_is_bit_exact(source: str, target: str, promise: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "tokens": 31}))
    found = judged(reference.golden.clone(), call, reference, promise)
    assert found == Verdict("bit-exact", budget_fraction=golden_fraction(reference)())
    assert found.passed
    assert 0.1 < found.budget_fraction <= 1.0


@every_combination
def test_another_right_arithmetic_is_within_budget(source: str, target: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "tokens": 61, "topk": 9, "xsf": "yes"}))
    result = right(*call.arguments.values(), dtype=call.output.dtype)
    found = judged(result, call, reference)
    assert found.passed
    assert found.kind is None
    assert found.budget_fraction <= 1.0
    if source == "fp32" and target == "fp32":
        assert found.level == "within-budget"
        assert 0 < found.max_error < 1e-5
        exact = judged(result, call, reference, promise="bit-exact")
        assert (exact.kind, exact.level) == ("bits", "within-budget")
        assert exact.wrong == int((bits(result) != bits(reference.golden)).sum())
        assert "promised bit-exact, reached within-budget" in exact.message


def test_an_output_without_tokens() -> None:
    call, reference = call_of(sample(tokens=0))
    assert judged(torch.empty(0, 256), call, reference, "bit-exact").level == "bit-exact"
    assert golden_fraction(reference)() == 0.0


@pytest.mark.parametrize("name", list(PATTERNS))
@every_combination
def test_both_ways_of_measuring_agree(name: str, source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick fp32 measurement settles what it can; what it says must be what fp64 says."""
    case = sample(**{"in": source, "out": target, "data": name, "tokens": 13, "topk": 6, "xsf": "yes"})
    call, reference = call_of(case)
    answer = right(*call.arguments.values(), dtype=call.output.dtype)
    nudged = answer.clone()
    nudged[3, 7] = next_up(nudged[3, 7])
    results = [reference.golden, answer, nudged, (answer.float() * 1.02).to(answer.dtype), torch.zeros_like(answer)]
    quick = [judged(result, call, reference) for result in results]
    everything = lambda result, *_: torch.ones_like(result, dtype=torch.bool).nonzero()  # noqa: E731
    monkeypatch.setattr(measurement, "_unsettled", everything)
    for result, fast in zip(results, quick, strict=True):
        slow = judged(result, call, reference)
        figures = {"budget_fraction": slow.budget_fraction, "max_error": slow.max_error, "message": slow.message}
        assert repr(dataclasses.replace(fast, **figures)) == repr(slow)  # as text: NaN is not equal to itself
        # Rounding the exact value to fp32 hides 2**-24 of it, which shows most beside the half ULP of fp16.
        # Budgets of "low" numbers are themselves subnormal in fp32.
        near = 2.0 ** (FORMATS[target].precision - 22) if target != "fp32" else 1e-4 if name == "low" else 1e-5
        half_subnormal = 0.02 if target == "fp32" and name in ("zeros", "negative_zeros") else 0.0
        if slow.budget_fraction is not None:
            assert fast.budget_fraction == pytest.approx(slow.budget_fraction, rel=near, abs=half_subnormal)
        if slow.max_error is not None:
            assert fast.max_error == pytest.approx(slow.max_error, rel=near)


def test_a_budget_that_overflows_fp32_excuses_nothing() -> None:
    """The sum of magnitudes is infinite where x is: 416 is not the saturated value, 448, however wide the sum."""
    call, reference = made([[INF, 1.0]], [[INF, 1e-6]], "e4m3", golden=[[448.0, 1.0]])
    assert judged(of("e4m3", [448.0, 1.0]), call, reference).passed
    found = judged(of("e4m3", [416.0, 1.0]), call, reference)
    assert (found.kind, found.wrong) == ("budget", 1)


# ---- single elements ------------------------------------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("place", [(0, 0), (17, 200), (60, 255)])
def test_one_wrong_element_among_many(source: str, target: str, place: tuple[int, int]) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "tokens": 61, "topk": 9, "routing": "shuffled"}))
    result = reference.golden.clone()
    result[place] = 4 + 2 * result[place].float().abs()
    found = judged(result, call, reference)
    assert (found.kind, found.level, found.wrong) == ("budget", None, 1)
    assert found.budget_fraction > 10
    assert found.first["index"] == list(place)
    assert found.first["actual"] == float(result[place])
    assert found.first["expected"] == pytest.approx(float(reference.golden[place]), rel=0.07)
    assert found.message.startswith(f"1 of {61 * 256} elements exceed the error budget")
    assert f"first at {list(place)}" in found.message


@every_combination
def test_one_nan_among_many(source: str, target: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target}))
    result = reference.golden.clone()
    result[2, 9] = NAN
    found = judged(result, call, reference, "published")
    assert (found.kind, found.level, found.wrong) == ("nan-map", None, 1)
    assert found.first["index"] == [2, 9]
    assert math.isnan(found.first["actual"])
    assert "1 of 1280 elements are NaN on one side only" in found.message


@every_combination
def test_nothing_but_nan(source: str, target: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target}))
    found = judged(torch.full_like(reference.golden, NAN), call, reference, "published")
    assert (found.kind, found.wrong) == ("nan-map", 1280)


@every_combination
def test_a_missing_nan(source: str, target: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "data": "nonfinite", "tokens": 27}))
    nan = reference.golden.float().isnan()
    assert 0 < int(nan.sum()) < nan.numel() / 5
    result = torch.where(nan, torch.zeros_like(reference.golden), reference.golden)
    found = judged(result, call, reference, "published")
    assert (found.kind, found.wrong) == ("nan-map", int(nan.sum()))
    moved = judged(reference.golden.roll(1, 1), call, reference, "published")
    assert moved.kind == "nan-map"  # as many NaNs, elsewhere


def test_a_nan_of_other_bits_is_the_same_nan() -> None:
    call, reference = made([[NAN, 1.0]], 1e-7, "fp32")
    result = torch.tensor([[0x7FC12345, 0x3F800000]], dtype=torch.int32).view(torch.float32)
    assert judged(result, call, reference, "bit-exact").passed
    negative = torch.tensor([[0xFFC00000 - 2**32, 0x3F800000]], dtype=torch.int32).view(torch.float32)
    assert judged(negative, call, reference, "bit-exact").passed


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("expected", "actual"), [
    (INF, -INF), (-INF, INF), (INF, 5.0), (5.0, INF), (5.0, -INF), (-INF, 0.0), (INF, "max"),
])
def test_wrong_infinities(form: str, expected: float, actual: float | str) -> None:
    call, reference = made([[1.0, 2.0], [3.0, expected]], [[1e-7, 1e-7], [1e-7, abs(expected) * 1e-7]], form)
    value = FORMATS[form].maximum if actual == "max" else actual
    for promise in ("bit-exact", "within-budget", "published"):
        found = judged(of(form, [1.0, 2.0], [3.0, value]), call, reference, promise)
        assert (found.kind, found.wrong, found.level) == ("inf-map", 1, None)
        assert found.first == {"index": [1, 1], "expected": expected, "actual": value}
        assert "infinite on one side only, or of the other sign" in found.message


def test_right_infinities_pass_beside_an_inexact_element() -> None:
    call, reference = made([[INF, -INF, 1.0]], [[INF, INF, 1e-6]], "fp32")
    found = judged(of("fp32", [INF, -INF, 1.0 + 2.0**-22]), call, reference)
    assert found.level == "within-budget"
    assert found.budget_fraction < 1
    assert found.max_error == 2.0**-22


# ---- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_place_off_passes_near_a_tie_only(form: str, sign: float) -> None:
    step = 2.0 ** (1 - FORMATS[form].precision)  # between 1 and 2
    error = step / 1000
    low = of(form, [sign * (1 + step)])
    for beside in (-0.9, 0.9):  # in units of the error: on either side of the tie
        tie = sign * (1 + 1.5 * step + beside * error)
        call, reference = made([[tie]], error, form)
        assert judged(low, call, reference).passed
        assert judged(next_up(low), call, reference).passed
        for wrong in (next_up(low, -1), next_up(low, 2)):
            found = judged(wrong, call, reference)
            assert (found.kind, found.wrong) == ("budget", 1)
            assert found.budget_fraction > 2.9
    call, reference = made([[sign * (1 + 1.5 * step + 1.1 * error)]], error, form)
    assert judged(low, call, reference).kind == "budget"
    assert judged(next_up(low), call, reference).passed


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "e4m3"])
def test_the_smallest_numbers_have_half_of_their_step_as_budget(form: str) -> None:
    step = 2.0 ** (FORMATS[form].minimum_exponent - FORMATS[form].precision + 1)
    smallest = of(form, [0.0]).clone()
    smallest = next_up(smallest)
    assert float(smallest) == step
    for value, zero_passes, one_passes in ((0.4, True, False), (0.6, False, True), (0.0, True, False)):
        call, reference = made([[value * step]], 0.0, form)
        assert judged(of(form, [0.0]), call, reference).passed == zero_passes
        assert judged(smallest, call, reference).passed == one_passes
        assert judged(next_up(smallest), call, reference).kind in ("budget", "bits")


@pytest.mark.parametrize("form", ["bf16", "fp16", "e4m3"])
def test_across_the_edge_of_a_binade(form: str) -> None:
    """Just below 2 the step is half of that above: 2 is right for what rounds to it, the number after it never."""
    below, step = 2.0 - 2.0 ** (1 - FORMATS[form].precision), 2.0 ** (1 - FORMATS[form].precision)
    call, reference = made([[2.0 - step / 4]], 1e-9, form)
    two = of(form, [2.0])
    assert judged(two, call, reference).passed
    assert judged(of(form, [below]), call, reference).kind == "budget"
    assert judged(next_up(two), call, reference).kind == "budget"


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_truncation_instead_of_rounding(form: str) -> None:
    call, reference = call_of(sample(**{"in": form, "out": form, "tokens": 31, "routing": "shuffled"}))
    exact = right(*call.arguments.values(), dtype=torch.float32)
    kept = {"bf16": ~0xFFFF, "fp16": ~0x1FFF}[form]
    truncated = (exact.view(torch.int32) & kept).view(torch.float32).to(call.output.dtype)
    found = judged(truncated, call, reference)
    assert found.kind == "budget"
    assert 0.3 < found.wrong / truncated.numel() < 0.7
    assert 1.9 < found.budget_fraction < 2.01


@pytest.mark.parametrize("target", ["bf16", "fp32"])
@pytest.mark.parametrize("data", ["real", "small_addends", "cancel"])
def test_a_bf16_accumulator(target: str, data: str) -> None:
    call, reference = call_of(sample(**{"in": target, "out": target, "data": data, "tokens": 31, "topk": 9,
                                        "routing": "shuffled"}))
    arguments = call.arguments
    acc = torch.zeros(31, 256, dtype=torch.bfloat16)
    for slot in range(9):
        rows = arguments["x"][arguments["token_topk_to_pos"][:, slot].long()].float()
        acc = (acc.float() + rows * arguments["topk_weights"][:, slot, None]).bfloat16()
    found = judged(acc.to(call.output.dtype), call, reference)
    assert found.kind == ("exact" if data == "small_addends" else "budget")
    assert found.wrong > 31 * 256 / 10


# ---- whole outputs --------------------------------------------------------------------------------------------------


def without_last_slot(call: Call) -> Tensor:
    positions = call.arguments["token_topk_to_pos"].clone()
    positions[:, -1] = -1
    return right(**{**call.arguments, "token_topk_to_pos": positions}, dtype=call.output.dtype)


def swapped_weights(call: Call) -> Tensor:
    weights = call.arguments["topk_weights"].flip(1)
    return right(**{**call.arguments, "topk_weights": weights}, dtype=call.output.dtype)


def without(name: str) -> Callable[[Call], Tensor]:
    return lambda call: right(**{**call.arguments, name: None}, dtype=call.output.dtype)


def scaled(factor: float) -> Callable[[Call], Tensor]:
    return lambda call: narrow(right(**call.arguments, dtype=torch.float32) * factor, call.output.dtype)


FAULTS: dict[str, Callable[[Call], Tensor]] = {
    "scaled by 1.01": scaled(1.01),
    "scaled by 2": scaled(2.0),
    "negated": scaled(-1.0),
    "zeros": scaled(0.0),
    "rows shifted": lambda call: right(**call.arguments, dtype=call.output.dtype).roll(1, 0),
    "columns shifted": lambda call: right(**call.arguments, dtype=call.output.dtype).roll(1, 1),
    "weights of swapped slots": swapped_weights,
    "last slot dropped": without_last_slot,
    "weights ignored": without("topk_weights"),
    "x_sf ignored": without("x_sf"),
}


@every_combination
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("data", ["real", "exact"])
def test_faults_of_whole_outputs(fault: str, source: str, target: str, data: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "data": data, "tokens": 31, "xsf": "yes",
                                        "routing": "shuffled"}))
    for promise in ("bit-exact", "within-budget"):
        found = judged(FAULTS[fault](call), call, reference, promise)
        assert not found.passed
        if data == "exact":
            assert found.kind == "exact"
        else:
            assert found.kind == ("bits" if promise == "bit-exact" and found.level else "budget")
        assert found.wrong > 100


@every_combination
@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"scaled by 1.01"}))
def test_no_such_fault_is_within_the_published_tolerance(fault: str, source: str, target: str) -> None:
    params = {"in": source, "out": target, "xsf": "yes", "routing": "shuffled"}
    call, reference = call_of(sample(**params, tokens=31))
    found = judged(FAULTS[fault](call), call, reference, "published")
    assert (found.kind, found.level) == ("budget", None)


def test_sf_ignored() -> None:
    call, reference = call_of(sample(**{"in": "bf16", "out": "e4m3", "tokens": 31}))
    assert judged(without("sf")(call), call, reference, "published").kind == "budget"


# ---- levels and promises --------------------------------------------------------------------------------------------


def test_within_published_and_over_budget() -> None:
    call, reference = made([[1.0, 100.0]], 1e-6, "fp32")
    result = of("fp32", [1.0, 100.05])
    found = judged(result, call, reference, "published")
    assert found.passed
    assert found.level == "published"
    assert found.max_error == pytest.approx(0.05, rel=1e-3)
    assert found.budget_fraction == pytest.approx(0.05 / (1e-6 + 2.0**-18), rel=1e-2)
    held = judged(result, call, reference, "within-budget")
    assert (held.kind, held.level, held.wrong) == ("budget", "published", 1)
    exact = judged(result, call, reference, "bit-exact")
    assert (exact.kind, exact.level) == ("bits", "published")
    assert "reached published" in exact.message


@pytest.mark.parametrize(("form", "good", "bad"), [
    ("fp32", 10.0109, 10.0111), ("fp16", 10.0078125, 10.015625), ("bf16", 10.125, 10.1875), ("e4m3", 11.0, 12.0),
])
def test_the_published_tolerance_of_each_format(form: str, good: float, bad: float) -> None:
    """atol = rtol; a kernel that promises no more passes at the last number within it and fails at the next."""
    call, reference = made([[1.0, 10.0]], 1e-7, form)
    assert judged(of(form, [1.0, good]), call, reference, "published").level == "published"
    found = judged(of(form, [1.0, bad]), call, reference, "published")
    assert (found.level, found.passed, found.wrong) == (None, False, 1)


def test_within_budget_and_over_the_published_tolerance() -> None:
    """Cancellation of large terms: the budget allows what the field's tolerance does not, and both must hold."""
    call, reference = made([[5.0, 7.0], [0.0, 1.0]], [[1e-6, 1e-6], [0.5, 1e-6]], "fp32")
    found = judged(of("fp32", [5.0, 7.0], [0.25, 1.0]), call, reference)
    assert (found.kind, found.level, found.wrong) == ("published", None, 1)
    assert found.budget_fraction == pytest.approx(0.5)
    assert "exceed the published tolerance" in found.message
    assert found.first["index"] == [1, 0]
    assert found.first["actual"] == 0.25
    assert "first at [1, 0]: expected 0, got 0.25" in found.message


def test_the_first_wrong_element_counts_rows_from_the_start_of_the_output() -> None:
    for chunk in (1, 2, 3, 7):
        values = [[float(row), -float(row)] for row in range(7)]
        call, reference = made(values, 1e-7, "fp32", chunk=chunk)
        result = torch.tensor(values)
        result[4, 1] += 1
        result[6, 0] += 3
        found = judged(result, call, reference)
        assert (found.kind, found.wrong) == ("budget", 2)
        assert found.first["index"] == [4, 1]
        assert found.max_error == 3.0


# ---- exact data, zeros and fixed rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("promise", ["bit-exact", "within-budget", "published"])
def test_one_bit_of_exact_data(promise: str) -> None:
    call, reference = made([[3.0, 4.0]], 1e-3, "fp32", regime="exact")
    found = judged(of("fp32", [3.0, 4.0 + 2.0**-21]), call, reference, promise)
    assert (found.kind, found.wrong) == ("exact", 1)
    assert found.first == {"index": [0, 1], "expected": 4.0, "actual": 4.0 + 2.0**-21}
    assert "although this data makes every sum exact in any order" in found.message


@pytest.mark.parametrize("regime", ["real", "exact"])
@pytest.mark.parametrize(("golden", "actual"), [(0.0, -0.0), (-0.0, 0.0)])
def test_the_sign_of_a_zero_counts_for_bit_exactness_only(regime: str, golden: float, actual: float) -> None:
    call, reference = made([[0.0, 4.0]], 1e-7, "bf16", golden=[[golden, 4.0]], regime=regime)
    result = of("bf16", [actual, 4.0])
    assert judged(result, call, reference, "within-budget").level == "within-budget"
    assert judged(result, call, reference, "published").passed
    found = judged(result, call, reference, "bit-exact")
    assert (found.kind, found.level, found.wrong) == ("bits", "within-budget", 1)


@pytest.mark.parametrize("promise", ["bit-exact", "within-budget", "published"])
def test_rows_fixed_by_the_contract(promise: str) -> None:
    call, reference = made([[0.0, 0.0], [1.0, 0.0]], 1e-7, "fp32", fixed=[True, False])
    found = judged(of("fp32", [0.0, -0.0], [1.0, 0.0]), call, reference, promise)
    assert (found.kind, found.wrong) == ("bits", 1)
    assert found.first["index"] == [0, 1]
    assert "rows that the contract fixes bit by bit" in found.message
    free = judged(of("fp32", [0.0, 0.0], [1.0, -0.0]), call, reference, promise)
    assert free.passed == (promise != "bit-exact")


@pytest.mark.parametrize(("source", "target"), [*COMBINATIONS, ("fp32", "e4m3"), ("fp16", "e4m3")])
def test_minus_zero_for_a_token_of_padding(source: str, target: str) -> None:
    call, reference = call_of(sample(**{"in": source, "out": target, "routing": "some_empty", "tokens": 7}))
    result = reference.golden.clone()
    assert bool((bits(result[0]) == 0).all())
    result[0, 3] = -0.0
    assert judged(result, call, reference).kind == "bits"


# ---- the ends of the range ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_near_the_overflow_threshold_either_side_is_right(form: str, sign: float) -> None:
    largest = FORMATS[form].maximum
    half = largest * 0.5 / (2.0 ** FORMATS[form].precision - 1)  # half of the last step
    best, beyond = of(form, [sign * largest]), of(form, [sign * INF])
    for place, finite_passes, infinite_passes in (
        (0.0, True, False), (0.98, True, False), (0.995, True, True), (1.005, True, True), (1.03, False, True),
        (1e3, False, True),
    ):
        exact = sign * (largest + place * half)
        call, reference = made([[exact]], half / 100, form, golden=[[sign * (INF if place >= 1 else largest)]])
        assert judged(best, call, reference, "within-budget").passed == finite_passes, place
        assert judged(beyond, call, reference, "within-budget").passed == infinite_passes, place
        assert judged(-beyond, call, reference, "published").kind == "inf-map"


def test_saturation_of_e4m3() -> None:
    call, reference = made([[1e4, 464.0, 448.0, -1e9]], 1e-3, "e4m3")
    assert reference.golden.float().tolist() == [[448.0, 448.0, 448.0, -448.0]]
    assert judged(of("e4m3", [448.0, 448.0, 448.0, -448.0]), call, reference, "bit-exact").passed
    assert judged(of("e4m3", [448.0, 448.0, 416.0, -448.0]), call, reference).kind == "budget"
    upstream = of("e4m3", [448.0, 448.0, 448.0, -448.0])
    upstream[0, 0] = NAN  # overflow to NaN, another policy than the contract's
    assert judged(upstream, call, reference).kind == "nan-map"


# ---- form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("result", "message"), [
    (None, "it has no parameter for the output, so it must return its result, and returned None"),
    ([1.0], "returned list instead of a tensor"),
    (torch.zeros(2, 256, dtype=torch.float64), "dtype is torch.float64, torch.float32 is required"),
    (torch.zeros(256, 2), "shape is (256, 2), (2, 256) is required"),
    (torch.zeros(2, 256, 1), "shape is (2, 256, 1), (2, 256) is required"),
    (torch.zeros(2, 256, device="meta"), "device is meta, cpu is required"),
    (torch.zeros(256, 2).T, "strides are (1, 2), a contiguous result is required"),
    (torch.zeros(2, 512)[:, ::2], "strides are (512, 2), a contiguous result is required"),
    (torch.zeros(1, 256).expand(2, 256), "strides are (0, 1), a contiguous result is required"),
])
def test_a_wrong_form_is_named(result: Any, message: str) -> None:
    assert check_form(result, Output((2, 256), torch.float32), CPU) == message


def test_a_right_form() -> None:
    assert check_form(torch.zeros(2, 256), Output((2, 256), torch.float32), CPU) is None
    assert check_form(torch.zeros(256, 0).T, Output((0, 256), torch.float32), CPU) is None
