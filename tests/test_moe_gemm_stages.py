"""Stages 1 and 2 and their chain: bounds that right evaluations keep, in any order, and that no known fault keeps."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_mutations import MUTATIONS, Mutation
from gemm_samples import MODES, SHAPES, Sample, combinations, requantised, run_chain, run_stage1, run_stage2, sample
from gemm_verdict import compare
from torch import Tensor

from conformance.formats import bits
from references.moe_gemm_2stage import dtypes, golden, stages
from references.moe_gemm_2stage.bounds import Arithmetic, Bounded, dot_error, silu
from references.moe_gemm_2stage.chain import chain, intermediate
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.stages import DOWEIGHT_STAGE1, Routes, combine_atomic, combine_reduce

every_mode = pytest.mark.parametrize("name", MODES)
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
OUTS = ("f16", "bf16", "f32")


@functools.lru_cache(maxsize=64)
def stage1_bounds(of: Sample, doweight: str = "none") -> Bounded:
    return stages.stage1(of.rows, of.w1, of.routes, doweight, of.mode.arithmetic)


@functools.lru_cache(maxsize=64)
def stage2_terms(of: Sample, doweight: bool) -> Bounded:
    return stages.stage2(of.a2, of.w2, of.routes, doweight, of.mode.arithmetic)


def stage2_bounds(of: Sample, how: str, out: str, doweight: bool = True) -> Bounded:
    terms = stage2_terms(of, doweight)
    return (combine_atomic if how == "atomic" else combine_reduce)(terms, of.routes, out)


@functools.lru_cache(maxsize=64)
def chain_bounds(of: Sample, how: str, out: str, doweight: str = "none") -> Bounded:
    return chain(of.rows, of.w1, of.w2, of.routes, of.mode, how, out, smooth2=of.smooth2, doweight_stage1=doweight,
                 **of.policies)


# ---- no false alarm -------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("shape", ["S", "L"])
def test_stage_1_in_other_orders_and_formats_is_right(name: str, shape: str) -> None:
    of = sample(name, shape)
    for doweight in DOWEIGHT_STAGE1:
        exact = stage1_bounds(of, doweight)
        for order, out in enumerate(OUTS):
            found = compare(run_stage1(of, out, order, doweight), exact, of.routes.valid)
            assert found.passed, (doweight, out, order, found)
        assert compare(golden.stage1(of.rows, of.w1, of.routes, "f32", doweight), exact, of.routes.valid).passed


@every_mode
@pytest.mark.parametrize("shape", ["S", "L"])
def test_stage_2_in_other_orders_and_formats_is_right(name: str, shape: str) -> None:
    of = sample(name, shape)
    for (how, out), doweight in itertools.product(combinations(of.mode), (True, False)):
        exact = stage2_bounds(of, how, out, doweight)
        for order in (1, 2):
            found = compare(run_stage2(of, out, how, order, doweight), exact)
            assert found.passed, (how, out, order, found)
        parts = golden.stage2_parts(of.a2, of.w2, of.routes, out, doweight)
        assert compare(golden.combine(parts, of.routes, how), exact).passed


@every_mode
@every_shape
def test_the_chain_in_other_orders_and_formats_is_right(name: str, shape: str) -> None:
    of = sample(name, shape)
    for order, (how, out) in enumerate(combinations(of.mode)):
        exact = chain_bounds(of, how, out)
        assert bool(exact.error.isfinite().all())
        found = compare(run_chain(of, out, how, order % 3), exact)
        assert found.passed, (how, out, order, found)


@pytest.mark.parametrize("seed", range(1, 9))
def test_no_false_alarm_on_other_draws(seed: int) -> None:
    for name in ("fp8", "int8smooth", "int4_bf16_g32", "a8w4"):
        of = sample(name, "FP4-S", seed)
        assert compare(run_stage1(of, "f32", seed % 3), stage1_bounds(of), of.routes.valid).passed
        how, out = combinations(of.mode)[seed % len(combinations(of.mode))]
        assert compare(run_stage2(of, out, how, seed), stage2_bounds(of, how, out)).passed
        assert compare(run_chain(of, out, how, seed % 3), chain_bounds(of, how, out)).passed


@pytest.mark.parametrize(("name", "policies"), [
    ("fp8", {"encoding": "fnuz"}), ("int8", {"rule": "nearest"}), ("int4", {"rule": "nearest"}),
    ("int8smooth", {"rule": "nearest"}), ("fp4", {"mx_rule": "even"}), ("a8w4", {"mx_rule": "up"}),
])
def test_a_named_policy_is_right_by_its_own_rule_only(name: str, policies: dict[str, str]) -> None:
    of = sample(name, "M", **policies)
    assert compare(run_stage1(of, "f16"), stage1_bounds(of), of.routes.valid).passed
    out = run_chain(of, "f16", "reduce", 1)
    assert compare(out, chain_bounds(of, "reduce", "f16")).passed
    other = replace(of, policies={})
    assert not compare(out, chain_bounds(other, "reduce", "f16")).passed


def test_a_narrower_accumulator_must_be_declared() -> None:
    of = sample("fp16", "S")
    narrow = replace(of, a2=replace(of.a2, payload=of.a2.payload * (1 + 2.0**-13)))
    out = run_stage2(narrow, "f32", "atomic")
    assert not compare(out, stage2_bounds(of, "atomic", "f32")).passed
    terms = stages.stage2(of.a2, of.w2, of.routes, True, Arithmetic(unit=2.0**-13))
    assert compare(out, combine_atomic(terms, of.routes, "f32")).passed


def test_bf16_rounded_half_away_is_right_too() -> None:
    of = sample("fp8", "M")
    for how in ("atomic", "reduce"):
        assert compare(run_stage2(of, "bf16", how, bf16_rule="half-away"), stage2_bounds(of, how, "bf16")).passed


def test_weights_applied_in_stage_1_are_right_in_the_chain() -> None:
    of = sample("fp8", "M")
    for doweight in DOWEIGHT_STAGE1[1:]:
        a2 = requantised(run_stage1(of, "f16", 0, doweight), of)
        out = run_stage2(replace(of, a2=a2), "f16", "reduce", doweight=False)
        assert compare(out, chain_bounds(of, "reduce", "f16", doweight)).passed
        others = [other for other in DOWEIGHT_STAGE1 if other != doweight]
        assert not any(compare(out, chain_bounds(of, "reduce", "f16", other)).passed for other in others)


def test_integer_payloads_and_power_of_two_scales_are_exact_in_reduce_mode() -> None:
    """fp8 numbers that are small integers: every sum is exact in fp32, so only the documented roundings are left."""
    of = sample("fp8", "S")
    generator = torch.Generator().manual_seed(7)

    def whole(like: Tensor, most: int) -> Tensor:
        return torch.randint(-most, most + 1, like.shape, generator=generator).float()

    def power(like: Tensor | None) -> Tensor:
        assert like is not None
        return torch.exp2(torch.randint(-3, 4, like.shape, generator=generator).float())

    exact = replace(
        of, a2=Operand(whole(of.a2.payload, 8), scale=power(of.a2.scale)),
        w2=Operand(whole(of.w2.payload, 4), scale=power(of.w2.scale)),
        routes=replace(of.routes, weights=power(of.routes.weights)))
    for out in ("f16", "bf16"):
        parts = golden.stage2_parts(exact.a2, exact.w2, exact.routes, out, bf16_rule="half-away")
        expected = golden.combine(parts, exact.routes, "reduce")
        for order in range(3):
            found = run_stage2(exact, out, "reduce", order, bf16_rule="half-away")
            assert torch.equal(bits(found), bits(expected))


# ---- every known fault ----------------------------------------------------------------------------------------------


def mutated(of: Sample, mutation: Mutation, stage: int, out: str, how: str) -> Tensor | None:
    changed: Sample | None = of if mutation.before is None else mutation.before[stage - 1](of)
    if changed is None:
        return None
    result = run_stage1(changed, out, 1, "after") if stage == 1 else run_stage2(changed, out, how, 1)
    return result if mutation.after is None else mutation.after(result)


def assert_rejected(of: Sample, mutation: Mutation) -> None:
    seen = 0
    for out in OUTS:
        result = mutated(of, mutation, 1, out, "")
        if result is not None:
            found = compare(result, stage1_bounds(of, "after"), of.routes.valid)
            assert not found.passed, (1, out)
            seen += 1
    for how, out in combinations(of.mode):
        result = mutated(of, mutation, 2, out, how)
        if result is not None:
            assert not compare(result, stage2_bounds(of, how, out)).passed, (2, how, out)
            seen += 1
    assert seen or (mutation.name == "scale of token 0 for all" and of.rows.scale is None)


@every_mutation
@every_shape
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_no_mutation_passes_on_any_shape(mutation: Mutation, shape: str, name: str) -> None:
    assert_rejected(sample(name, shape), mutation)


@every_mutation
@every_mode
def test_no_mutation_passes_in_any_mode(mutation: Mutation, name: str) -> None:
    assert_rejected(sample(name, "S"), mutation)


@every_mutation
@pytest.mark.parametrize("name", ["fp8", "int8smooth", "int4", "bf16", "fp4"])
def test_no_mutation_of_stage_2_passes_end_to_end(mutation: Mutation, name: str) -> None:
    """The kernel's own stage 1 is right here; the reference never sees it."""
    of = sample(name, "M")
    for how, out in combinations(of.mode):
        own = replace(of, a2=requantised(run_stage1(of, "f16"), of))
        result = mutated(own, mutation, 2, out, how)
        if result is not None:
            assert not compare(result, chain_bounds(of, how, out)).passed, (how, out)


@pytest.mark.parametrize("fault", ["gate and up swapped", "wrong expert", "nibble halves swapped", "output halved",
                                   "one row garbage", "last row unwritten", "last 64 columns zero"])
@pytest.mark.parametrize("name", ["fp8", "int8", "fp16", "a8w4"])
def test_faults_of_stage_1_are_seen_end_to_end(fault: str, name: str) -> None:
    of = sample(name, "M")
    mutation = next(m for m in MUTATIONS if m.name == fault)
    changed: Sample | None = of if mutation.before is None else mutation.before[0](of)
    assert changed is not None
    out1 = run_stage1(changed, "f16")
    out1 = out1 if mutation.after is None else mutation.after(out1)
    how, out = combinations(of.mode)[0]
    result = run_stage2(replace(of, a2=requantised(out1, of)), out, how)
    assert not compare(result, chain_bounds(of, how, out)).passed


def test_finer_faults_are_seen() -> None:
    """A bf16 accumulator, a missing slot in one token, one wrong element, SiLU by a coarse approximation."""
    of = sample("bf16", "S")
    exact, right = stage1_bounds(of), run_stage1(of, "f32")
    coarse = replace(of, rows=replace(of.rows, payload=of.rows.payload * (1 + 2.0**-9)))
    assert not compare(run_stage1(coarse, "f32"), exact, of.routes.valid).passed
    token, slot = of.routes.valid.nonzero()[9].tolist()
    spoiled = right.half()
    spoiled[token, slot, int(spoiled[token, slot].abs().argmax())] *= 1 + 2.0**-9
    found = compare(spoiled, exact, of.routes.valid)
    assert (found.wrong, found.rows) == (1, (2 * token + slot,))
    assert found.whole > 0.99999
    ids = of.routes.ids.clone()
    ids[7, int(of.routes.valid[7].nonzero()[-1])] = -1
    fewer = replace(of, routes=replace(of.routes, ids=ids))
    found = compare(run_stage2(fewer, "f16", "reduce"), stage2_bounds(of, "reduce", "f16"))
    assert found.rows == (7,)
    gate = Bounded(torch.linspace(-9, 9, 400).double(), torch.zeros(400, dtype=torch.float64))
    hard = gate.value * (gate.value / 6 + 0.5).clamp(0, 1)
    assert not compare(hard.half()[None], Bounded(silu(gate).value[None], silu(gate).error[None])).passed


def test_fnuz_numbers_read_as_ocp_are_off_by_two_and_by_four() -> None:
    of = sample("fp8", "S")
    one = replace(of, a2=replace(of.a2, payload=of.a2.payload * 2))
    both = replace(one, w2=replace(one.w2, payload=one.w2.payload * 2))
    for wrong, ratio in ((one, 2.0), (both, 4.0)):
        found = compare(run_stage2(wrong, "f32", "atomic"), stage2_bounds(of, "atomic", "f32"))
        assert not found.passed and found.direction > 0.999999 and abs(found.scale - ratio) < 1e-4


# ---- the bounds themselves ------------------------------------------------------------------------------------------


def test_dot_products_by_exact_fractions() -> None:
    of = sample("fp8", "FP4-S")
    sums = stages.dot(of.a2, of.w2, of.routes)
    for t, s in ((0, 0), (5, 1), (15, 1)):
        expert = int(of.routes.ids[t, s])
        if expert < 0:
            assert not sums.total[t, s].any()
            continue
        for n in (0, 17):
            left, right = of.a2.payload[t, s].tolist(), of.w2.payload[expert, n].tolist()
            products = [Fraction(a) * Fraction(b) for a, b in zip(left, right, strict=True)]
            assert abs(float(sums.total[t, s, n]) - float(sum(products))) <= 2.0**-44 * float(sums.size[t, s, n])
            assert math.isclose(float(sums.size[t, s, n]), float(sum(map(abs, products))), rel_tol=1e-12)


def test_integer_sums_are_exact_up_to_2_to_the_24() -> None:
    total = torch.tensor([2.0**24, 2.0**24 + 2, -(2.0**25)], dtype=torch.float64)
    found = dot_error(total, total.abs(), 1000, Arithmetic(integer=True))
    assert found.tolist() == [0.0, 1.0 + 2.0**-23, 2.0]
    assert float(dot_error(total, total.abs(), 4, Arithmetic())[0]) >= 4.0  # n u S where n is below lambda sqrt(n)


def test_silu_bounds_hold_for_fp32_and_are_near_its_precision() -> None:
    x = torch.cat([torch.linspace(-120, 120, 20001), torch.logspace(-30, 2, 500), -torch.logspace(-30, 2, 500)])
    bounded = silu(Bounded(x.double(), torch.zeros(len(x), dtype=torch.float64)))
    for value in (x / (1 + torch.exp(-x)), golden.silu(x), x * torch.sigmoid(x)):
        assert bool(((value.double() - bounded.value).abs() <= bounded.error).all())
    ordinary = x.abs() < 20
    assert float((bounded.error / bounded.value.abs())[ordinary].nan_to_num(0).max()) < 100 * 2.0**-24


def test_silu_carries_the_error_of_its_argument() -> None:
    x = torch.linspace(-10, 10, 501).double()
    for size in (1e-6, 1e-2, 0.5):
        found = silu(Bounded(x, torch.full_like(x, size)))
        for moved in (x - size, x + size):
            assert bool(((moved * torch.sigmoid(moved) - found.value).abs() <= found.error).all())


def test_rounding_through_a_cast_leaves_no_error_away_from_its_midpoints() -> None:
    value = torch.tensor([1.0001, 1 + 2.0**-11, 5.0], dtype=torch.float64)
    found = Bounded(value, torch.full_like(value, 1e-7)).through(lambda v: v.half().float())
    assert found.error.tolist() == [0.0, 2.0**-10, 0.0]


@every_mode
def test_a_re_quantised_intermediate_contains_every_right_kernels(name: str) -> None:
    of = sample(name, "M")
    found = intermediate(stage1_bounds(of), of.mode, of.routes, of.smooth2)
    assert found.error is not None
    scale = 1.0 if found.scale is None else found.scale.double()[..., None]
    centre, error = found.value() * scale, found.error * scale
    for order in range(3):
        own = requantised(run_stage1(of, "f16", order), of)
        value = own.value() * (1.0 if own.scale is None else own.scale.double()[..., None])
        inside = (value - centre).abs() <= error * (1 + 2.0**-20) + 2.0**-60
        assert bool(inside[of.routes.valid].all())
    untouched = (found.error[of.routes.valid] < 1e-4 * centre.abs().max()).double().mean()
    assert float(untouched) > 0.9  # nearly every code is the only possible one


def test_atomics_round_once_per_slot_and_reduction_once_in_the_end() -> None:
    """m equal terms of 1 with no error of their own: m - 2 roundings of sums are in the atomic bound."""
    for slots in (1, 2, 3, 9):
        terms = Bounded(torch.ones((1, slots, 1), dtype=torch.float64), torch.zeros((1, slots, 1), dtype=torch.float64))
        routes = Routes(torch.zeros((1, slots), dtype=torch.int32), torch.ones((1, slots)))
        atomic = float(combine_atomic(terms, routes, "bf16").error)
        half = 2.0**-8
        assert atomic == (0.0 if slots == 1 else slots * half + (slots - 2) * half * 2 ** math.floor(
            math.log2(slots + slots * half)))
        reduced = float(combine_reduce(terms, routes, "bf16").error)
        assert slots * half <= reduced <= slots * half + slots * slots * 2.0**-22


def test_overflow_of_the_cast_is_infinity() -> None:
    exact = Bounded(torch.tensor([[70000.0, 65519.0, 65521.0, 1.0]]).double(), torch.zeros((1, 4)).double())
    assert compare(torch.tensor([[math.inf, 65504, math.inf, 1]]).half(), exact).passed
    for wrong in ([65504, 65504, math.inf, 1], [-math.inf, 65504, math.inf, 1], [math.inf, 65504, math.inf, math.inf]):
        assert compare(torch.tensor([wrong]).half(), exact).wrong == 1


def test_a_row_that_overflows_between_the_stages_is_not_judged_and_no_other() -> None:
    of = sample("fp8", "S")
    scale = of.rows.scale
    assert scale is not None
    loud = scale.clone()
    loud[4] *= 1e4
    exact = chain_bounds(replace(of, rows=replace(of.rows, scale=loud)), "reduce", "f16")
    assert bool(exact.error[4].isinf().all())
    assert bool(exact.error[torch.arange(len(loud)) != 4].isfinite().all())


# ---- the contract ---------------------------------------------------------------------------------------------------


def test_weights_in_stage_1_have_three_meanings() -> None:
    of = sample("fp16", "S")
    found = [stage1_bounds(of, doweight) for doweight in DOWEIGHT_STAGE1]
    for one, two in itertools.combinations(found, 2):
        assert not compare(one.value.float(), two, of.routes.valid).passed
    ones = replace(of, routes=replace(of.routes, weights=torch.ones_like(of.routes.weights)))
    same = [stage1_bounds(ones, doweight).value for doweight in DOWEIGHT_STAGE1]
    assert all(torch.equal(same[0], other) for other in same[1:])
    with pytest.raises(ValueError, match="doweight is 'up'"):
        stage1_bounds(of, "up")


def test_reduce_with_f32_is_refused() -> None:
    for name in MODES:
        with pytest.raises(ValueError, match="partials are f16 or bf16 only"):
            dtypes.check(MODES[name], "reduce", "f32")
    with pytest.raises(ValueError, match="partials are f16 or bf16 only"):
        stage2_bounds(sample("fp8"), "reduce", "f32")
    with pytest.raises(ValueError, match="combine is 'sum'"):
        dtypes.check(MODES["fp8"], "sum", "f16")
    with pytest.raises(ValueError, match="a16w4 has atomic with out bf16, not reduce with bf16"):
        dtypes.check(MODES["a16w4"], "reduce", "bf16")


def test_the_table_of_dtypes() -> None:
    """Facts of the published table: what FlyDSL HEAD still takes, whose sums are integers, who reads by slot."""
    def names(field: str) -> set[str]:
        return {name for name, mode in MODES.items() if getattr(mode, field)}

    assert names("head") == {"fp8", "int8", "int8smooth", "int4"}
    assert names("integer") == {"int8", "int8smooth", "int4"}
    assert names("slot_major") == {"int8smooth"}
    with_scales = {name for name in MODES if sample(name).rows.scale is not None}
    assert with_scales == {"fp8", "int8", "int8smooth", "int4"}
    assert {name for name in MODES if sample(name).w1.scale is not None} == with_scales | {"int4_bf16"}
    assert {name for name in MODES if sample(name).w1.factors is not None} == {
        "int4_bf16_g32", "fp4", "a8w4", "a16w4", "a16wi4"}


def test_golden_of_one_and_two_slots_is_the_same_in_both_modes() -> None:
    """0 + a is exact, and a + b is rounded once either way: why k <= 2 hides the order of atomics."""
    of = sample("fp8", "S")
    parts = golden.stage2_parts(of.a2, of.w2, of.routes, "f16")
    assert torch.equal(golden.combine(parts, of.routes, "atomic"), golden.combine(parts, of.routes, "reduce"))
    of = sample("fp8", "L")
    parts = golden.stage2_parts(of.a2, of.w2, of.routes, "bf16")
    assert not torch.equal(golden.combine(parts, of.routes, "atomic"), golden.combine(parts, of.routes, "reduce"))


def test_tokens_are_independent() -> None:
    """What lets an operator ask for a few tokens at a time."""
    of = sample("int4", "M")
    whole = stages.stage2(of.a2, of.w2, of.routes)
    assert of.a2.scale is not None
    part = stages.stage2(Operand(of.a2.payload[5:9], scale=of.a2.scale[5:9]), of.w2,
                         Routes(of.routes.ids[5:9], of.routes.weights[5:9]))
    assert torch.equal(part.value, whole.value[5:9]) and torch.equal(part.error, whole.error[5:9])
