"""fp4, a8w4 and a16w4 in the operators of two-stage MoE: storage by closed form, contract, data, poison, and that every
way of reading packed elements and e8m0 scales wrongly fails, with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance import Kernel
from conformance.case import parse_case
from conformance.errors import ConformanceError
from conformance.formats import bits
from conformance.judging.judge import Judge
from conformance.judging.vacuity import accepted
from conformance.operator import Call, Shared
from conformance.registry import arch, kernels, matrix, operator
from conformance.result import Settings, refusal
from conformance.verdicts.verdict import golden_fraction
from conformance.zoo.kill_matrix import cause_of
from kernels.gemm_2stage import microscaled
from references.moe_gemm_2stage import fp8, layouts, mx, scales, sorting
from references.moe_gemm_2stage.decoded import decode

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = {"fp4": "f16", "a8w4": "f16", "a16w4": "bf16"}  # with the output that they have
every_operator = pytest.mark.parametrize("name", OPERATORS)
both = pytest.mark.parametrize("dtype", ["fp4", "a8w4"])
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def point(name: str, dtype: str, mode: str = "atomic", mask: str = "no", more: str = "", tokens: int = 19,
          hidden: int = 320) -> str:
    return (f"{name}/F/tokens:{tokens}-hidden:{hidden}-inter:192-experts:5-topk:2-bm:16-in:{dtype}-mode:{mode}-"
            f"out:{DTYPES[dtype]}-mask:{mask}{more}")


# ---- storage --------------------------------------------------------------------------------------------------------


def e2m1(byte: int, column: int) -> float:
    code = byte >> 4 * (column % 2) & 15
    return E2M1[code & 7] * (-1 if code & 8 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_lie_where_the_closed_form_says(dtype: str) -> None:
    call, _ = prepared(point("moe_gemm1", dtype))
    given, of = call.arguments, decode(call).w1
    assert of is not None
    _, rows, half = given["w1"].shape
    value, columns = of.value(), given["scale_w1"].shape[1]
    assert (rows, half) == (384, 160) and given["scale_w1"].shape == (2048, 16)  # 5 x 384 rows, 10 blocks, padded
    bytes_of, codes = given["w1"][3].flatten().tolist(), given["scale_w1"].flatten().tolist()
    for row, column in [(0, 0), (0, 1), (1, 30), (17, 33), (200, 159), (383, 319), (31, 64), (32, 288)]:
        element = e2m1(bytes_of[layouts.preshuffled_offset(row, column // 2, half, 1)], column)
        scale = codes[layouts.shuffled_scale_offset(3 * rows + row, column // 32, columns)]
        assert float(value[3, row, column]) == element * 2.0 ** (scale - 127), (row, column)
    assert len(set(codes)) > 8


@both
@pytest.mark.parametrize("name", ["moe_gemm1", "moe_gemm2"])
def test_rows_have_the_scales_at_their_place_in_the_sorted_list(name: str, dtype: str) -> None:
    call, _ = prepared(point(name, dtype, "reduce", "yes"))
    given, value = call.arguments, decode(call).rows.value()
    rows, scale = (given[key] for key in (("x", "scale_x") if name == "moe_gemm1" else ("a2", "scale_a2")))
    assert scale.dtype == torch.uint8 and scale.shape == scales.shape_of(len(given["sorted_token_ids"]), value.shape[2])
    codes, seen = scale.flatten().tolist(), 0
    for place, packed in enumerate(given["sorted_token_ids"][: int(given["num_valid_ids"])].tolist()):
        token, slot = packed & 0xFFFFFF, packed >> 24
        if token == 19:
            continue
        stored = rows[token] if name == "moe_gemm1" else rows[token, slot]
        for column in (0, 33, 95, 128, 191):
            element = (e2m1(int(stored[column // 2]), column) if dtype == "fp4" else float(stored[column].float()))
            code = codes[layouts.shuffled_scale_offset(place, column // 32, scale.shape[1])]
            assert float(value[token, slot, column]) == element * 2.0 ** (code - 127)
        seen += 1
    assert seen > 9


def test_scales_both_ways() -> None:
    codes = (torch.arange(7 * 3 * 6) % 251).to(torch.uint8).view(7, 3, 6)
    place = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:21].view(7, 3).to(torch.int32)
    place[2, 1] = -1
    stored = scales.sort(codes, place, 40)
    found = scales.unsort(stored, place, 40, 192)
    held = place >= 0
    assert torch.equal(found[held], codes[held]) and bool((found[~held] == 127).all())
    free = scales.unused_rows(place, 40, 192)
    assert free.shape == stored.shape == (256, 8) and int((~free).sum()) == int(held.sum()) * 6
    channels = (torch.arange(3 * 64 * 6) % 253).to(torch.uint8).view(3, 64, 6)
    whole = scales.store_channels(channels)
    assert torch.equal(scales.read_channels(whole, 3, 64, 192), channels)
    mine = scales.unused_channels(torch.tensor([True, False, True]), 64, 192)
    assert int((~mine).sum()) == 64 * 6 and not bool((~mine)[:64].any())
    plain = torch.where(mine, 0, whole)
    assert torch.equal(layouts.unshuffle_scales(plain, 192, 6).view(3, 64, 6)[1], channels[1])


def test_e8m0_codes_of_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(mx.encode_e8m0(mx.decode_e8m0(codes)), codes)
    for wrong in (3.0, 0.0, -2.0, 2.0**-128, float("inf")):
        with pytest.raises(ValueError, match="powers of two"):
            mx.encode_e8m0(torch.tensor([wrong]))


# ---- contract -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "changes", "error", "words"), [
    ("fp4", {"rule": "truncate"}, ValueError, "rule is 'truncate': of fp4 one of floor, even, up"),
    ("fp8", {"rule": "floor"}, ValueError, "rule is 'floor': of fp8 one of truncate, nearest"),
    ("fp4", {"scale_x": None}, TypeError, "scale_x is None"),
    ("fp4", {"scale_x": torch.zeros(19, 10, dtype=torch.uint8)}, ValueError, r"shape \(19, 10\): \(256, 16"),
    ("fp4", {"scale_w1": torch.zeros(2048, 16)}, TypeError, "scale_w1 has dtype torch.float32: torch.uint8"),
    ("a8w4", {"x": torch.zeros(19, 320, dtype=torch.float8_e4m3fnuz)}, TypeError, "torch.float8_e4m3fn is required"),
    ("fp4", {"x": torch.zeros(19, 144, dtype=torch.uint8)}, ValueError, "H is 288.*multiples of 64"),
    ("a16w4", {"scale_x": torch.zeros(256, 16, dtype=torch.uint8)}, ValueError, "scale_x is given: in_dtype 'a16w4'"),
])
def test_a_wrong_argument_is_named(dtype: str, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    name = "moe_gemm_2stage"
    case = point(name, dtype) if dtype != "fp8" else point(name, "fp4").replace("in:fp4", "in:fp8")
    call, _ = prepared(case)
    out = torch.empty(call.output.shape, dtype=call.output.dtype)
    operator(name).validate(call.arguments, out, False)
    with pytest.raises(error, match=words):
        operator(name).validate(call.arguments | changes, out, False)


@pytest.mark.parametrize(("case", "words"), [
    (point("moe_gemm2", "fp4").replace("out:f16", "out:bf16"), "fp4 has atomic and reduce with out f16"),
    (point("moe_gemm2", "a16w4", "reduce"), "a16w4 has atomic with out bf16"),
    (point("moe_gemm2", "fp4", hidden=96), "multiples of 64"),
    (point("moe_gemm2", "a16w4", more="-data:scales"), "data:scales needs e8m0 scales"),
    (point("moe_gemm_2stage", "fp4", more="-rule:nearest"), "rule:nearest is none of floor, even, up"),
])
def test_a_case_that_does_not_fit_is_an_error(case: str, words: str) -> None:
    with pytest.raises(ConformanceError, match=words):
        operator(parse_case(case).operator).inputs(parse_case(case), "reduced", CPU, Shared())


@every_operator
def test_kernels_that_do_not_take_them_say_so(name: str) -> None:
    for dtype in DTYPES:
        for kernel in kernels(name, ["legacy", "pipelined"]):
            reason = refusal(parse_case(point(name, dtype)), kernel)
            assert reason is not None and f"in:{dtype} has no TileLang program" in reason


# ---- data and poison ------------------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_golden_keeps_its_budget_and_right_kernels_pass(name: str, dtype: str) -> None:
    for mode in ("atomic", "reduce") if dtype != "a16w4" else ("atomic",):
        for tokens in (0, 1, 19):
            call, reference = prepared(point(name, dtype, mode, "yes", tokens=tokens))
            assert golden_fraction(reference)() <= 1.0
            found = verdict(result(per_expert(name), call), call, reference)
            assert found.passed, found.message
            assert accepted(call, reference) is None
        call, reference = prepared(point(name, dtype, mode))
        assert bool(reference.golden.any()) and verdict(result(per_expert(name), call), call, reference).passed


@both
def test_neighbouring_blocks_have_other_scales(dtype: str) -> None:
    call, _ = prepared(point("moe_gemm2", dtype))
    of = decode(call)
    for operand in (of.rows, of.w2):
        assert operand is not None and operand.factors is not None
        blocks = operand.factors[..., ::32]
        assert float((blocks[..., 1:] != blocks[..., :-1]).float().mean()) > 0.6


@both
@every_operator
def test_poison_stands_in_unused_scales_and_reaches_no_reference(name: str, dtype: str) -> None:
    call, reference = prepared(point(name, dtype, "reduce", "yes"))
    given = call.arguments
    key = "scale_x" if "x" in given else "scale_a2"
    width = 320 if "x" in given else 192
    place = sorting.positions(sorting.Sorted(given["sorted_token_ids"], given["sorted_weights"], given[
        "sorted_expert_ids"], given["num_valid_ids"], 16), 19, 2)
    free = scales.unused_rows(place, len(given["sorted_token_ids"]), width)
    weights = [given[w] for w in ("scale_w1", "scale_w2") if given.get(w) is not None]
    before = [tensor.clone() for tensor in (given[key], *weights)]
    call.set_poison(0)
    try:
        assert bool((given[key][free] == 255).all()) and torch.equal(given[key][~free], before[0][~free])
        for now, was in zip(weights, before[1:], strict=True):
            assert 0.3 < float((now == 255).float().mean()) < 1 and torch.equal(now[now != 255], was[now != 255])
        again = operator(name).reference(call, Shared())
        assert torch.equal(bits(again.golden), bits(reference.golden))
        assert torch.equal(result(per_expert(name), call), result(per_expert(name), call))
        assert verdict(result(per_expert(name), call), call, reference).passed
    finally:
        call.set_poison(1)
    assert bool((given[key][free] == 0x90).all())


@both
def test_exact_data_is_judged_by_bits(dtype: str) -> None:
    call, reference = prepared(point("moe_gemm2", dtype, "reduce", more="-data:coded"))
    assert call.regime == "exact" and len(decode(call).rows.factors.unique()) == 4
    right = result(per_expert("moe_gemm2"), call)
    assert verdict(right, call, reference).level == "bit-exact"
    near = torch.nextafter(right, torch.full_like(right, torch.inf))
    assert verdict(near, call, reference).kind == "exact"
    assert prepared(point("moe_gemm2", dtype, "atomic", more="-data:coded"))[0].regime == "real"


@both
def test_a_scale_that_is_nan_makes_its_row_nan(dtype: str) -> None:
    call, reference = prepared(point("moe_gemm2", dtype, "reduce", more="-data:nonfinite"))
    spoilt = reference.golden.isnan().any(dim=1)
    assert 0 < int(spoilt.sum()) < len(spoilt) and bool(reference.golden[spoilt].isnan().all())
    assert verdict(result(per_expert("moe_gemm2"), call), call, reference).passed


# ---- wrong kernels --------------------------------------------------------------------------------------------------


def recoded(change: Callable[[Tensor], Tensor], rows: bool) -> Callable[[Call], dict[str, Tensor]]:
    """Other e8m0 scales [R, K/32], before they are shuffled, of rows or of weights."""
    def changes(call: Call) -> dict[str, Tensor]:
        given, found = call.arguments, {}
        for name in ("x", "a2") if rows else ("w1", "w2"):
            if name in given:
                width = given[name].shape[-1] * (2 if given[name].dtype == torch.uint8 else 1) // 32
                count = len(given["sorted_token_ids"]) if rows else given[name].shape[0] * given[name].shape[1]
                plain = layouts.unshuffle_scales(given[f"scale_{name}"], count, width)
                found[f"scale_{name}"] = layouts.shuffle_scales(change(plain))
        return found

    return changes


def of(names: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Callable[[Call], dict[str, Tensor]]:
    return lambda call: {name: change(call.arguments[name]).contiguous() for name in names if name in call.arguments}


def unsorted(call: Call) -> dict[str, Tensor]:
    """Scales at the row of their elements where the kernel takes them from the sorted list."""
    given = call.arguments
    name = "x" if "x" in given else "a2"
    plain = layouts.unshuffle_scales(given[f"scale_{name}"], len(given["sorted_token_ids"]), 10 if name == "x" else 6)
    token, slot = given["sorted_token_ids"] & 0xFFFFFF, given["sorted_token_ids"] >> 24
    row = (token if name == "x" else token * 2 + slot).long().clamp(max=len(plain) - 1)
    return {f"scale_{name}": layouts.shuffle_scales(plain[row])}


def swapped(stored: Tensor) -> Tensor:
    return stored << 4 | stored >> 4


def next_block(codes: Tensor) -> Tensor:
    return codes.roll(-1, -1)


def raw(stored: Tensor) -> Tensor:
    """What a kernel reads that takes the shuffled bytes as rows."""
    return layouts.shuffle_scales(stored)


WRONG = {  # what differs, the dtypes that it exists for, the keys of its diagnosis
    "nibbles of weights": (of(("w1", "w2"), swapped), ("fp4", "a8w4", "a16w4"), "nibbles-swapped"),
    "nibbles of rows": (of(("x", "a2"), swapped), ("fp4",), "nibbles-swapped-rows nibbles-swapped"),
    "weights not preshuffled": (of(("w1", "w2"), layouts.unpreshuffle), ("fp4", "a16w4"), ""),
    "next block of weights": (recoded(next_block, False), ("fp4", "a8w4", "a16w4"), "group-scale-of-next"),
    "next block of rows": (recoded(next_block, True), ("fp4", "a8w4"), "row-blocks-of-next"),
    "scales of weights not shuffled": (of(("scale_w1", "scale_w2"), raw), ("fp4", "a8w4"), "scales-unshuffled"),
    "scales of rows not shuffled": (of(("scale_x", "scale_a2"), raw), ("fp4", "a8w4"), "row-scales-unshuffled"),
    "scales of rows not sorted": (unsorted, ("fp4", "a8w4"), "row-scales-unsorted"),
    "no scales of rows": (recoded(lambda codes: torch.full_like(codes, 127), True), ("fp4",), "row-blocks-missing"),
}


@every_operator
@pytest.mark.parametrize("wrong", WRONG)
def test_operands_that_are_read_wrongly_fail(name: str, wrong: str) -> None:
    changes, dtypes, _ = WRONG[wrong]
    for dtype in dtypes:
        for mode in ("atomic", "reduce") if dtype != "a16w4" else ("atomic",):
            call, reference = prepared(point(name, dtype, mode))
            found = verdict(result(per_expert(name), call, **changes(call)), call, reference)
            assert not found.passed, (dtype, mode)


@pytest.mark.parametrize(("name", "wrong", "dtype"), [
    (name, wrong, "a8w4" if number % 3 == 2 and "a8w4" in dtypes else "fp4")
    for number, (wrong, (_, dtypes, keys)) in enumerate(WRONG.items()) if keys
    for name in (OPERATORS[number % 2], "moe_gemm_2stage")[: 1 + number % 2]
])
def test_a_wrong_reading_is_named(name: str, wrong: str, dtype: str) -> None:
    changes, _, keys = WRONG[wrong]
    contract, right = operator(name), per_expert(name)

    def run(**given: Any) -> None:
        out = given.pop("out")
        whole = dict.fromkeys(contract.arguments) | given
        call = Call(case, whole, contract.output(whole, out.dtype), lambda which: None)
        right.function(**(whole | changes(call)), out=out)

    case = parse_case(point(name, dtype, "reduce"))
    kernel = Kernel("wrong", name, run, "within-budget", parameters=frozenset(contract.arguments) | {"out"})
    found = Judge(Settings()).run(case, kernel)
    assert found.state == "fail" and cause_of(found.record()) in keys.split(), found.message


@both
@every_operator
def test_a_shifted_scale_byte_fails_at_the_ends_only(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """byte << 23 is the right number but for bytes 0 and 255."""
    monkeypatch.setattr(microscaled, "powers", lambda codes: (codes.int() << 23).view(torch.float32))
    call, reference = prepared(point(name, dtype))
    assert verdict(result(per_expert(name), call), call, reference).passed
    call, reference = prepared(point(name, dtype, more="-data:scales"))
    codes = call.arguments["scale_x" if "x" in call.arguments else "scale_a2"]
    assert int((codes == 0).sum()) > 20 and int(codes.max()) < 200
    assert not verdict(result(per_expert(name), call), call, reference).passed


@both
@pytest.mark.parametrize("rule", mx.RULES)
def test_the_rule_between_the_stages_means_one_thing(dtype: str, rule: str) -> None:
    call, reference = prepared(point("moe_gemm_2stage", dtype, more=f"-rule:{rule}"))
    assert call.arguments["rule"] == rule
    for other in mx.RULES:
        found = verdict(result(per_expert("moe_gemm_2stage"), call, rule=other), call, reference)
        assert found.passed == (other == rule), other


def test_e4m3_rows_are_read_as_ocp() -> None:
    call, reference = prepared(point("moe_gemm2", "a8w4"))
    halved = call.arguments["a2"].view(torch.float8_e4m3fnuz).float().nan_to_num().to(torch.float8_e4m3fn)
    assert call.arguments["a2"].dtype == fp8.OCP.dtype
    assert not verdict(result(per_expert("moe_gemm2"), call, a2=halved), call, reference).passed


# ---- cases ----------------------------------------------------------------------------------------------------------


@every_operator
def test_edge_families_have_the_new_dtypes_and_some_smoke(name: str) -> None:
    edge = [case for case in matrix(name).cases("edge") if case.get("in") in DTYPES]
    assert {case.get("in") for case in edge} == set(DTYPES) and len(edge) <= 80
    smoke = [case for case in edge if "smoke" in case.tiers]
    assert {case.get("in") for case in smoke} == set(DTYPES) and len(smoke) <= 10
    families = {case.family for case in edge}
    assert {"F17-microscaled", "F21-scales"} <= families
    assert arch("gfx950").fact("fp4") is True


@every_operator
def test_edge_families_of_the_new_dtypes_have_slots_tokens_blocks_and_routes_that_change(name: str) -> None:
    """A slot read in two bits, a token in five, scale columns beyond the first eight of stage 2: all passed before."""
    found = [case for case in matrix(name).cases("edge") if case.family == "F11-microscaled"]
    assert {case.get("in") for case in found} == set(DTYPES)
    assert {case.number("topk") for case in found} == {1, 4, 9}
    assert {case.number("tokens") for case in found} == {0, 1, 2, 33, 65}
    assert {case.number("inter") for case in found} == {64, 320}
    assert {case.get("in") for case in found if case.get("launch") == "redraw"} == set(DTYPES)
