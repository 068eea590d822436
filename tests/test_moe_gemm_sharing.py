"""What references of two-stage MoE share between cases, chunks and calls changes no bit, and is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS

from conformance.case import parse_case
from conformance.formats import bits
from conformance.operator import Reference, Shared
from conformance.registry import operator
from references.moe_gemm_2stage import decoded, fp8, stages, storage
from references.moe_gemm_2stage import reference as module
from references.moe_gemm_2stage.dtypes import MODES
from references.moe_gemm_2stage.operands import Operand

pytestmark = pytest.mark.usefixtures("one_thread")
POINT = "{}/F/tokens:19-hidden:64-inter:64-experts:5-topk:2-bm:16-in:{}-mode:{}-out:{}-mask:no"
FORMS = (("atomic", "bf16"), ("reduce", "f16"), ("atomic", "f32"))


def reference(name: str, dtype: str, mode: str, out: str, shared: Shared) -> Reference:
    call = operator(name).inputs(parse_case(POINT.format(name, dtype, mode, out)), "official", CPU, shared)
    return operator(name).reference(call, shared)


def content(found: Reference) -> tuple[Any, ...]:
    """The golden's bits, then values and errors of the oracle, joined."""
    rows = list(found.oracle())
    assert [row.start for row in rows] == [0, *(row.stop for row in rows[:-1])]
    return bits(found.golden), torch.cat([row.value for row in rows]), torch.cat([row.error for row in rows])


def counted(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> list[str]:
    """Names of functions as they are called."""
    calls: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, outer)

    for place in places:
        wrap(*place)
    return calls


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("dtype", ["fp8", "int8smooth", "int4_bf16_g32"])
@pytest.mark.parametrize("name", OPERATORS)
def test_cases_of_a_group_share_sums_and_have_the_same_bits(
    name: str, dtype: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._CHUNK, "cpu", 1 << 21 if chunks == 1 else 5 * 2 * 128)  # five tokens
    alone = [content(reference(name, dtype, *form, Shared())) for form in FORMS if form[0] != "reduce" or "2" in name]
    calls = counted(monkeypatch, (stages, "dot"), (module.golden, "totals"), (decoded, "read_weight"))
    shared = Shared()
    together = []
    for form in (form for form in FORMS if form[0] != "reduce" or "2" in name):
        found = reference(name, dtype, *form, shared)
        together.append(content(found))
        assert all(torch.equal(a, b) for a, b in zip(content(found), together[-1], strict=True))  # asked for twice
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    products = 2 if name == "moe_gemm_2stage" else 1
    parts = 1 if chunks == 1 else {"moe_gemm1": 4, "moe_gemm2": 2, "moe_gemm_2stage": 4}[name]
    assert {each: calls.count(each) for each in set(calls)} == {
        "dot": products * parts, "totals": products * parts, "read_weight": products}


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK, "cpu", 1280)
    expected = content(reference("moe_gemm_2stage", "fp8", "atomic", "bf16", Shared()))
    monkeypatch.setattr(module, "_KEPT", 0)
    shared = Shared()
    found = reference("moe_gemm_2stage", "fp8", "atomic", "bf16", shared)
    assert all(torch.equal(a, b) for a, b in zip(content(found), expected, strict=True))
    calls = counted(monkeypatch, (stages, "dot"))
    assert all(torch.equal(a, b) for a, b in zip(content(found), expected, strict=True))
    assert len(calls) == 8  # two stages of four chunks, again


def test_policies_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    both = []
    for rule in ("truncate", "nearest"):
        case = parse_case(POINT.format("moe_gemm_2stage", "int8", "atomic", "f32") + f"-rule:{rule}")
        call = operator("moe_gemm_2stage").inputs(case, "official", CPU, shared)
        both.append(operator("moe_gemm_2stage").reference(call, shared))
    assert not torch.equal(both[0].golden, both[1].golden)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 24])
@pytest.mark.parametrize("form", [fp8.OCP, fp8.FNUZ])
def test_codes_by_pieces_are_those_of_each_element(
    form: fp8.Fp8, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fp8._PIECE, "cpu", 8)
    codes = torch.arange(count, dtype=torch.uint8) * 10
    values = fp8.decode(codes, form)
    assert values.shape == codes.shape
    one_by_one = [fp8.decode(codes[i], form) for i in range(count)]
    assert torch.equal(values, torch.stack(one_by_one) if one_by_one else values)
    assert torch.equal(fp8.encode(values, form), codes)
    if count == 24:  # a view whose elements do not lie in a row
        assert torch.equal(fp8.decode(codes.view(4, 6).T, form), values.view(4, 6).T)
        assert torch.equal(fp8.encode(values.view(4, 6).T, form), codes.view(4, 6).T)


def test_stored_weights_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fp8._PIECE, "cpu", 100)
    of = reference_operands()
    stored, scale = storage.store_weight(of, MODES["fp8"], "ocp")
    assert torch.equal(storage.read_weight(stored, scale, MODES["fp8"]).payload, of.payload)


def reference_operands() -> Operand:
    codes = torch.arange(2 * 32 * 64, dtype=torch.int64).remainder(0x7F).to(torch.uint8)
    return Operand(fp8.decode(codes.view(2, 32, 64), fp8.OCP), scale=torch.ones(2, 32))
