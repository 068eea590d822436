"""What acts only beyond some size is seen by a case that a CPU runs: sums, columns, tokens, experts, bits of a sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.case import Case
from conformance.operator import Shared
from conformance.registry import matrix, operator
from kernels.gemm_2stage import per_expert as kernel_module
from references.moe_gemm_2stage.decoded import decode
from references.moe_gemm_2stage.stages import totals

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
Product = Callable[..., Tensor]
product: Product = kernel_module.product


def family(name: str, wanted: str) -> list[Case]:
    found = [case for case in matrix(name).cases("edge") if case.family == wanted]
    assert found
    return found


def seen(case: Case, monkeypatch: pytest.MonkeyPatch, wrong: Product) -> bool:
    """Whether the case fails the plain kernel with another product; the unchanged one passes."""
    call, reference = prepared(case.id)
    assert verdict(result(per_expert(case.operator), call), call, reference).passed, case.id
    with monkeypatch.context() as patch:
        patch.setattr(kernel_module, "product", wrong)
        return not verdict(result(per_expert(case.operator), call), call, reference).passed


@every_operator
@pytest.mark.parametrize("limit", [2048, 4096, 8192])
def test_a_loop_over_the_sum_that_ends_early_is_seen(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(left: Tensor, right: Tensor, exact: bool, group_scale: Tensor | None = None) -> Tensor:
        scale = None if group_scale is None else group_scale[: limit // 32]
        return product(left[:, :limit], right[:, :limit], exact, scale)

    plain = [case for case in family(name, "F27-extents") if case.params["in"] not in ("fp4", "a8w4")]
    found = {case.params["in"] for case in plain if seen(case, monkeypatch, short)}
    assert {"fp8", "int4_bf16_g32"} <= found or {"fp8", "bf16"} <= found


@every_operator
@pytest.mark.parametrize("limit", [2048, 4096, 8192])
def test_columns_without_a_tile_are_seen(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(*given: Tensor) -> Tensor:
        found = product(*given)
        found[:, limit:] = 0.0
        return found

    assert any(seen(case, monkeypatch, narrow) for case in family(name, "F27-extents"))


@every_operator
def test_accumulators_that_are_too_narrow_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (16, 18, 20, 22, 24, 25):
        half = 2.0 ** (bits - 1)

        def wrapped(left: Tensor, right: Tensor, exact: bool, group_scale: Tensor | None = None,
                    half: float = half) -> Tensor:
            return ((left.double() @ right.double().T + half) % (2 * half) - half).float()

        for case in family(name, "F12-one-sign"):
            if bits <= 22 or case.params["in"] != "int4":
                wide = name != "moe_gemm_2stage" or bits <= 20 or case.params["in"] != "int4"
                assert seen(case, monkeypatch, wrapped) or not wide, (case.id, bits)


def test_sums_of_one_sign_take_26_bits() -> None:
    for case in family("moe_gemm2", "F12-one-sign"):
        of = decode(prepared(case.id)[0])
        assert of.w2 is not None
        largest = float(totals(of.rows, of.w2, of.routes).abs().max())
        assert largest > (2.0**21 if case.params["in"] == "int4" else 2.0**25)


def test_ids_of_many_experts_reach_the_end_of_the_mask() -> None:
    """Masks and ids beyond any small table, valid and not."""
    for case in family("moe_reduction", "F27-experts"):
        given = operator("moe_reduction").inputs(case, "reduced", CPU, Shared()).arguments
        ids, known = given["topk_ids"], given["expert_mask"]
        valid = known[ids.long()] != 0
        assert len(known) > 2048
        assert int(ids[valid].max()) > 1900 and int(ids[~valid].max()) > 1900
        assert all(bool((ids[valid] < bound).any()) for bound in (256, 512, 1024))
