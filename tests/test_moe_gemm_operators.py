"""The operators of two-stage MoE in the engine: counts, contract, data, poison, verdicts that see every mutation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import CPU, OPERATORS, SHAPES, official, per_expert, prepared, result, verdict
from torch import Tensor

from conformance import Kernel
from conformance.case import parse_case
from conformance.errors import ConformanceError
from conformance.expectations.rule_set import load_rule_set
from conformance.formats import bits
from conformance.judging.judge import Judge
from conformance.operator import Shared
from conformance.registry import matrix, operator, rule_set_file
from conformance.result import Settings
from conformance.verdicts.verdict import golden_fraction
from kernels.gemm_2stage import per_expert as per_expert_module
from kernels.gemm_2stage import unpack
from references.moe_gemm_2stage import cases
from references.moe_gemm_2stage.rounding import bf16_half_away
from references.moe_gemm_2stage.sorting import sentinel
from references.moe_gemm_2stage.storage import STORED

pytestmark = pytest.mark.usefixtures("one_thread")
MICROSCALED = {"fp4", "a8w4", "a16w4"}  # with tests of their own
PLAIN = tuple(name for name in STORED if name not in MICROSCALED)
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_shape = pytest.mark.parametrize("shape", SHAPES)
SMALL = "tokens:19-hidden:64-inter:64-experts:5-topk:2-bm:16-in:{}-mode:{}-out:{}-mask:{}"


def small(name: str, dtype: str = "fp8", mode: str = "atomic", out: str = "f16", mask: str = "no", more: str = ""
          ) -> str:
    return f"{name}/F/{SMALL.format(dtype, mode, out, mask)}{more}"


# ---- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "arithmetic"), [("fp8", "e4m3"), ("fp16", "fp16"), ("bf16", "bf16"),
                                                   ("int8", "int8"), ("int4", "int8"), ("int4_bf16_g32", "bf16")])
def test_cost_counts_the_weights_of_routed_experts_only(dtype: str, arithmetic: str) -> None:
    """One token with 2 slots: 2 of 5 experts are read, each through a block of 16 ids."""
    for name, weights, products in (("moe_gemm1", ("w1",), 2), ("moe_gemm2", ("w2",), 1),
                                    ("moe_gemm_2stage", ("w1", "w2"), 3)):
        case = parse_case(small(name, dtype).replace("tokens:19", "tokens:1"))
        call = operator(name).inputs(case, "reduced", CPU, Shared())
        cost = operator(name).cost(call)
        given = call.arguments
        read = sum(given[of].nbytes * 2 // 5 for weight in weights for of in (weight, f"scale_{weight}")
                   if given[of] is not None)
        rows = sum(given[row].nbytes for row in ("x", "a2", "scale_x", "scale_a2") if given.get(row) is not None)
        lists = 4 * (2 * 16 + 2 + 1) + (0 if name == "moe_gemm1" else 4 * 2)  # stage 1 reads no weights of slots
        assert cost.flops == 2 * 2 * products * 64 * 64
        assert cost.bytes == read + rows + lists + call.output.nbytes
        assert cost.arithmetic == arithmetic


def test_cost_of_stage_2_in_numbers() -> None:
    """The prefill shape in miniature: fp8, 19 tokens, 2 slots, all 38 of them routed."""
    call = operator("moe_gemm2").inputs(parse_case(small("moe_gemm2", mode="reduce", out="bf16")), "official", CPU,
                                        Shared())
    experts = len(call.arguments["topk_ids"].unique())
    padded = sum(-(-int(count) // 16) * 16 for count in call.arguments["topk_ids"].unique(return_counts=True)[1])
    slots = 38 * (64 + 4)  # fp8 rows and their scales
    weights = experts * (64 * 64 + 64 * 4)
    assert operator("moe_gemm2").cost(call).bytes == (
        slots + weights + 4 * (padded + padded // 16 + 38 + 1) + call.output.nbytes)


@pytest.mark.parametrize(("name", "dtype"), [("moe_gemm1", "fp8"), ("moe_gemm1", "int8smooth"), ("moe_gemm2", "fp8")])
def test_cost_leaves_out_rows_without_an_expert(name: str, dtype: str) -> None:
    """Every slot of token 0 and one of token 1 lose their expert."""
    contract = operator(name)
    call = contract.inputs(parse_case(small(name, dtype, mode="reduce")), "official", CPU, Shared())
    ids = call.arguments["topk_ids"].clone()
    ids[0], ids[1, 0] = -1, -1
    kept = {int(one) for one in ids.unique() if one >= 0} == {int(one) for one in call.arguments["topk_ids"].unique()}
    assert kept  # no expert's weights fall away with the slots
    less = contract.cost(replace(call, arguments={**call.arguments, "topk_ids": ids}))
    row = 64 + 4
    lost = row if (name, dtype) == ("moe_gemm1", "fp8") else 3 * row  # tokens share a row, or each slot has its own
    weights = 0 if name == "moe_gemm1" else 3 * 4
    assert contract.cost(call).bytes - less.bytes == lost + weights
    assert contract.cost(call).flops - less.flops == 3 * 2 * 64 * 64 * (2 if name == "moe_gemm1" else 1)


def test_cost_of_masked_experts_is_nothing() -> None:
    whole, part = (operator("moe_gemm2").cost(operator("moe_gemm2").inputs(
        parse_case(small("moe_gemm2", mode="reduce", mask=mask)), "reduced", CPU, Shared())) for mask in ("no", "yes"))
    assert part.flops < whole.flops
    assert part.bytes < whole.bytes


# ---- matrices -------------------------------------------------------------------------------------------------------


def test_the_fp8_tier_is_the_published_matrix() -> None:
    cases = matrix("moe_gemm_2stage").cases("fp8")
    assert len(cases) == 84
    assert set(Counter(case.params["shape"] for case in cases).values()) == {14}
    assert not [case for case in cases if (case.params["mode"], case.params["out"]) == ("reduce", "f32")]
    assert not [case for case in cases if (case.params["mode"], case.params["mask"]) == ("atomic", "yes")]
    published = load_rule_set(rule_set_file("flydsl_moe_gemm_2stage")).cells["fp8"]
    keys = list(cases[0].params)
    spelled = {tuple(str(cell[key]) for key in keys) for cell in published}
    assert spelled == {tuple(case.params[key] for key in keys) for case in cases}


@pytest.mark.parametrize(("name", "counts"), [
    ("moe_gemm1", {"official": 384, "fp8": 48, "dtypes": 336, "smoke": 24, "sweep": 288}),
    ("moe_gemm2", {"official": 960, "fp8": 120, "dtypes": 840, "smoke": 40, "stand_alone": 36, "sweep": 720}),
    ("moe_gemm_2stage", {"official": 672, "fp8": 84, "dtypes": 588, "smoke": 60}),
])
def test_tiers(name: str, counts: dict[str, int]) -> None:
    assert {tier: len(matrix(name).cases(tier)) for tier in counts} == counts
    assert matrix(name).default_tiers == ("smoke", "edge")
    smoke = matrix(name).cases("smoke")
    assert {case.params["in"] for case in smoke} == set(PLAIN)
    assert {case.params["shape"] for case in smoke} == set(SHAPES)


# ---- contract -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"in_dtype": "fp9"}, ValueError, ("in_dtype", "'fp9'", "fp8, int8")),
    ({"combine": "sum"}, ValueError, ("combine", "'sum'", "atomic, reduce")),
    ({"rule": "up"}, ValueError, ("rule", "'up'")),
    ({"block": 24}, ValueError, ("block is 24", "multiple of 16")),
    ({"x": None}, TypeError, ("x is None", "2 dimensions")),
    ({"scale_x": None}, TypeError, ("scale_x is None", "a tensor")),
    ({"smooth2": torch.ones(5, 64)}, ValueError, ("smooth2 is given", "'fp8' has none")),
    ({"num_valid_ids": torch.ones(2, dtype=torch.int32)}, ValueError, ("num_valid_ids", "(2,)", "(1,)")),
    ({"topk_weights": torch.ones(19, 2, dtype=torch.float64)}, TypeError, ("topk_weights", "float64", "float32")),
    ({"sorted_token_ids": torch.zeros(7, dtype=torch.int32)}, ValueError, ("sorted_token_ids", "(7,)")),
    ({"w1": torch.zeros(5, 128, 64)}, TypeError, ("w1", "torch.float32", "float8_e4m3fn")),
    ({"topk_ids": torch.zeros(2, 19, dtype=torch.int32).T}, ValueError, ("topk_ids", "strides", "contiguous")),
])
def test_a_wrong_argument_is_named(changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    call, _ = prepared(small("moe_gemm_2stage"))
    validate = operator("moe_gemm_2stage").validate
    out = torch.empty(call.output.shape, dtype=call.output.dtype)
    validate(call.arguments, out, False)
    with pytest.raises(error) as raised:
        validate(call.arguments | changes, out, False)
    assert all(word in str(raised.value) for word in words), raised.value


def test_fp32_partials_and_outputs_of_another_shape_are_refused() -> None:
    call, _ = prepared(small("moe_gemm2"))
    validate = operator("moe_gemm2").validate
    with pytest.raises(ValueError, match="combine is 'reduce' and out is 'f32'"):
        validate(call.arguments | {"combine": "reduce"}, torch.empty(38, 64), False)
    with pytest.raises(ValueError, match=r"out has shape \(19, 64\): \(38, 64\)"):
        validate(call.arguments | {"combine": "reduce"}, torch.empty(19, 64, dtype=torch.float16), False)
    with pytest.raises(TypeError, match="int8"):
        validate(call.arguments, torch.empty(19, 64, dtype=torch.int8), False)


@pytest.mark.parametrize(("point", "words"), [
    (small("moe_gemm2", mode="reduce", out="f32"), "partials are f16 or bf16 only"),
    (small("moe_gemm2", dtype="a16wi4"), "in:a16wi4 is none of fp8"),
    (small("moe_gemm2", out="f64"), "f64"),
    (small("moe_gemm2", more="-routing:odd"), "routing:odd is none of skewed"),
    (small("moe_gemm2").replace("topk:2", "topk:6"), "topk:6 is more than experts:5"),
    (small("moe_gemm2").replace("inter:64", "inter:65"), "multiples of 32"),
])
def test_a_case_that_does_not_fit_is_an_error(point: str, words: str) -> None:
    case = parse_case(point)
    with pytest.raises(ConformanceError, match=words):
        operator(case.operator).inputs(case, "reduced", CPU, Shared())


# ---- data -----------------------------------------------------------------------------------------------------------


@every_shape
def test_reduced_sizes_keep_every_structure(shape: str) -> None:
    (call, _), (masked, _) = (prepared(official("moe_gemm_2stage", shape=shape, mode="reduce", mask=mask)[0].id)
                              for mask in ("no", "yes"))
    given, block = call.arguments, call.arguments["block"]
    load = torch.bincount(given["topk_ids"].flatten(), minlength=given["w1"].shape[0])
    assert int(load.max()) > block and bool((load % block != 0).any()) and int(load[-1]) > 0
    assert int(load.min()) == 0
    full = official("moe_gemm_2stage", shape=shape)[0]
    assert given["topk_ids"].shape[1] == full.number("topk")
    assert int(given["topk_ids"][0, 0]) == 0 and int(given["topk_ids"][-1, 0]) == len(load) - 1
    share = given["topk_weights"]
    assert float(share.max()) > min(0.6, 3 / share.shape[1])
    assert float((share.amax(dim=1) / share.amin(dim=1)).median()) > 2
    assert torch.allclose(share.sum(dim=1), torch.ones(len(share)))
    here = masked.arguments["expert_mask"] != 0
    assert 1 < int(here.sum()) < len(here) and bool(here[0]) and bool(here[-1])
    foreign = ~here[masked.arguments["topk_ids"].long()]
    assert 0 < int(foreign.sum()) < foreign.numel()
    assert bool(foreign.all(dim=1).any()), "no token is without an expert"
    assert masked.bitwise_rows is not None and torch.equal(masked.bitwise_rows, foreign.all(dim=1))
    if (scale := given["scale_x"]) is not None:
        assert float(scale.max() / scale.min()) > 100


def test_slots_have_rows_of_their_own_and_gate_and_up_differ() -> None:
    call, _ = prepared(small("moe_gemm2", dtype="bf16"))
    a2 = call.arguments["a2"].float()
    assert not torch.equal(a2[:, 0], a2[:, 1]) and bool((a2 < 0).any())
    call, _ = prepared(small("moe_gemm1", dtype="bf16"))
    weight = unpack.weight_matrix(call.arguments["w1"][0])
    skew = [float(part.mean() / part.std()) for part in weight.chunk(2)]
    assert skew[0] > 3 * abs(skew[1])


@every_operator
@pytest.mark.parametrize("dtype", PLAIN)
def test_the_golden_keeps_its_budget(name: str, dtype: str) -> None:
    for mode, out, mask in (("atomic", "bf16", "no"), ("reduce", "f16", "yes"), ("atomic", "f16", "yes")):
        call, reference = prepared(small(name, dtype, mode, out, mask))
        assert golden_fraction(reference)() <= 1.0, (mode, out)
        assert bool((reference.golden[call.bitwise_rows] == 0).all())


def test_the_seed_leaves_out_what_changes_no_input() -> None:
    def tensors(point: str) -> dict[str, Tensor]:
        call, _ = prepared(point)
        return {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}

    first, second = (tensors(small("moe_gemm_2stage", mode=mode, out="bf16")) for mode in ("atomic", "reduce"))
    assert all(torch.equal(bits(first[name]), bits(second[name])) for name in first)
    third = tensors(small("moe_gemm_2stage", more="-draw:2"))
    assert not torch.equal(bits(first["x"]), bits(third["x"]))


# ---- poison ---------------------------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("dtype", ["fp8", "int4", "bf16", "int8smooth", "int4_bf16_g32"])
def test_poison_stands_where_it_should_and_reaches_no_reference(name: str, dtype: str) -> None:
    call, reference = prepared(small(name, dtype, "reduce", "f16", "yes"))
    given, contract = call.arguments, operator(name)
    local = int((given["expert_mask"] != 0).sum())
    weights = [bits(given[key]) for key in ("w1", "w2") if key in given]
    rows, blocks = int(given["num_valid_ids"]), int(given["num_valid_ids"]) // given["block"]
    padding = given["sorted_token_ids"][:rows] == sentinel(19, 2)
    assert 0 < rows < len(given["sorted_token_ids"]) and bool(padding.any()) and local < len(weights[0])
    before = [weight.clone() for weight in weights]
    call.set_poison(0)
    try:
        for weight, was in zip(weights, before, strict=True):
            assert bool((weight[local:] != was[local:]).all()) and torch.equal(weight[:local], was[:local])
        assert bool((given["sorted_token_ids"][rows:] & 0xFFFFFF < 19).all())
        assert bool((given["sorted_expert_ids"][blocks:] == 0).all())
        assert bool(given["sorted_weights"][:rows][padding].isnan().all())
        assert int(given["topk_weights"].isnan().sum()) > 0
        again = contract.reference(call, Shared())
        assert torch.equal(bits(again.golden), bits(reference.golden))
        assert golden_fraction(again)() == golden_fraction(reference)()
    finally:
        call.set_poison(1)
    assert bool((given["sorted_token_ids"][rows:] == sentinel(19, 2)).all())


def _sorted_kernel(past_valid: bool = False, global_ids: bool = False, padding: bool = False) -> Any:
    """Stage 2 in atomic mode from the sorted lists, in bf16, with faults that only poison shows."""
    def run(a2: Tensor, w2: Tensor, *, sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor,
            num_valid_ids: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None,
            in_dtype: str, block: int, combine: str, out: Tensor) -> None:
        tokens, _, _ = a2.shape
        out.zero_()
        for number, expert in enumerate(sorted_expert_ids.tolist()):
            if expert < 0 or (number * block >= int(num_valid_ids) and not past_valid):
                continue
            if global_ids and expert_mask is not None:
                expert = int(expert_mask.nonzero().flatten()[expert])
            ids = sorted_token_ids[number * block : number * block + block]
            share = sorted_weights[number * block : number * block + len(ids)]
            token, slot = ids & 0xFFFFFF, ids >> 24
            valid = token < tokens
            if padding:  # by multiplication instead of selection
                z = a2[token.clamp(max=tokens - 1), slot.clamp(max=a2.shape[1] - 1)].float()
                z = z @ unpack.weight_matrix(w2[expert]).T * share[:, None] * valid[:, None]
                out.index_add_(0, token.clamp(max=tokens - 1), z)
                continue
            token, slot, share = token[valid], slot[valid], share[valid]
            out.index_add_(0, token, a2[token, slot].float() @ unpack.weight_matrix(w2[expert]).T * share[:, None])

    return run


@pytest.mark.parametrize("fault", [None, "past_valid", "global_ids", "padding"])
def test_a_kernel_that_reads_what_is_unspecified_fails(fault: str | None) -> None:
    function = _sorted_kernel(**({fault: True} if fault else {}))
    names = frozenset(function.__kwdefaults__ or {}) | frozenset(function.__annotations__) - {"return"}
    kernel = Kernel("sorted", "moe_gemm2", function, "within-budget", parameters=names)
    found = Judge(Settings()).run(parse_case(small("moe_gemm2", "bf16", "atomic", "f32", "yes")), kernel)
    assert found.state == ("pass" if fault is None else "fail"), found.message
    if fault is not None:
        assert found.kind in ("poison", "nan-map", "budget")


# ---- verdicts -------------------------------------------------------------------------------------------------------


def _reversed(left: Tensor, right: Tensor, exact: bool, group_scale: Tensor | None = None) -> Tensor:
    """Groups of 32 from the last to the first, each in fp32."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64 if exact else torch.float32)
    for number in reversed(range(left.shape[1] // 32)):
        part = slice(32 * number, 32 * number + 32)
        term = left[:, part].to(total.dtype) @ right[:, part].to(total.dtype).T
        total += term if group_scale is None else term * group_scale[number]
    return total.float()


@every_operator
@pytest.mark.parametrize("dtype", PLAIN)
def test_another_order_of_sums_and_experts_is_right(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = per_expert_module._experts
    monkeypatch.setattr(per_expert_module, "product", _reversed)
    monkeypatch.setattr(per_expert_module, "_experts", lambda *given: reversed(list(in_order(*given))))
    changed = 0
    for shape in ("S", "L"):
        for case in official(name, shape=shape, launch="eager", **{"in": dtype}):
            call, reference = prepared(case.id)
            found = verdict(result(per_expert(name), call), call, reference)
            assert found.passed, found.message
            changed += found.level != "bit-exact"
    assert changed or dtype in ("int8", "int8smooth", "int4")


def test_bf16_may_round_ties_away_and_nothing_else() -> None:
    for name in ("moe_gemm1", "moe_gemm2"):
        call, reference = prepared(small(name, "bf16", "reduce", "bf16"))
        exact = next(iter(reference.oracle())).value.float()
        assert verdict(bf16_half_away(exact), call, reference).passed
        cut = (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        assert not verdict(cut, call, reference).passed


@pytest.mark.parametrize("doweight", ["after", "gate", "gate_and_up"])
def test_the_routing_weight_of_stage_1_means_one_thing(doweight: str) -> None:
    call, reference = prepared(small("moe_gemm1", "bf16", more=f"-doweight:{doweight}"))
    for other in ("none", "after", "gate", "gate-and-up"):
        found = verdict(result(per_expert("moe_gemm1"), call, doweight=other), call, reference)
        assert found.passed == (other == doweight.replace("_", "-")), other


def test_integer_rules_and_encodings_mean_one_thing() -> None:
    call, reference = prepared(small("moe_gemm_2stage", "int8", more="-rule:nearest"))
    assert verdict(result(per_expert("moe_gemm_2stage"), call), call, reference).passed
    assert not verdict(result(per_expert("moe_gemm_2stage"), call, rule="truncate"), call, reference).passed
    call, reference = prepared(small("moe_gemm2", "fp8", more="-encoding:fnuz"))
    assert call.arguments["w2"].dtype == torch.float8_e4m3fnuz
    assert verdict(result(per_expert("moe_gemm2"), call), call, reference).passed
    as_ocp = call.arguments["w2"].view(torch.uint8).view(torch.float8_e4m3fn)
    assert not verdict(result(per_expert("moe_gemm2"), call, w2=as_ocp), call, reference).passed


def test_exact_data_is_judged_by_bits() -> None:
    call, reference = prepared(small("moe_gemm2", "int4", "atomic", "f32", more="-data:coded"))
    assert call.regime == "exact"
    right = result(per_expert("moe_gemm2"), call)
    assert verdict(right, call, reference).level == "bit-exact"
    near = torch.nextafter(right, torch.full_like(right, torch.inf))
    assert verdict(near, call, reference).kind == "exact"
    assert verdict(near, replace(call, regime="real"), reference).passed


@every_operator
def test_whole_cases_pass_in_every_launch_mode(name: str) -> None:
    judge = Judge(Settings(), "all")
    for more in ("-launch:eager", "-launch:graph", "-launch:repeat"):
        found = judge.run(parse_case(small(name, "fp8", "reduce", "bf16", "yes", more)), per_expert(name))
        assert (found.state, found.path) == ("pass", "per_expert"), found.message


def test_a_kernel_may_declare_that_some_cases_do_not_repeat() -> None:
    calls = [0]

    def drifting(out: Tensor, **given: Any) -> None:
        per_expert("moe_gemm2").function(**given, out=out)
        calls[0] += 1
        place = out[0, :1].float()
        out[0, :1] = torch.nextafter(place, place + (1.0 if calls[0] % 2 else -1.0)).to(out.dtype)

    names = frozenset(operator("moe_gemm2").arguments) | {"out"}
    case = parse_case(small("moe_gemm2", "bf16", "atomic", "f32"))
    for repeatable, state in ((True, "fail"), (lambda params: params["mode"] != "atomic", "pass")):
        kernel = Kernel("drifting", "moe_gemm2", drifting, "within-budget", repeatable=repeatable, parameters=names)
        assert Judge(Settings()).run(case, kernel).state == state


@pytest.mark.parametrize(("params", "drawn"), [
    ("mode:atomic-out:f32-mask:no-data:exact", "coded"), ("mode:reduce-out:f16-mask:no-data:exact", "coded"),
    ("mode:atomic-out:bf16-mask:no-data:exact", "real"),  # no integers make sums exact that are kept in bf16
    ("mode:atomic-out:bf16-mask:no-data:coded", "coded"), ("mode:atomic-out:f32-mask:no", "real"),
])
def test_exact_data_where_sums_can_be_exact(params: str, drawn: str) -> None:
    case = parse_case(f"moe_gemm2/F/tokens:9-hidden:64-inter:64-experts:4-topk:3-bm:16-in:int8-{params}")
    assert cases.data_of(case) == drawn
