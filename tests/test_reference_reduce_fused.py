"""moe_reduce_fused: golden and oracle against exact fractions, the contract's rules, and the inputs of cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from engine_samples import (
    CPU,
    DTYPE_PAIRS,
    NAME,
    call_of,
    contract,
    digest,
    edge_cases,
    right,
    rounded,
    sample,
    subject,
)
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.case import Case
from conformance.data.values import PATTERNS
from conformance.errors import ConformanceError
from conformance.formats import FORMATS, bits
from conformance.operator import Call, Output, Shared
from conformance.registry import kernels, matrix
from conformance.verdicts.verdict import golden_fraction
from references.moe_reduce_fused import OPERATOR, cost, golden, memory, oracle, tokens_expected, validate

INF, NAN = math.inf, math.nan
E4M3 = torch.float8_e4m3fn
every_pair = pytest.mark.parametrize(("source", "target"), DTYPE_PAIRS)


# ---- the golden against exact arithmetic ----------------------------------------------------------------------------


def product32(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a * b == 0:
        return a * b
    return rounded(Fraction(a) * Fraction(b), "fp32")


def fma32(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c  # fp64 holds every product of two fp32 numbers: only what is infinite already counts here
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return a * b + c if exact == 0 else rounded(exact, "fp32")  # fp64 knows the sign of a zero


def cast_to(value: float, form: str) -> float:
    if math.isnan(value) or (math.isinf(value) and form != "e4m3"):
        return value
    if math.isinf(value):
        return math.copysign(448.0, value)
    return math.copysign(rounded(Fraction(value), form), value)


def exact_golden(call: Call, form: str) -> list[list[float]]:
    """Element by element, then slot by slot, every rounding by itself: the documented order and nothing else."""
    given = call.arguments
    x, positions = given["x"].tolist(), given["token_topk_to_pos"].tolist()
    weights = None if given["topk_weights"] is None else given["topk_weights"].tolist()
    x_sf = None if given["x_sf"] is None else given["x_sf"].tolist()
    sf = None if given["sf"] is None else float(given["sf"])
    out = []
    for t, slots in enumerate(positions):
        scales = []
        for j, p in enumerate(slots):
            scale = 1.0 if weights is None else weights[t][j]
            if p >= 0:
                scales.append((p, scale if x_sf is None else product32(scale, x_sf[p])))
        row = []
        for h in range(len(x[0])):
            acc = 0.0
            for p, scale in scales:
                acc = fma32(x[p][h], scale, acc)
            acc = acc if sf is None or not scales else product32(acc, sf)
            row.append(cast_to(acc, form))
        out.append(row)
    return out


@every_pair
@pytest.mark.parametrize(("weights", "xsf"), [("yes", "yes"), ("no", "yes"), ("yes", "no"), ("no", "no")])
def test_golden_is_bitwise_the_documented_order_of_roundings(source: str, target: str, weights: str, xsf: str) -> None:
    params = {"in": source, "out": target, "weights": weights, "xsf": xsf}
    assert_golden(sample(**params, tokens=3, topk=4), target)


@every_pair
@pytest.mark.parametrize("data", ["cancel", "tiny", "overflow", "nonfinite", "codes", "negative_zeros"])
def test_golden_is_bitwise_on_special_values(source: str, target: str, data: str) -> None:
    assert_golden(sample(**{"in": source, "out": target, "data": data, "xsf": "yes"}, tokens=2, topk=3), target)


def assert_golden(case: Case, form: str) -> None:
    call, reference = call_of(case)
    expected = torch.tensor(exact_golden(call, form), dtype=torch.float64)
    exact = expected.to(FORMATS[form].dtype)
    assert torch.equal(exact.double().nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5)), "the model rounds wrongly"
    nan = reference.golden.float().isnan()
    assert torch.equal(nan, expected.isnan())
    wrong = (bits(reference.golden) != bits(exact)) & ~nan
    assert not bool(wrong.any()), f"{int(wrong.sum())} elements differ, first at {wrong.nonzero()[0].tolist()}"


def test_golden_fuses_multiply_and_add() -> None:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 with one rounding, 0 with two."""
    x = torch.tensor([[-(1 + 2.0**-11)], [1 + 2.0**-12]]).expand(2, 256).contiguous()
    positions = torch.tensor([[0, 1]], dtype=torch.int32)
    weights = torch.tensor([[1.0, 1 + 2.0**-12]])
    assert golden(x, positions, weights).unique().tolist() == [2.0**-24]


def test_golden_adds_slots_in_ascending_order() -> None:
    x = torch.tensor([[2.0**24], [1.0], [-(2.0**24)], [1.0]]).expand(4, 256).contiguous()
    for order, expected in (([0, 1, 2, 3], 1.0), ([0, 2, 1, 3], 2.0), ([1, 3, 0, 2], 2.0), ([3, 0, 2, 1], 1.0)):
        assert golden(x, torch.tensor([order], dtype=torch.int32)).unique().tolist() == [expected]


def test_golden_of_more_tokens_than_one_chunk() -> None:
    x = torch.arange(1, 11.0)[:, None].expand(10, 2048).contiguous()
    positions = (torch.arange(200, dtype=torch.int32) % 10).reshape(100, 2)
    positions[70:80, 1] = -1
    expected = torch.tensor([[float(sum(p + 1 for p in row if p >= 0))] for row in positions.tolist()])
    assert torch.equal(golden(x, positions), expected.expand(100, 2048))
    rows = list(oracle({"x": x, "token_topk_to_pos": positions, "topk_weights": None, "x_sf": None, "sf": None}))
    assert len(rows) > 1
    assert [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])]
    assert rows[-1].stop == 100
    assert torch.equal(torch.cat([r.value for r in rows]), expected.double().expand(100, 2048))


# ---- the oracle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", list(PATTERNS))
@every_pair
def test_golden_is_within_its_own_budget(data: str, source: str, target: str) -> None:
    for weights, xsf in itertools.product(("yes", "no"), repeat=2):
        for topk, tokens in ((1, 3), (9, 5)):
            case = sample(**{"in": source, "out": target, "data": data, "weights": weights, "xsf": xsf}, topk=topk,
                          tokens=tokens)
            _, reference = call_of(case)
            assert golden_fraction(reference)() <= 1.0, case.id


@pytest.mark.parametrize("source", ["fp32", "bf16"])
def test_the_oracle_is_exact_and_its_error_is_the_stated_bound(source: str) -> None:
    call, _ = call_of(sample(**{"in": source, "out": source, "xsf": "yes"}, tokens=4, topk=5))
    given = call.arguments
    (rows,) = oracle(given)
    u = Fraction(2) ** -24
    for t, slots in enumerate(given["token_topk_to_pos"].tolist()):
        valid = [(j, p) for j, p in enumerate(slots) if p >= 0]
        n = len(valid) + 2
        for h in range(0, 256, 16):
            terms = [Fraction(float(given["x"][p, h])) * Fraction(float(given["topk_weights"][t, j]))
                     * Fraction(float(given["x_sf"][p])) for j, p in valid]
            size = sum(map(abs, terms), Fraction(0))
            assert abs(Fraction(float(rows.value[t, h])) - sum(terms)) <= size * Fraction(2) ** -50
            bound = n * u / (1 - n * u) * size
            error = Fraction(float(rows.error[t, h]))
            assert bound <= error <= bound * (1 + Fraction(2) ** -14) + (n + 1) * Fraction(2) ** -149


def test_the_error_grows_with_sf_and_the_value_with_its_sign() -> None:
    plain = Case(NAME, {**sample(**{"in": "bf16", "out": "e4m3"}).params, "sf": "none"})
    call, reference = call_of(plain)
    (before,) = reference.oracle()
    call.arguments["sf"] = torch.tensor([-2.5])
    (after,) = OPERATOR.reference(call, Shared()).oracle()
    assert torch.equal(after.value, before.value * -2.5)
    assert bool((after.error >= before.error * 2.5).all())
    assert bool((after.error <= before.error * 2.5 * (1 + 1e-5) + 1e-40).all())


def test_references_of_a_group_are_those_of_each_case_alone() -> None:
    shared = Shared()
    for weights, xsf, out in itertools.product(("yes", "no"), ("yes", "no"), ("bf16", "e4m3")):
        case = sample(**{"in": "bf16", "out": out, "weights": weights, "xsf": xsf})
        call = contract().inputs(case, "reduced", CPU, shared)
        together = contract().reference(call, shared)
        _, alone = call_of(case)
        assert torch.equal(bits(together.golden), bits(alone.golden))
        (one,), (two,) = together.oracle(), alone.oracle()
        assert torch.equal(one.value, two.value)
        assert torch.equal(one.error, two.error)


# ---- rules of the contract ------------------------------------------------------------------------------------------


@every_pair
def test_no_tokens_give_an_empty_output(source: str, target: str) -> None:
    x, positions = torch.ones(3, 512, dtype=FORMATS[source].dtype), torch.empty(0, 4, dtype=torch.int32)
    sf, dtype = torch.ones(1) if target == "e4m3" else None, FORMATS[target].dtype
    result = golden(x, positions, torch.empty(0, 4), torch.ones(3), sf, dtype)
    assert result.shape == (0, 512)
    assert result.dtype == dtype


@pytest.mark.parametrize("sf", [-1.0, 2.0, -INF, NAN])
def test_padding_only_is_plus_zero_for_every_sf(sf: float) -> None:
    x = torch.full((2, 256), NAN)
    positions = torch.full((3, 2), -1, dtype=torch.int32)
    result = golden(x, positions, torch.full((3, 2), NAN), torch.full((2,), NAN), torch.tensor([sf]), E4M3)
    assert bits(result).unique().tolist() == [0]
    assert bits(golden(x, positions)).unique().tolist() == [0]
    assert bits(golden(x[:0], positions)).unique().tolist() == [0]


def test_zeros_of_either_sign_sum_to_plus_zero() -> None:
    x = torch.tensor([[0.0], [-0.0]]).expand(2, 256).contiguous()
    for row in ([0, 0], [1, 1], [0, 1], [1, -1]):
        assert bits(golden(x, torch.tensor([row], dtype=torch.int32))).unique().tolist() == [0]
    negative = golden(x, torch.tensor([[0]], dtype=torch.int32), sf=torch.tensor([-1.0]), out_dtype=E4M3)
    assert bits(negative).unique().tolist() == [0x80]  # a sum times a negative sf is -0: not a token of padding


@pytest.mark.parametrize(("value", "sf", "code"), [
    (1e30, 1.0, 0x7E), (-1e30, 1.0, 0xFE), (INF, 1.0, 0x7E), (-INF, 1.0, 0xFE), (449.0, 1.0, 0x7E), (464.0, 1.0, 0x7E),
    (465.0, 1.0, 0x7E), (3e38, 2.0, 0x7E), (3e38, -2.0, 0xFE), (224.0, 2.0, 0x7E), (448.0, 0.5, 0x76), (NAN, 1.0, 0x7F),
])
def test_e4m3_saturates_and_keeps_nan(value: float, sf: float, code: int) -> None:
    x = torch.full((1, 256), value)
    result = golden(x, torch.zeros(1, 1, dtype=torch.int32), sf=torch.tensor([sf]), out_dtype=E4M3)
    found = bits(result).unique().tolist()
    assert [byte & 0x7F if code == 0x7F else byte for byte in found] == [code]


def test_nan_and_infinities_stay_where_they_are() -> None:
    x = torch.ones(3, 256)
    x[0, 1], x[1, 2], x[2, 3] = NAN, INF, -INF
    result = golden(x, torch.tensor([[0, 1], [1, 2], [2, -1]], dtype=torch.int32))
    assert result[0].isnan().nonzero().flatten().tolist() == [1]
    assert result[[0, 1, 1, 2], [2, 2, 3, 3]].tolist() == [INF, INF, -INF, -INF]
    assert int(result.isfinite().sum()) == 3 * 256 - 5
    both = golden(x, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[1.0, 0.0]]))
    assert math.isnan(float(both[0, 3]))  # 0 times infinity


def test_what_padding_slots_refer_to_is_never_read() -> None:
    x, x_sf = torch.full((4, 256), NAN), torch.full((4,), NAN)
    x[1:3], x_sf[1:3] = 2.0, 3.0
    weights = torch.tensor([[NAN, 0.5, INF], [0.25, NAN, 1.0]])
    positions = torch.tensor([[-1, 1, -1], [2, -1, 1]], dtype=torch.int32)
    assert golden(x, positions, weights, x_sf).tolist() == [[3.0] * 256, [7.5] * 256]


# ---- bad input ------------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    """fp32, 5 rows, 3 tokens, 2 slots."""
    return {"x": torch.zeros(5, 256), "token_topk_to_pos": torch.zeros(3, 2, dtype=torch.int32),
            "topk_weights": torch.ones(3, 2), "x_sf": torch.ones(5), "sf": None}


BAD: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "hidden": ({"x": torch.zeros(5, 320)}, ValueError, ("x has shape (5, 320)", "H a positive multiple of 256")),
    "hidden 0": ({"x": torch.zeros(5, 0)}, ValueError, ("x has shape (5, 0)", "multiple of 256")),
    "x 1-D": ({"x": torch.zeros(256)}, ValueError, ("x has shape (256,)", "[E, H]")),
    "x 3-D": ({"x": torch.zeros(1, 5, 256)}, ValueError, ("x has shape (1, 5, 256)", "[E, H]")),
    "x dtype": ({"x": torch.zeros(5, 256, dtype=torch.float64)}, TypeError, ("x has dtype torch.float64", "bfloat16")),
    "x integer": ({"x": torch.zeros(5, 256, dtype=torch.int32)}, TypeError, ("x has dtype torch.int32", "float16")),
    "x missing": ({"x": None}, TypeError, ("x is None", "a tensor is required")),
    "x a list": ({"x": [[0.0] * 256]}, TypeError, ("x is a list", "a tensor or None")),
    "positions missing": ({"token_topk_to_pos": None}, TypeError, ("token_topk_to_pos is None",)),
    "positions int64": ({"token_topk_to_pos": torch.zeros(3, 2, dtype=torch.int64)}, TypeError,
                        ("token_topk_to_pos has dtype torch.int64", "torch.int32 is required")),
    "positions 1-D": ({"token_topk_to_pos": torch.zeros(3, dtype=torch.int32), "topk_weights": None}, ValueError,
                      ("token_topk_to_pos has shape (3,)", "[T, K]")),
    "no slots": ({"token_topk_to_pos": torch.zeros(3, 0, dtype=torch.int32), "topk_weights": None}, ValueError,
                 ("token_topk_to_pos has shape (3, 0)", "K >= 1")),
    "weights dtype": ({"topk_weights": torch.ones(3, 2, dtype=torch.bfloat16)}, TypeError,
                      ("topk_weights has dtype torch.bfloat16", "torch.float32 is required")),
    "weights shape": ({"topk_weights": torch.ones(2, 3)}, ValueError,
                      ("topk_weights has shape (2, 3)", "(3, 2) is required")),
    "weights a number": ({"topk_weights": 1.0}, TypeError, ("topk_weights is a float", "a tensor or None")),
    "x_sf dtype": ({"x_sf": torch.ones(5, dtype=torch.float64)}, TypeError,
                   ("x_sf has dtype torch.float64", "torch.float32 is required")),
    "x_sf per token": ({"x_sf": torch.ones(3)}, ValueError, ("x_sf has shape (3,)", "(5,) is required")),
    "x_sf 2-D": ({"x_sf": torch.ones(5, 1)}, ValueError, ("x_sf has shape (5, 1)", "(5,) is required")),
    "sf shape": ({"sf": torch.ones(2)}, ValueError, ("sf has shape (2,)", "(1,) is required")),
    "sf 0-D": ({"sf": torch.tensor(1.0)}, ValueError, ("sf has shape ()", "(1,) is required")),
    "sf dtype": ({"sf": torch.ones(1, dtype=torch.float16)}, TypeError, ("sf has dtype torch.float16",)),
    "sf without e4m3": ({"sf": torch.ones(1)}, ValueError, ("sf is given", "torch.float32", "float8_e4m3fn output")),
    "x_sf elsewhere": ({"x_sf": torch.ones(5, device="meta")}, ValueError, ("x_sf is on meta", "x's device, cpu")),
}
BAD_OUT: dict[str, tuple[Callable[[], Tensor], type[Exception], tuple[str, ...]]] = {
    "shape": (lambda: torch.zeros(5, 256), ValueError, ("out has shape (5, 256)", "(3, 256) is required")),
    "dtype": (lambda: torch.zeros(3, 256, dtype=torch.bfloat16), TypeError,
              ("out has dtype torch.bfloat16", "torch.float32 or float8_e4m3fn")),
    "strides": (lambda: torch.zeros(256, 3).T, ValueError, ("out has strides (1, 3)", "contiguous")),
    "alignment": (lambda: torch.zeros(3 * 256 + 1)[1:].view(3, 256), ValueError, ("out starts at 0x", "16-byte")),
}
BAD_LAYOUT: dict[str, tuple[dict[str, Tensor], tuple[str, ...]]] = {
    "x strided": ({"x": torch.zeros(5, 320)[:, :256]}, ("x has strides (320, 1)", "contiguous")),
    "x unaligned": ({"x": torch.zeros(5 * 256 + 1)[1:].view(5, 256)}, ("x starts at 0x", "16-byte alignment")),
    "positions strided": ({"token_topk_to_pos": torch.zeros(2, 3, dtype=torch.int32).T},
                          ("token_topk_to_pos has strides (1, 3)", "contiguous")),
    "weights strided": ({"topk_weights": torch.ones(2, 3).T}, ("topk_weights has strides (1, 3)", "contiguous")),
    "x_sf strided": ({"x_sf": torch.ones(10)[::2]}, ("x_sf has strides (2,)", "contiguous")),
}


def assert_names(raised: pytest.ExceptionInfo[Exception], parts: tuple[str, ...]) -> None:
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"


def never(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
    raise AssertionError("the kernel was entered")


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_to_the_reference(name: str) -> None:
    change, error, parts = BAD[name]
    with pytest.raises(error) as raised:
        golden(**{**good(), **change})
    assert_names(raised, parts)


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_to_a_kernel_never_reaches_it(name: str) -> None:
    change, error, parts = BAD[name]
    with pytest.raises(error) as raised:
        subject(never)(**{**good(), **change})
    assert_names(raised, parts)


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_to_the_kernels_of_this_repository(name: str) -> None:
    change, error, parts = BAD[name]
    known = kernels(NAME)
    assert len(known) >= 3
    for kernel in known:
        with pytest.raises(error) as raised:
            kernel(**{**good(), **change})
        assert_names(raised, parts)


@pytest.mark.parametrize("name", list(BAD_OUT))
def test_a_bad_output(name: str) -> None:
    out, error, parts = BAD_OUT[name]
    for kernel in (subject(never), *(k for k in kernels(NAME) if not k.strided)):
        with pytest.raises(error) as raised:
            kernel(**good(), out=out())
        assert_names(raised, parts)


@pytest.mark.parametrize("name", list(BAD_LAYOUT))
def test_a_layout_that_is_not_taken(name: str) -> None:
    change, parts = BAD_LAYOUT[name]
    for kernel in (subject(never), *(k for k in kernels(NAME) if not k.strided)):
        with pytest.raises(ValueError, match="this kernel requires") as raised:
            kernel(**{**good(), **change})
        assert_names(raised, parts)
    validate({**good(), **change}, None, strided=True)
    assert golden(**{**good(), **change}).shape == (3, 256)


@pytest.mark.parametrize(("out_dtype", "error", "words"), [
    (torch.bfloat16, TypeError, "out_dtype is torch.bfloat16: x's dtype torch.float32 or float8_e4m3fn is required"),
    (torch.float8_e5m2, TypeError, "out_dtype is torch.float8_e5m2"),
])
def test_a_bad_output_dtype_of_the_reference(out_dtype: torch.dtype, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        golden(**good(), out_dtype=out_dtype)
    assert words in str(raised.value)


def test_good_input_is_taken() -> None:
    validate(good(), None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for out in (dtype, E4M3):
            arguments = {**good(), "x": torch.zeros(5, 256, dtype=dtype)}
            validate(arguments, torch.zeros(3, 256, dtype=out))
            assert golden(**arguments, out_dtype=out).dtype == out
    validate({**good(), "sf": torch.ones(1)}, torch.zeros(3, 256, dtype=E4M3))
    assert OPERATOR.output(good(), None) == Output((3, 256), torch.float32)
    assert OPERATOR.output(good(), E4M3).nbytes == 768


# ---- cost and names -------------------------------------------------------------------------------------------------


def decode(out: torch.dtype, xsf: bool, padding: int = 0) -> Call:
    """DeepSeek-V3 decode: 512 tokens, 8 slots, hidden 7168, bf16; of x only the element counts."""
    positions = torch.zeros(512, 8, dtype=torch.int32)
    positions.view(-1)[:padding] = -1
    arguments = {"x": torch.empty(1, 7168, dtype=torch.bfloat16), "token_topk_to_pos": positions, "topk_weights": None,
                 "x_sf": torch.ones(1) if xsf else None, "sf": torch.ones(1) if out == E4M3 else None}
    return Call(sample(), arguments, Output((512, 7168), out), lambda which: None)


@pytest.mark.parametrize(("out", "xsf", "padding", "flops", "moved"), [
    (torch.bfloat16, False, 0, 58_720_256, 66_093_056),
    (torch.bfloat16, True, 0, 58_724_352, 66_109_440),
    (E4M3, False, 0, 62_390_272, 62_423_040),
    (E4M3, True, 0, 62_394_368, 62_439_424),
    (torch.bfloat16, True, 1024, 44_043_264, 51_417_088),  # a quarter of the slots is padding
])
def test_cost_of_deepseek_v3_decode(out: torch.dtype, xsf: bool, padding: int, flops: int, moved: int) -> None:
    found = cost(decode(out, xsf, padding))
    assert (found.flops, found.bytes) == (flops, moved)


def test_variants_policies_and_workloads() -> None:
    assert OPERATOR.variants == ("base", "with_x_sf", "fp8", "quantized")
    names = {OPERATOR.variant(sample(**{"in": "bf16", "out": out, "xsf": xsf}))
             for out in ("bf16", "e4m3") for xsf in ("yes", "no")}
    assert names == set(OPERATOR.variants)
    assert "448" in OPERATOR.policies["e4m3 overflow"]
    assert OPERATOR.workloads["deepseek_v3_decode"] == (512, 8, 7168)
    for case in matrix(NAME).cases("models"):
        assert OPERATOR.workloads[case.get("model")] == tuple(map(case.number, ("tokens", "topk", "hidden")))


# ---- inputs ---------------------------------------------------------------------------------------------------------


def made(case: Case, sizes: str = "reduced") -> Call:
    return contract().inputs(case, sizes, CPU, Shared())


OFFICIAL = {"send": "4001", "topk": "6", "experts": "72", "ranks": "8", "hidden": "2048", "weights": "yes",
            "in": "bf16", "out": "e4m3", "xsf": "yes"}


def official(**params: str) -> Case:
    return Case(NAME, {**OFFICIAL, **params})


def test_the_data_of_a_case_never_changes() -> None:
    call = made(official())
    call.set_poison(1)
    found = {name: digest(value) for name, value in call.arguments.items()}
    assert found == {
        "x": "e37373bfd2b7d0ac", "token_topk_to_pos": "cec16297f5587be8",
        "topk_weights": "1944949e2c727ae2", "x_sf": "a0df1ab69ba0f442", "sf": "41a5c66cba91f635",
    }
    point = "tokens:37-topk:1-hidden:256-routing:padding-weights:yes-in:bf16-out:bf16-xsf:yes-data:real"
    call = made(next(case for case in edge_cases() if case.name == f"F01-padding/{point}"))
    call.set_poison(0)
    assert digest(call.arguments["x"]) == "e0d6633f390230c7"


def test_cases_that_differ_only_in_the_variant_share_their_data() -> None:
    first = made(official())
    for weights, xsf, out in itertools.product(("yes", "no"), ("yes", "no"), ("bf16", "e4m3")):
        call = made(official(weights=weights, xsf=xsf, out=out))
        call.set_poison(0)
        first.set_poison(0)
        for name, value in call.arguments.items():
            wanted = {"x": True, "token_topk_to_pos": True, "topk_weights": weights == "yes", "x_sf": xsf == "yes",
                      "sf": out == "e4m3"}[name]
            assert (value is not None) == wanted
            assert value is None or digest(value) == digest(first.arguments[name])
    for change in ({"topk": "8"}, {"hidden": "2560"}, {"in": "fp32"}, {"ranks": "64", "experts": "256"}):
        other = made(official(**change))
        assert digest(other.arguments["topk_weights"]) != digest(first.arguments["topk_weights"])


def test_models_of_one_shape_share_their_data() -> None:
    by_model = {case.get("model"): case for case in matrix(NAME).cases("models") if case.get("weights") == "no"}
    one, two = by_model["kimi_k2"], by_model["qwen3_235b"]
    assert matrix(NAME).group_of(one) == matrix(NAME).group_of(two)
    assert digest(made(one).arguments["token_topk_to_pos"]) == digest(made(two).arguments["token_topk_to_pos"])


@every_pair
@pytest.mark.parametrize("poison_weights", [False, True])
def test_poison_stands_only_where_nothing_depends_on_it(source: str, target: str, poison_weights: bool) -> None:
    more = {"poison": "weights"} if poison_weights else {}
    case = sample(**{"in": source, "out": target, "xsf": "yes", "routing": "some_empty"}, tokens=7, **more)
    call = made(case)
    given = call.arguments
    used = torch.zeros(len(given["x"]), dtype=torch.bool)
    used[given["token_topk_to_pos"][given["token_topk_to_pos"] >= 0].long()] = True
    assert not bool(used[0])
    assert not bool(used[-1])
    padding = given["token_topk_to_pos"] < 0
    goldens, kept = [], []
    for which in (0, 1, 1, 0):
        call.set_poison(which)
        expected = NAN if which == 0 else 30000.0
        stored = float(torch.tensor(expected).to(given["x"].dtype))
        for name, rows in (("x", ~used), ("x_sf", ~used)):
            values = given[name][rows].float().unique()
            wanted = stored if name == "x" else expected
            assert bool(values.isnan().all()) if which == 0 else values.tolist() == [wanted]
        if poison_weights:
            values = given["topk_weights"][padding]
            assert bool(values.isnan().all()) if which == 0 else values.unique().tolist() == [30000.0]
        else:
            assert bool(given["topk_weights"].isfinite().all())
        kept.append([digest(given["x"][used]), digest(given["x_sf"][used]), digest(given["topk_weights"][~padding])])
        goldens.append(golden(**given, out_dtype=call.output.dtype))
    assert all(one == kept[0] for one in kept)
    assert all(torch.equal(bits(one), bits(goldens[0])) for one in goldens)
    assert bool(goldens[0].float().isfinite().all())


@pytest.mark.parametrize("name", ["x", "topk_weights", "x_sf"])
def test_inputs_lie_between_bands_of_nan(name: str) -> None:
    value = made(sample(xsf="yes")).arguments[name]
    start, band = value.storage_offset(), 4096 // value.element_size()
    whole = value.as_strided((value.numel() + 2 * band,), (1,), start - band)
    assert bool(whole[:band].isnan().all())
    assert bool(whole[-band:].isnan().all())
    assert value.data_ptr() % 16 == 0


@pytest.mark.parametrize(("layout", "contiguous", "aligned"), [
    ("contiguous", True, True), ("offset", True, True), ("strided", False, True), ("unaligned", True, False),
    ("column_major", False, True), ("strided_all", False, True),
])
@pytest.mark.parametrize("source", ["fp32", "bf16"])
def test_layouts_of_x(layout: str, contiguous: bool, aligned: bool, source: str) -> None:
    case = sample(**{"in": source, "out": source}, layout=layout)
    x, positions = (made(case).arguments[name] for name in ("x", "token_topk_to_pos"))
    assert x.shape == (22, 256)
    assert x.is_contiguous() == contiguous
    assert (x.data_ptr() % 16 == 0) == aligned
    strides = {"strided": (320, 1), "strided_all": (320, 1), "column_major": (1, 22)}
    assert x.stride() == strides.get(layout, (256, 1))
    used = positions[positions >= 0].long()
    assert bool(x[used].isfinite().all())
    assert torch.equal(x[used], made(case).arguments["x"][used])


def test_every_argument_can_be_strided() -> None:
    call = made(sample(layout="strided_all", xsf="yes"))
    strides = {name: value.stride() for name, value in call.arguments.items() if value is not None}
    assert strides == {"x": (320, 1), "token_topk_to_pos": (68, 1), "topk_weights": (68, 1), "x_sf": (65,)}
    assert call.output.gap == 64
    assert made(sample(layout="strided")).output.gap == 0


def test_reduced_sizes_are_in_the_tens_and_no_multiple_of_32() -> None:
    groups = {matrix(NAME).group_of(case): case for case in matrix(NAME).cases("official")}
    cases = [case for case in groups.values() if case.get("hidden") == "2048" and case.get("in") == "bf16"]
    assert len(cases) == 12
    for case in cases:
        positions = made(case).arguments["token_topk_to_pos"]
        assert 10 <= len(positions) <= 61
        assert len(positions) % 32
        assert positions.shape[1] == case.number("topk")
        valid = positions[positions >= 0]
        assert sorted(valid.tolist()) == list(range(len(valid)))
    drawn = {len(made(official(hidden="256", draw=str(draw))).arguments["token_topk_to_pos"]) for draw in range(60)}
    assert 31 in drawn  # 32, less one
    assert 32 not in drawn
    model = next(case for case in matrix(NAME).cases("models") if case.get("model") == "deepseek_v3_prefill")
    assert made(model).output.shape == (61, 7168)
    empty = next(case for case in matrix(NAME).cases("full") if case.get("send") == "0")
    assert made(empty).output.shape == (0, 2048)


@pytest.mark.parametrize(("topk", "experts", "ranks"), [("2", "72", "8"), ("6", "256", "8")])
def test_the_estimate_of_tokens_covers_what_is_drawn(topk: str, experts: str, ranks: str) -> None:
    case = official(topk=topk, experts=experts, ranks=ranks, hidden="256")
    drawn = len(made(case, "official").arguments["token_topk_to_pos"])
    assert drawn <= tokens_expected(case, "official") <= drawn * 1.1
    assert tokens_expected(case, "reduced") <= 61


def test_memory_covers_inputs_reference_and_outputs() -> None:
    for case, sizes in ((official(hidden="7168"), "reduced"), (sample(tokens=300, topk=8, hidden=2048), "reduced")):
        call, reference = made(case, sizes), None
        reference = contract().reference(call, Shared())
        rows = list(reference.oracle())
        held = sum(v.untyped_storage().nbytes() for v in call.arguments.values() if isinstance(v, Tensor))
        held += reference.golden.nbytes + sum(r.value.nbytes + r.error.nbytes for r in rows) + 3 * call.output.nbytes
        assert held < memory(case, sizes)
    assert memory(official(hidden="7168"), "official") < 20 << 30
    assert memory(official(hidden="7168"), "official") > memory(official(hidden="2048"), "official")


def test_sf_has_both_signs_where_no_token_is_empty_and_is_positive_elsewhere() -> None:
    scales = [float(made(official(hidden=hidden, topk=topk)).arguments["sf"])
              for hidden in ("2048", "2560", "3072") for topk in ("2", "6", "8")]
    assert min(scales) < 0 < max(scales)
    assert all(0.75 <= abs(scale) < 2.75 for scale in scales)
    for seed in range(8):
        assert 0.75 <= float(made(sample(**{"in": "bf16", "out": "e4m3"}, topk=2 + seed)).arguments["sf"]) < 2.75
    exact = made(sample(**{"in": "bf16", "out": "e4m3", "data": "exact"})).arguments["sf"]
    assert exact.tolist() == [0.5]
    assert made(sample(**{"in": "bf16", "out": "e4m3", "sf": "none"})).arguments["sf"] is None
    for name, value in (("zero", 0.0), ("negative", -1.5), ("tiny", 2.0**-120), ("huge", 2.0**90)):
        assert made(sample(**{"in": "bf16", "out": "e4m3", "sf": name})).arguments["sf"].tolist() == [value]
    assert math.isnan(float(made(sample(**{"in": "bf16", "out": "e4m3", "sf": "nan"})).arguments["sf"]))


@pytest.mark.parametrize(("source", "exponents"), [("fp32", 40), ("bf16", 40), ("fp16", 8)])
@pytest.mark.parametrize("xsf", ["yes", "no"])
def test_wide_data_moves_rows_and_their_scales_apart(source: str, exponents: int, xsf: str) -> None:
    """Products are of ordinary size although their factors are not."""
    params = {"in": source, "out": source, "routing": "shuffled", "xsf": xsf}
    given = made(sample(**params, data="wide", tokens=40, topk=8)).arguments
    rows = given["x"][given["token_topk_to_pos"].flatten().long()].double()
    sizes = rows.abs().mean(dim=1).log2()
    assert float(sizes.max() - sizes.min()) > 1.6 * exponents
    scales = given["x_sf"][given["token_topk_to_pos"].long()] if xsf == "yes" else given["topk_weights"]
    products = (rows * scales.double().flatten()[:, None]).abs()
    assert float(products.max()) < 200
    assert float(products.mean()) > 0.3


def test_scales_of_exact_data_are_powers_of_two() -> None:
    call = made(sample(data="exact", xsf="yes", tokens=40, topk=8))
    assert call.regime == "exact"
    weights, x_sf = call.arguments["topk_weights"], call.arguments["x_sf"]
    powers = [-4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0]
    assert x_sf.unique().tolist() == powers
    assert weights.unique().tolist() == [*powers[:5], 0.0, *powers[5:]]  # some weights are exactly 0
    assert made(sample()).regime == "real"
    for name in ("exact", "coded", "zeros", "negative_zeros"):
        call, reference = call_of(sample(data=name, xsf="yes", tokens=9, topk=9))
        assert torch.equal(reference.golden, right(**call.arguments, dtype=torch.float32))


def test_rows_that_the_contract_fixes_bit_by_bit() -> None:
    call = made(sample(routing="some_empty", tokens=7))
    assert call.bitwise_rows.tolist() == [True, False, False, True, False, False, True]
    negative = Case(NAME, OFFICIAL)
    sf = float(made(negative).arguments["sf"])
    assert (made(negative).bitwise_rows is None) == (sf < 0)


@pytest.mark.parametrize(("change", "words"), [
    ({"in": "fp64"}, "in:fp64 out:fp32 is no dtype combination"),
    ({"out": "fp16"}, "in:fp32 out:fp16 is no dtype combination"),
    ({"data": "reel"}, "unknown data pattern 'reel'"),
    ({"routing": "sorted"}, "unknown routing pattern 'sorted'"),
    ({"layout": "odd"}, "unknown layout 'odd'"),
    ({"in": "bf16", "out": "e4m3", "sf": "big"}, "sf:big is none of given, none, zero"),
    ({"topk": "x"}, "parameter 'topk' must be an integer"),
])
def test_a_parameter_that_does_not_fit(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        made(sample(**change))
    assert words in str(raised.value)


# ---- what cases share -----------------------------------------------------------------------------------------------


def test_shared_values_live_as_long_as_their_group() -> None:
    shared, built = Shared(), []

    def build() -> list[int]:
        built.append(1)
        return [len(built)]

    shared.enter("a")
    first = shared.get("key", build)
    assert shared.get("key", build) is first
    assert shared.holds(first)
    shared.enter("a")
    assert shared.get("key", build) is first
    shared.enter("b")
    assert not shared.holds(first)
    assert shared.get("key", build) == [2]
    shared.clear()
    assert shared.group is None
    assert shared.get("key", build) == [3]


def test_of_a_slot_only_the_latest_value_is_kept() -> None:
    shared = Shared()
    assert shared.latest("acc", 1, lambda: "one") == "one"
    assert shared.latest("acc", 1, lambda: "other") == "one"
    assert shared.latest("acc", 2, lambda: "two") == "two"
    assert shared.latest("oracle", 1, lambda: "elsewhere") == "elsewhere"
    assert shared.latest("acc", 1, lambda: "again") == "again"


def test_another_draw_has_another_routing() -> None:
    """What a graph is replayed with differs in its positions; what differs in hidden size or dtype alone does not."""
    one, two = (made(official(**more)).arguments["token_topk_to_pos"] for more in ({}, {"draw": "2"}))
    assert one.shape != two.shape or not torch.equal(one, two)
    assert torch.equal(one, made(official(hidden="4096", **{"in": "fp32"})).arguments["token_topk_to_pos"])


def test_cases_of_a_group_share_weights_and_scales() -> None:
    shared = Shared()
    shared.enter("one")
    one, two = (contract().inputs(official(out=out), "reduced", CPU, shared) for out in ("e4m3", "bf16"))
    for name in ("x", "token_topk_to_pos", "topk_weights", "x_sf"):
        assert one.arguments[name] is two.arguments[name]
    unused = torch.ones(len(one.arguments["x"]), dtype=torch.bool)
    unused[one.arguments["token_topk_to_pos"][one.arguments["token_topk_to_pos"] >= 0].long()] = False
    assert unused.any()
    for call, which in ((one, 0), (two, 1), (one, 1), (two, 0)):
        call.set_poison(which)
        assert call.arguments["x_sf"][unused].isnan().all() == (which == 0)
        assert call.arguments["x_sf"][~unused].isfinite().all()
