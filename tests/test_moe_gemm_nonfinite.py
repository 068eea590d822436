"""NaN in rows, weights and scales, what leaves f16 between the stages, and the ends of the rules of e8m0 scales: right
kernels pass each case that is meant for one, and a kernel that loses, clamps or shifts it passes none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.judging.vacuity import accepted
from conformance.registry import matrix
from kernels.gemm_2stage import microscaled
from kernels.gemm_2stage import per_expert as kernel_module
from references.moe_gemm_2stage.bounds import Bounded
from references.moe_gemm_2stage.chain import intermediate
from references.moe_gemm_2stage.dtypes import MODES
from references.moe_gemm_2stage.stages import Routes

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
MICROSCALED = ("fp4", "a8w4", "a16w4")
FAMILIES = {"moe_gemm1": ("F25-nonfinite", "F25-nan-blocks"),
            "moe_gemm2": ("F25-nan-weights", "F25-nan-scale", "F25-nan-blocks"),
            "moe_gemm_2stage": ("F25-nonfinite", "F25-nan-blocks", "F23-between", "F22-block-tops")}


def cases(name: str, *families: str, **params: tuple[str, ...]) -> list[Case]:
    found = [case for case in matrix(name).cases("edge") if case.family in families
             and all(case.params.get(key) in values for key, values in params.items())]
    assert found
    return found


def failure(case: Case) -> str | None:
    """The kind of failure of the plain kernel as it is now."""
    call, reference = prepared(case.id)
    return verdict(result(per_expert(case.operator), call), call, reference).kind


@every_operator
def test_right_kernels_pass_and_no_case_is_empty(name: str) -> None:
    for case in cases(name, *FAMILIES[name]):
        assert failure(case) is None, case.id
        call, reference = prepared(case.id)
        spoilt = reference.golden.isnan()
        if case.family != "F22-block-tops":
            assert bool((spoilt | reference.golden.isinf()).any()) and not bool(spoilt.all()), case.id
        else:
            assert bool(reference.golden.any()) and not bool(spoilt.any())
        assert accepted(call, reference) is None, case.id
    wanted = {"nonfinite", "nan_weights", "nan_blocks"}
    assert {case.params["data"] for case in cases(name, *FAMILIES[name], **{"in": MICROSCALED})} >= wanted


# ---- byte 255 of e8m0 -----------------------------------------------------------------------------------------------


POWERS = microscaled.powers
READ_AS = {  # what byte 255 is taken for
    "1": lambda codes: POWERS(codes).nan_to_num(nan=1.0),
    "0": lambda codes: POWERS(codes).nan_to_num(nan=0.0),
    "2^-20": lambda codes: POWERS(codes).nan_to_num(nan=2.0**-20),  # what overflows were NaN in the end, as it should
}


@every_operator
@pytest.mark.parametrize("number", READ_AS)
def test_a_nan_scale_that_is_read_as_a_number_is_seen(name: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cases of rows, and by those of weights."""
    monkeypatch.setattr(microscaled, "powers", READ_AS[number])
    families = [family for family in FAMILIES[name] if family.startswith("F25")]
    for case in cases(name, *families, **{"in": MICROSCALED}):
        if case.params["in"] != "a16w4" or case.params["data"] != "nonfinite":  # rows of bf16 have no scale
            assert failure(case) == "nan-map", case.id


@pytest.mark.parametrize(("name", "where"), [
    (name, where) for name in OPERATORS for where in ("rows and weights", "rows", "weights")
    if (name, where) != ("moe_gemm_2stage", "rows")])  # between the stages infinity makes a block NaN, as it should
def test_a_nan_scale_that_is_read_as_infinity_is_seen(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or as 2^128, which is infinity in fp32: what it is multiplied by has one sign and is never 0."""
    read_as = {which: getattr(microscaled, which) for which in ("row_matrix", "channel_matrix")}

    def infinite(which: str) -> Callable[..., Tensor]:
        def read(*given: Any) -> Tensor:
            with monkeypatch.context() as here:
                here.setattr(microscaled, "powers", lambda codes: POWERS(codes).nan_to_num(nan=torch.inf))
                return read_as[which](*given)
        return read

    if "rows" in where:
        monkeypatch.setattr(microscaled, "row_matrix", infinite("row_matrix"))
    if "weights" in where:
        monkeypatch.setattr(microscaled, "channel_matrix", infinite("channel_matrix"))
    for case in cases(name, "F25-nan-blocks"):
        if where != "rows" or case.params["in"] != "a16w4":  # its rows are bf16, without a scale
            assert failure(case) == "nan-map", case.id


@every_operator
def test_a_nan_in_one_kind_of_operand_alone_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights alone, of rows alone."""
    right = {"rows": microscaled.row_matrix, "channels": microscaled.channel_matrix}

    def scrubbed(which: str) -> Callable[..., Tensor]:
        return lambda *given: right[which](*given).nan_to_num(nan=0.0)

    for which, data, target in (("rows", "nonfinite", "row_matrix"), ("channels", "nan_weights", "channel_matrix")):
        monkeypatch.setattr(microscaled, target, scrubbed(which))
        families = [family for family in FAMILIES[name] if family.startswith("F25")]
        for case in cases(name, *families, **{"in": ("fp4", "a8w4"), "data": (data,)}):
            assert failure(case) == "nan-map", case.id
        monkeypatch.setattr(microscaled, target, right[which])


@every_operator
def test_nan_in_other_weights_and_scales_is_seen(name: str) -> None:
    """A kernel that scrubs the NaN of a weight, or of a scale of channels, groups or rows."""
    families = [family for family in FAMILIES[name] if family.startswith("F25")]
    for case in cases(name, *families):
        call, reference = prepared(case.id)
        scrubbed = {}
        for key, value in call.arguments.items():
            operand = key.startswith(("scale", "w1", "w2", "x", "a2")) and isinstance(value, Tensor)
            if operand and value.dtype.is_floating_point and bool(value.float().isnan().any()):
                scrubbed[key] = value.float().nan_to_num(nan=1.0).to(value.dtype)
        if scrubbed:
            found = verdict(result(per_expert(name), call, **scrubbed), call, reference)
            assert found.kind == "nan-map", case.id
        assert scrubbed or case.params["in"] in MICROSCALED


@every_operator
def test_a_routing_weight_that_is_nan_is_no_mask(name: str) -> None:
    for case in cases(name, "F25-nan-shares"):
        call, reference = prepared(case.id)
        weights = call.arguments["topk_weights"]
        assert bool(reference.golden.isnan().any()) and not bool(reference.golden.isnan().all()), case.id
        assert failure(case) is None, case.id
        for value in (0.0, 1.0):
            found = result(per_expert(name), call, topk_weights=weights.nan_to_num(nan=value))
            assert verdict(found, call, reference).kind == "nan-map", case.id
        assert accepted(call, reference) is None, case.id


# ---- between the stages ---------------------------------------------------------------------------------------------


CLEANED = {
    "the largest number": lambda out1: out1.nan_to_num(nan=torch.nan, posinf=65504.0, neginf=-65504.0),
    "zero": lambda out1: out1.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
    "the largest number, and NaN 0": lambda out1: out1.nan_to_num(nan=0.0, posinf=65504.0, neginf=-65504.0),
}


@pytest.mark.parametrize("how", CLEANED)
def test_a_block_between_the_stages_that_is_not_finite_is_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, plain = microscaled.requantised, kernel_module.requantise
    monkeypatch.setattr(microscaled, "requantised", lambda out1, *rest: right(CLEANED[how](out1), *rest))
    monkeypatch.setattr(kernel_module, "requantise", lambda out1, *rest: plain(CLEANED[how](out1), *rest))
    for case in cases("moe_gemm_2stage", "F23-between"):
        assert failure(case) in ("nan-map", "inf-map"), case.id
    for case in cases("moe_gemm_2stage", "F25-nonfinite", **{"in": ("fp4", "a8w4"), "data": ("nonfinite",)}):
        assert (failure(case) == "nan-map") == (how != "the largest number"), case.id


def test_what_is_certain_between_the_stages_is_judged_and_what_may_be_is_not() -> None:
    """A block with a NaN or an infinity is NaN, one with what may overflow is unknown, and the next one is neither."""
    value = torch.ones((1, 4, 64), dtype=torch.float64)
    error = torch.full_like(value, 1e-9)
    value[0, 0, 3], value[0, 1, 3], value[0, 2, 3] = torch.nan, -70000.0, 65510.0
    error[0, 2, 3] = 100.0
    routes = Routes(torch.zeros((1, 4), dtype=torch.int32), torch.ones((1, 4)))
    found = intermediate(Bounded(value, error), MODES["fp4"], routes)
    assert found.factors is not None and found.error is not None
    assert found.factors[0, :2, :32].isnan().all() and found.factors[0, 2:].isfinite().all()
    assert found.error[0, 2, :32].isinf().all() and found.error[0, [0, 1, 3]].isfinite().all()
    assert found.factors[..., 32:].isfinite().all() and found.error[..., 32:].isfinite().all()
    cast = intermediate(Bounded(value, error), MODES["bf16"], routes)
    assert cast.error is not None and cast.payload[0, 0, 3].isnan() and float(cast.payload[0, 1, 3]) == -torch.inf
    assert int(cast.error.isinf().sum()) == 1 and bool(cast.error[0, 2, 3].isinf())
    row = intermediate(Bounded(value, error), MODES["fp8"], routes)
    assert row.error is not None and row.error.isinf().all(dim=2).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("data", ["nonfinite", "larger"])
def test_rows_that_are_re_quantised_as_a_whole_have_no_such_case(data: str) -> None:
    with pytest.raises(ConformanceError, match="in:int8 says nothing"):
        prepared("moe_gemm_2stage/F/tokens:5-hidden:64-inter:64-experts:3-topk:2-bm:16-in:int8-mode:atomic-out:f16-"
                 f"mask:no-data:{data}")


# ---- the ends of the rules of scales --------------------------------------------------------------------------------


def edited(old: str, new: str) -> Callable[..., Tensor]:
    """The kernel's re-quantisation of blocks with one passage replaced."""
    source = inspect.getsource(microscaled.requantised)
    assert source.count(old) == 1
    names = vars(microscaled) | {"Tensor": Tensor}
    exec(source.replace(old, new), names)
    found: Callable[..., Tensor] = names["requantised"]
    return found


@pytest.mark.parametrize(("old", "new", "rules"), [
    ("mantissa * 2 > largest", "mantissa * 2 >= largest", ("up",)),
    ("mantissa >= 1 -", "mantissa > 1 -", ("even",)),
    ("exponent - 1 - range_exponent", "exponent - 1 - range_exponent - (mantissa == 0.5).int()",
     ("floor", "even", "up")),
    ("exponent - 1 - range_exponent", "exponent - 1 - range_exponent + (mantissa == 0.875).int()",
     ("floor", "up")),
])
def test_a_scale_that_is_one_step_off_at_a_bound_alone_is_seen(
        old: str, new: str, rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microscaled, "requantised", edited(old, new))
    seen = {(case.params["in"], case.params["rule"]) for case in cases("moe_gemm_2stage", "F22-block-tops")
            if failure(case) is not None}
    assert {(dtype, rule) for dtype in ("fp4", "a8w4") for rule in rules} <= seen


@pytest.mark.parametrize("name", ("moe_gemm1", "moe_gemm_2stage"))
def test_a_nan_of_the_gate_does_not_hide_behind_one_of_the_up_projection(name: str, monkeypatch: pytest.MonkeyPatch
                                                                         ) -> None:
    """As of a kernel that limits its gate with max() and min(), which take the number of a number and a NaN."""
    silu = torch.nn.functional.silu
    modes = tuple(key for key, mode in MODES.items() if name == "moe_gemm1" or not mode.row_quantised)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: silu(x).nan_to_num(0.0, torch.inf, -torch.inf))
    for case in cases(name, "F25-nonfinite", **{"in": modes, "data": ("nan_weights",)}):
        assert failure(case) == "nan-map", case.id
