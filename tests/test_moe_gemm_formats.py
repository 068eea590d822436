"""fp8 in both encodings, e2m1, e8m0, bf16 by two rules, and quantisation: exhaustive, and at every decision point."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from engine_samples import one_thread as one_thread

from references.moe_gemm_2stage import fp8, mx
from references.moe_gemm_2stage.quantise import TARGETS, quantise
from references.moe_gemm_2stage.rounding import bf16_half_away, round_out

INF, NAN = math.inf, math.nan
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
every_form = pytest.mark.parametrize("form", [fp8.OCP, fp8.FNUZ], ids=lambda form: form.name)


def around(points: torch.Tensor) -> torch.Tensor:
    """fp32: the points, their negatives, and both fp32 neighbours of each."""
    raw = points.float().view(torch.int32)
    near = torch.cat([raw, raw + 1, (raw - 1).clamp(min=0)]).view(torch.float32)
    return torch.cat([near, -near])


# ---- fp8 ------------------------------------------------------------------------------------------------------------


@every_form
def test_all_256_codes_mean_what_their_format_says(form: fp8.Fp8) -> None:
    bias = {"ocp": 7, "fnuz": 8}[form.name]
    for code, value in enumerate(fp8.decode(CODES, form).tolist()):
        exponent, mantissa = code >> 3 & 15, code & 7
        steps = mantissa if exponent == 0 else 8 + mantissa
        magnitude = steps * 2.0 ** (max(exponent, 1) - bias - 3)
        nan = code & 0x7F == 0x7F if form.name == "ocp" else code == 0x80
        assert math.isnan(value) if nan else value == math.copysign(magnitude, -1 if code & 0x80 else 1), hex(code)
    assert form.maximum == {"ocp": 448.0, "fnuz": 240.0}[form.name]


@every_form
def test_decode_agrees_with_torch(form: fp8.Fp8) -> None:
    assert torch.equal(fp8.decode(CODES, form).nan_to_num(nan=7e9), CODES.view(form.dtype).float().nan_to_num(nan=7e9))


@every_form
def test_encode_is_nearest_even_at_every_midpoint_and_its_neighbours(form: fp8.Fp8) -> None:
    finite = fp8.decode(CODES[: form.largest + 1], form)
    points = around(torch.cat([finite, (finite[1:] + finite[:-1]) / 2]))
    exact = [Fraction(v) for v in finite.tolist()]
    for value, code in zip(points.tolist(), fp8.encode(points, form).tolist(), strict=True):
        off = [abs(abs(Fraction(value)) - one) for one in exact]
        best = min(range(len(off)), key=lambda index: (off[index], index % 2))
        sign = 0x80 if math.copysign(1, value) < 0 and (form.signed_zero or best) else 0
        assert code == best | sign, value


@every_form
def test_encode_round_trips_and_agrees_with_torch_inside_the_range(form: fp8.Fp8) -> None:
    value = fp8.decode(CODES, form)
    again = fp8.encode(value, form)
    known = ~value.isnan()
    assert torch.equal(again[known], CODES[known])
    assert set(again[~known].tolist()) == {form.nan}
    random = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 5000)
    random = random.clamp(-form.maximum, form.maximum)
    assert torch.equal(fp8.encode(random, form), random.to(form.dtype).view(torch.uint8))


@pytest.mark.parametrize(("form", "last", "first"), [
    (fp8.OCP, 464.0, 464.0000305175781),  # the tie goes to 448, whose code is even
    (fp8.FNUZ, 247.99998474121094, 248.0),  # the tie goes to 256, which is not there
])
def test_overflow_by_either_policy(form: fp8.Fp8, last: float, first: float) -> None:
    value = torch.tensor([last, first, 1e30, INF, -first, -INF, NAN])
    top = form.largest
    assert fp8.encode(value, form).tolist() == [top] * 4 + [top | 0x80] * 2 + [form.nan]
    assert fp8.encode(value, form, "nan").tolist() == [top] + [form.nan] * 6
    with pytest.raises(ValueError, match="overflow is 'inf'"):
        fp8.encode(value, form, "inf")


def test_the_same_byte_means_twice_as_much_in_ocp() -> None:
    ocp, fnuz = fp8.decode(CODES, fp8.OCP), fp8.decode(CODES, fp8.FNUZ)
    plain = ((CODES & 0x7F) != 0x7F) & (CODES != 0x80)
    assert torch.equal(ocp[plain], 2 * fnuz[plain])
    moved = fp8.decode(fp8.ocp_to_fnuz(CODES), fp8.FNUZ) * 2
    assert torch.equal(moved.nan_to_num(nan=7e9), ocp.nan_to_num(nan=7e9))
    assert int(fp8.ocp_to_fnuz(CODES)[0x80]) == 0


# ---- microscaling ---------------------------------------------------------------------------------------------------


def test_e2m1_codes() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(16, dtype=torch.uint8)
    assert mx.decode_e2m1(codes).tolist() == [*values, *(-v for v in values)]
    assert torch.equal(mx.encode_e2m1(mx.decode_e2m1(codes)), codes)


def test_e2m1_ties_go_to_even_codes_and_large_values_saturate() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert mx.decode_e2m1(mx.encode_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for value, code in zip((near := around(ties)).tolist(), mx.encode_e2m1(near).tolist(), strict=True):
        table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        off = [abs(abs(Fraction(value)) - Fraction(v)) for v in table]
        assert code & 7 == min(range(8), key=lambda i: (off[i], i % 2))
        assert code >> 3 == (value < 0)
    assert mx.encode_e2m1(torch.tensor([6.0, 7.0, 1e30, INF, -INF, -0.0])).tolist() == [7, 7, 7, 7, 15, 8]
    with pytest.raises(ValueError, match="no code for NaN"):
        mx.encode_e2m1(torch.tensor([NAN]))


def test_e8m0_codes_at_their_edges() -> None:
    found = mx.decode_e8m0(torch.tensor([0, 1, 103, 127, 254, 255], dtype=torch.uint8)).tolist()
    assert found[:5] == [2.0**-127, 2.0**-126, 2.0**-24, 1.0, 2.0**127]
    assert math.isnan(found[5])


@pytest.mark.parametrize(("rule", "points"), [
    ("floor", {4.0: 1.0, 6.0: 1.0, 7.999: 1.0, 8.0: 2.0, 3.999: 0.5}),
    ("even", {4.0: 1.0, 6.0: 1.0, 6.999: 1.0, 7.0: 2.0, 3.5: 1.0, 3.499: 0.5}),
    ("up", {4.0: 1.0, 6.0: 1.0, 6.001: 2.0, 3.0: 0.5, 3.001: 1.0}),
])
def test_scale_rules_at_their_decision_points(rule: str, points: dict[float, float]) -> None:
    amax = torch.tensor(list(points))
    assert mx.decode_e8m0(mx.scale_of(amax, mx.FP4, rule)).tolist() == list(points.values())


def test_scales_of_zero_nonfinite_and_extreme_blocks() -> None:
    amax = torch.tensor([0.0, NAN, INF, 2.0**-149, 3.4e38])
    assert mx.scale_of(amax, mx.FP4).tolist() == [0, 255, 255, 0, 252]
    with pytest.raises(ValueError, match="rule is 'ceil'"):
        mx.scale_of(amax, mx.FP4, "ceil")


@pytest.mark.parametrize("element", [mx.FP4, mx.FP8], ids=lambda element: element.name)
@pytest.mark.parametrize("rule", mx.RULES)
def test_blocks_are_scaled_by_themselves_and_the_error_is_half_a_step(element: mx.Element, rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(4, 96, generator=generator) * torch.tensor([1e-4, 1.0, 1e4]).repeat_interleave(32)
    codes, scales = mx.quantise(value, element, rule)
    assert codes.shape == value.shape and scales.shape == (4, 3)
    back, scale = mx.dequantise(codes, scales, element), mx.decode_e8m0(scales).repeat_interleave(32, dim=-1)
    payload = (value / scale).abs()
    inside = payload <= element.maximum
    assert bool(inside.all()) or rule != "up"
    step = torch.exp2(torch.floor(torch.log2(payload.clamp(min=2.0**element.lowest))) - element.mantissa) * scale
    assert bool(((back - value).abs() <= step / 2)[inside].all())
    assert bool((back.abs() == element.maximum * scale)[~inside].all())
    again = mx.quantise(back, element, rule)
    assert torch.equal(mx.dequantise(*again, element), back)


def test_a_block_with_nan_is_nan_and_no_other() -> None:
    value = torch.ones(1, 96)
    value[0, 40] = NAN
    back = mx.dequantise(*mx.quantise(value))
    assert back.isnan().view(3, 32).all(dim=1).tolist() == [False, True, False]
    assert bool((back.view(3, 32)[[0, 2]] == 1).all())
    with pytest.raises(ValueError, match="K is 33"):
        mx.quantise(torch.ones(33))


# ---- bf16 -----------------------------------------------------------------------------------------------------------


def test_bf16_rules_differ_on_ties_above_an_even_number_only() -> None:
    tie_even, tie_odd = 1 + 2.0**-8, 1 + 3 * 2.0**-8
    value = torch.tensor([tie_even, -tie_even, tie_odd, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-9, 3.4e38, 65504.0])
    away, even = bf16_half_away(value), value.bfloat16()
    assert away[:2].tolist() == [1 + 2.0**-7, -(1 + 2.0**-7)] and even[:2].tolist() == [1.0, -1.0]
    assert torch.equal(away[2:], even[2:])
    random = torch.randn(20000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-30, 30, 20000)
    differs = bf16_half_away(random) != random.bfloat16()
    ties = (random.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((ties | ~differs).all())


def test_half_away_of_special_values_as_the_kernel_computes_it() -> None:
    raw = torch.tensor([0x7F800000, 0x7FFFFFFF, 0x7FC00000, -(1 << 31)], dtype=torch.int64).to(torch.int32)
    found = bf16_half_away(raw.view(torch.float32))
    assert found[0] == INF and found[2].isnan()
    assert found.view(torch.int16)[[1, 3]].tolist() == [-(1 << 15), -(1 << 15)]  # NaN of all ones, and -0: both -0


def test_round_out() -> None:
    value = torch.tensor([1 + 2.0**-8, 70000.0])
    assert round_out(value, "f16").tolist() == [1 + 2.0**-8, INF]
    assert round_out(value, "bf16").tolist()[0] == 1.0
    assert round_out(value, "bf16", "half-away").tolist()[0] == 1 + 2.0**-7
    assert torch.equal(round_out(value, "f32"), value)
    for words in (("e4m3",), ("bf16", "stochastic")):
        with pytest.raises(ValueError, match="is required"):
            round_out(value, *words)


# ---- per-token quantisation -----------------------------------------------------------------------------------------


def test_integers_are_cut_or_rounded() -> None:
    value = torch.tensor([[127.0, 1.5, -1.5, 2.5, 0.99, -0.99, -127.0, 0.5]])
    assert quantise(value, "int8").codes.tolist() == [[127, 1, -1, 2, 0, 0, -127, 0]]
    assert quantise(value, "int8", "nearest").codes.tolist() == [[127, 2, -2, 2, 1, -1, -127, 0]]
    assert quantise(value, "int8").scale.tolist() == [[1.0]]
    assert quantise(torch.tensor([[14.0, -3.0]]), "int4").codes.tolist() == [[7, -1]]
    assert quantise(torch.tensor([[14.0, -3.1]]), "int4", "nearest").codes.tolist() == [[7, -2]]


@pytest.mark.parametrize("target", TARGETS)
def test_special_rows(target: str) -> None:
    largest = TARGETS[target].largest
    value = torch.tensor([[0.0, 0.0, 0.0], [NAN, 1.0, 2.0], [INF, 1.0, -INF], [1e-30, -1e-30, 0.0]])
    found = quantise(value, target)
    assert found.scale[:3, 0].tolist() == [1.0, float(torch.tensor(2.0) / largest), 1.0]
    numbers = found.payload()
    assert numbers[0].tolist() == [0, 0, 0]
    ratio = float(torch.tensor(2.0) / found.scale[1, 0])  # 2 / (2 / 7) is below 7 in fp32, and cut to 6
    assert numbers[1, 0] == 0 and numbers[1, 2] == (math.trunc(ratio) if target.startswith("int") else largest)
    assert numbers[2].tolist() == [largest, 1.0, -largest]
    assert numbers[3].abs().tolist() == [largest, largest, 0]


@pytest.mark.parametrize("rule", ["truncate", "nearest"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("group", [None, 32])
def test_error_of_a_row_is_within_its_step(target: str, rule: str, group: int | None) -> None:
    value = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 9)[:, None]
    found = quantise(value, target, rule, group)
    assert found.scale.shape == (9, 64 // (group or 64))
    error = (found.payload().double() * found.factors().double() - value.double()).abs()
    encoding, step = TARGETS[target].encoding, found.factors().double()
    if encoding is not None:  # half of a step of 2^-3 times the power of two below the number
        step = step * torch.exp2(torch.floor(torch.log2(found.payload().double().abs().clamp(min=2.0 ** (
            1 - encoding.bias)))) - 4)
    elif rule == "nearest":
        step = step / 2
    assert bool((error <= step * (1 + 1e-5)).all())
    assert float(error.max() / step.max()) > 0.1


def test_what_is_no_policy() -> None:
    for words in (("int5",), ("int8", "stochastic"), ("int8", "nearest", 5)):
        with pytest.raises(ValueError, match="is required"):
            quantise(torch.ones(2, 8), *words)
