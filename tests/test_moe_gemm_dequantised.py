"""Weights that are dequantised before the product: of bf16 rows rounded to bf16 or not, of integer rows not at all."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, prepared, result, verdict
from gemm_samples import sample

from conformance import Kernel
from conformance.case import Case
from conformance.judging.judge import Judge
from conformance.registry import MUTANTS, kernels, matrix
from conformance.result import Settings
from conformance.zoo.kill_matrix import cause_of
from references.moe_gemm_2stage import stages
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.reference import with_fp32_sums
from references.moe_gemm_2stage.stages import Routes

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
BY_4 = ("int4_bf16", "int4_bf16_g32")
NEAREST = "({}).bfloat16().float()"
AWAY = "(({}).contiguous().view(__import__('torch').int32) + 0x8000 & -65536).view(scale.dtype)"
RIGHT = {"nearest even": NEAREST, "nearest away": AWAY, "fp32": "({})"}
CUT = "(({}).contiguous().view(__import__('torch').int32) & -65536).view(scale.dtype)"
SCALE = "scale_w[expert]"
# what is wrong beside the rounding: cast, scale, and the dtypes that show it
WRONG = {
    "cut": (CUT, SCALE, BY_4),
    "scale in bf16": (NEAREST, f"{SCALE}.bfloat16().float()", BY_4),
    "scale of the next group": (NEAREST, f"{SCALE}.roll(-1, 0)", BY_4[1:]),
    "last group has the scale before": (NEAREST, f"__import__('torch').cat([{SCALE}[:-1], {SCALE}[-2:-1]])", BY_4[1:]),
    "scale of the next channel": (NEAREST, f"{SCALE}.roll(-1, -1)", BY_4),
    "zero point of 1": ("(({} + scale)).bfloat16().float()", SCALE, BY_4),
    "fp16": ("({}).half().float()", SCALE, BY_4),
}


def cases(name: str, family: str, *dtypes: str) -> list[Case]:
    found = [case for case in matrix(name).cases("edge")
             if case.family == family and case.params["in"] in dtypes]
    assert found
    return found


def dequantising(name: str, cast: str, scale: str = SCALE) -> Kernel:
    """The plain kernel with 4-bit weights of bf16 rows multiplied by ``scale`` before the product, and cast."""
    kernels(name, (MUTANTS,))
    from kernels.mutants.gemm_2stage.family import dequantised, sources

    return kernel(name, sources("torch", "dequantising", {"per_expert": [dequantised(cast, scale)]}))


def kernel(name: str, found: dict) -> Kernel:
    function = found[name].function
    return Kernel("dequantising", name, function, "within-budget",
                  parameters=frozenset(inspect.signature(function).parameters))


@every_operator
@pytest.mark.parametrize("how", RIGHT)
@pytest.mark.parametrize("family", ["F17-dtypes", "F12-accuracy", "F23-overflow", "F21-subnormal", "F25-nonfinite",
                                    "F27-extents"])
def test_weights_that_are_rounded_to_bf16_are_right(name: str, how: str, family: str) -> None:
    of = dequantising(name, RIGHT[how])
    for case in cases(name, family, *BY_4):
        call, reference = prepared(case.id)
        assert verdict(result(of, call), call, reference).passed, case.id


@pytest.mark.parametrize("how", RIGHT)
@pytest.mark.parametrize("name", OPERATORS[:2])
def test_terms_of_thousands_have_no_published_tolerance(name: str, how: str) -> None:
    of = dequantising(name, RIGHT[how])
    for case in cases(name, "F23-range", *BY_4):
        call, reference = prepared(case.id)
        assert reference.published == math.inf
        assert verdict(result(of, call), call, reference).passed, case.id


@pytest.mark.parametrize(("name", "what"), [
    (name, what) for name in OPERATORS for what in WRONG
    if (name, what) != ("moe_gemm_2stage", "fp16")])  # f16 between the stages is as coarse
def test_what_else_is_wrong_is_still_seen(name: str, what: str) -> None:
    cast, scale, dtypes = WRONG[what]
    of = dequantising(name, cast, scale)
    for case in cases(name, "F17-dtypes", *dtypes):
        call, reference = prepared(case.id)
        assert verdict(result(of, call), call, reference).kind == "budget", case.id


def test_the_budget_of_rounded_weights_is_far_below_a_multiple_of_the_magnitudes() -> None:
    """2^-8 S, which holds for any rounding, is what an accumulator in bf16 would be lost in."""
    for dtype in BY_4:
        of = sample(dtype)
        moved = stages.moved_by_bf16(of.a2, of.w2, of.routes)[of.routes.valid]
        size = stages.dot(of.a2, of.w2, of.routes).size[of.routes.valid]
        if of.w2.scale is not None:
            size *= of.w2.scale[of.routes.ids[of.routes.valid].long()]
        share = moved / size / 2.0**-8
        assert 0 < float(share.median()) < 0.1
        assert float(share.max()) < 1


def test_a_product_beside_a_tie_may_be_rounded_either_way() -> None:
    tie = 1 + 2.0**-8  # between two numbers of bf16, 2^-7 apart
    rows = Operand(torch.tensor([[[2.0, 1.0]]]))
    routes = Routes(torch.zeros((1, 1), dtype=torch.int32), torch.ones((1, 1)))
    for scale, most in ((tie, 3 * 2.0**-8), (tie + 2.0**-23, 3 * 2.0**-8), (1.0, 0.0)):
        moved = stages.moved_by_bf16(rows, Operand(torch.ones((1, 1, 2)), scale=torch.tensor([[scale]])), routes)
        assert most <= float(moved) <= 3.01 * most, scale


@pytest.mark.parametrize("name", OPERATORS[:2])
@pytest.mark.parametrize("dtype", ["int8", "int8smooth", "int4"])
def test_integers_that_are_dequantised_before_the_sum_are_named(name: str, dtype: str) -> None:
    kernels(name, (MUTANTS,))
    from kernels.mutants.gemm_2stage.family import BEFORE_SUMS, sources

    early = f"""    if in_dtype in _INTEGER:
        return (rows[row] * scale_rows[row][:, None]) @ (weight_matrix(w[expert]) * scale_w[expert][:, None]).T
{BEFORE_SUMS}"""
    of = kernel(name, sources("torch", "early", {"per_expert": [(BEFORE_SUMS, early)]}))
    failed = 0
    for case in cases(name, "F17-dtypes", dtype):
        call, _ = prepared(case.id)
        found = Judge(Settings()).run(case, of)
        if found.state == "fail":
            failed += 1
            assert cause_of(found.record()) == "sum-of-dequantised", found.message
            assert "dequantised before the sum" in found.message
        allowed = with_fp32_sums(call)
        assert allowed is not None and verdict(result(of, call), call, allowed).passed
    assert failed


def test_only_sums_of_integers_have_another_budget() -> None:
    call, _ = prepared(cases("moe_gemm2", "F17-dtypes", "fp8")[0].id)
    assert with_fp32_sums(call) is None
