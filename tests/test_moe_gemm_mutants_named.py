"""First sentences of two-stage MoE for mutants: what passes between the stages, subnormal fp8 numbers, group scales,
and routes that are left out. The twin is right on each of these cases."""

from __future__ import annotations

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, per_expert, prepared, result, verdict

from conformance import mutants
from conformance.case import parse_case
from conformance.errors import ConformanceError
from conformance.judging.judge import Judge
from conformance.operator import Shared
from conformance.registry import MUTANTS, kernels, matrix, operator
from conformance.result import Settings
from conformance.zoo.kill_matrix import cause_of

pytestmark = pytest.mark.usefixtures("one_thread")
for _name in OPERATORS:
    kernels(_name, (MUTANTS,))
_POINT = "tokens:45-hidden:128-inter:128-experts:6-topk:3-bm:16-in:{}-mode:reduce-out:{}-mask:{}"
_ODD = _POINT.replace("topk:3", "topk:4") + "-routing:one_expert"  # the last expert has three blocks
_SMALL = _POINT + "-data:subnormal_codes"
# mutant, operator, case, cause
NAMED = [
    *(("between_fp32", "moe_gemm_2stage", _POINT.format(dtype, "f16", "yes"), "between-unrounded")
      for dtype in ("fp8", "int8", "bf16")),
    ("requantise_to_zero", "moe_gemm_2stage", _POINT.format("fp8", "bf16", "no"), "requantise-cut"),
    ("requantise_to_zero", "moe_gemm_2stage", _POINT.format("fp8", "f16", "no-encoding:fnuz"), "requantise-cut"),
    ("requantise_floor", "moe_gemm_2stage", _POINT.format("fp8", "f16", "yes"), "requantise-epsilon"),
    ("requantise_signed", "moe_gemm_2stage", _POINT.format("fp8", "f16", "yes"), "requantise-signed"),
    ("requantise_signed", "moe_gemm_2stage", _POINT.format("int8smooth", "bf16", "yes"), "requantise-signed"),
    ("smooth_global", "moe_gemm_2stage", _ODD.format("int8smooth", "bf16", "yes"), "smooth-by-global-id"),
    *(("group_scale_transposed", name, _POINT.format("int4_bf16_g32", "f16", "yes"), "group-scale-transposed")
      for name in OPERATORS[:2]),
    *(("last_block", name, _ODD.format("bf16", "f16", "no"), "last-block-dropped") for name in OPERATORS),
    *(("only_slot_0", name, _POINT.format("fp8", "bf16", "yes"), "slots-beyond-first-dropped")
      for name in OPERATORS[:2]),
    *(("fp8_flushed", name, _SMALL.format("fp8", "f16", f"no-encoding:{form}"), "fp8-subnormal")
      for name in OPERATORS for form in ("ocp", "fnuz")),
    *(("fp8_leading_one", name, _SMALL.format("fp8", "bf16", "no"), "fp8-subnormal") for name in OPERATORS[:2]),
    *(("mx_flushed_rows", name, _SMALL.format("a8w4", "f16", "no"), "fp8-subnormal") for name in OPERATORS),
]


@pytest.mark.parametrize(("mutant", "name", "point", "cause"), NAMED)
def test_the_first_sentence_names_the_fault(mutant: str, name: str, point: str, cause: str) -> None:
    case = parse_case(f"{name}/F/{point}")
    twin = Judge(Settings()).run(case, mutants.controls(name)["torch_control"])
    assert twin.state == "pass", twin.message
    found = Judge(Settings()).run(case, mutants.mutants(name)[mutant].kernel)
    assert (found.state, cause_of(found.record())) == ("fail", cause), found.message


@pytest.mark.parametrize("name", OPERATORS)
def test_subnormal_fp8_numbers_are_a_good_part_of_those_drawn(name: str) -> None:
    cases = [case for case in matrix(name).cases("edge") if case.family == "F23-subnormal-codes"]
    assert {case.get("in") for case in cases} == {"fp8", "a8w4"}
    for case in cases:
        call, reference = prepared(case.id)
        assert verdict(result(per_expert(name), call), call, reference).passed, case.id
        for argument in ("x", "a2", "w1", "w2"):
            stored = call.arguments.get(argument)
            if stored is None or not stored.dtype.is_floating_point:  # e2m1 is packed in bytes
                continue
            size, least = stored.float().abs(), torch.finfo(stored.dtype).smallest_normal
            used = size[size.isfinite() & (size <= 2 * least)]
            assert len(used) > size.numel() // 5 and used.max() > least, (case.id, argument)
            assert 0.2 < float(((used > 0) & (used < least)).float().mean()) < 0.8, (case.id, argument)


def test_subnormal_fp8_numbers_need_fp8() -> None:
    case = parse_case(f"moe_gemm2/F/{_SMALL.format('bf16', 'f16', 'no')}")
    with pytest.raises(ConformanceError, match="data:subnormal_codes needs fp8 rows, which in:bf16 has not"):
        operator("moe_gemm2").inputs(case, "reduced", CPU, Shared())
