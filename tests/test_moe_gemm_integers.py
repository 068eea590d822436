"""Integer operands of two-stage MoE: weights hold every code, rows are symmetric, and the lowest code has its sign."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.registry import matrix
from kernels.gemm_2stage import per_expert as kernel_module
from kernels.gemm_2stage.unpack import weight_matrix
from references.moe_gemm_2stage.decoded import decode

pytestmark = pytest.mark.usefixtures("one_thread")
LOWEST = {"int8": -128.0, "int8smooth": -128.0, "int4": -8.0, "int4_bf16": -8.0, "int4_bf16_g32": -8.0}
READ_AS: dict[str, Callable[[float], float]] = {
    "its magnitude": lambda code: -code, "the next code": lambda code: code + 1, "zero": lambda code: 0.0}
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", LOWEST)


def cases(name: str, dtype: str) -> list[str]:
    found = [case.id for case in matrix(name).cases("edge")
             if case.family == "F17-dtypes" and case.params["in"] == dtype]
    assert found
    return found


@every_operator
@every_dtype
def test_weights_hold_the_lowest_code_and_rows_do_not(name: str, dtype: str) -> None:
    call, _ = prepared(cases(name, dtype)[0])
    of = decode(call)
    for w in (of.w1, of.w2):
        if w is not None:
            used = w.payload[of.routes.ids[of.routes.valid].long().unique()]
            assert float(used.min()) == LOWEST[dtype] and float(used.max()) == -LOWEST[dtype] - 1
            assert bool((used == LOWEST[dtype] + 1).any())
    if dtype.startswith("int8"):
        assert float(of.rows.payload.min()) == -127.0


@every_operator
@every_dtype
@pytest.mark.parametrize("how", READ_AS)
def test_a_lowest_code_that_is_read_as_another_is_seen(
        name: str, dtype: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by who negates a code, or takes its magnitude, in its own width."""
    lowest = LOWEST[dtype]

    def wrong(stored: Tensor) -> Tensor:
        found = weight_matrix(stored)
        return found.masked_fill(found == lowest, READ_AS[how](lowest))

    for case in cases(name, dtype):
        call, reference = prepared(case)
        assert verdict(result(per_expert(name), call), call, reference).passed, case
        monkeypatch.setattr(kernel_module, "weight_matrix", wrong)
        assert verdict(result(per_expert(name), call), call, reference).kind == "budget", case
        monkeypatch.setattr(kernel_module, "weight_matrix", weight_matrix)
