"""fp32 scales below 2^-126 in the operators of two-stage MoE: numbers, whatever scale is applied first, and not 0."""

from __future__ import annotations

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.errors import ConformanceError
from conformance.judging.vacuity import accepted
from conformance.registry import MUTANTS, kernels, matrix

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILY = "F21-subnormal"
every_operator = pytest.mark.parametrize("name", OPERATORS)
_ORDERS = {
    "row first": "return acc * scale_w[expert] if scale_rows is None else acc * scale_rows[row][:, None] * "
    "scale_w[expert]",
    "scales first": "return acc * scale_w[expert] if scale_rows is None else acc * (scale_rows[row][:, None] * "
    "scale_w[expert])",
}


def flushed(value: Tensor) -> Tensor:
    return value.masked_fill(value.abs() < 2.0**-126, 0.0)


@every_operator
def test_subnormal_scales_that_count_as_zero_are_seen(name: str) -> None:
    family = [case for case in matrix(name).cases("edge") if case.family == FAMILY]
    assert {case.params["in"] for case in family} == {"fp8", "int8", "int8smooth", "int4", "int4_bf16", "int4_bf16_g32"}
    for case in family:
        call, reference = prepared(case.id)
        scales = {key: value for key, value in call.arguments.items()
                  if key.startswith("scale_") and isinstance(value, Tensor)}
        zeroed = {key: flushed(value) for key, value in scales.items()}
        assert any(not torch.equal(zeroed[key], scales[key]) for key in scales)
        assert verdict(result(per_expert(name), call, **zeroed), call, reference).kind == "budget", case.id
        assert accepted(call, reference) is None, case.id


@every_operator
@pytest.mark.parametrize("order", ["as documented", *_ORDERS])
def test_right_kernels_pass_in_whatever_order_scales_are_applied(name: str, order: str) -> None:
    kernels(name, (MUTANTS,))
    from kernels.mutants.gemm_2stage.family import sources

    edit = [("acc = acc * scale_w[expert]", _ORDERS[order])] if order in _ORDERS else []
    kernel = sources("torch", f"order_{list(_ORDERS).index(order)}" if edit else "order", {"per_expert": edit})[name]
    for case in matrix(name).cases("edge"):
        if case.family == FAMILY:
            call, reference = prepared(case.id)
            out = torch.full(call.output.shape, torch.nan, dtype=call.output.dtype)
            kernel.function(**call.arguments, out=out)
            assert verdict(out, call, reference).passed, case.id


@pytest.mark.parametrize(("data", "dtype"), [("subnormal_channels", "bf16"), ("subnormal_rows", "int4_bf16"),
                                             ("subnormal_channels", "fp4")])
def test_dtypes_without_such_scales_have_no_such_data(data: str, dtype: str) -> None:
    with pytest.raises(ConformanceError, match=f"data:{data} needs fp32 scales"):
        prepared(f"moe_gemm1/F/tokens:5-hidden:64-inter:64-experts:3-topk:2-bm:16-in:{dtype}-out:f16-mask:no-"
                 f"data:{data}")
