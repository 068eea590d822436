"""The kernels of moe_reduce_fused against an oracle that shares no code with them, on the CPU.

What cannot be run here: the CUDA kernels (their generated source is checked), and outputs beyond 2^31 elements.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance import Kernel
from conformance.registry import arch, matrix
from kernels import bits, tilelang_build, tilelang_lower
from kernels.dialect import Dialect, form_of, options
from kernels.reduce_fused import h_tiled, per_token, vectorised
from kernels.reduce_fused.launch import launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
BITS = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16, "e4m3": torch.uint8}
UNSIGNED = {"fp32": np.uint32, "bf16": np.uint16, "fp16": np.uint16, "e4m3": np.uint8}
NAN = {"bf16": 0x7FC0, "fp16": 0x7E00, "e4m3": 0x7F}
PAIRS = [(source, result) for source in ("fp32", "bf16", "fp16") for result in (source, "e4m3")]
EXACT = (h_tiled.h_tiled, per_token.per_token)
MISSING = tilelang_build.missing("cpu")
needs_tilelang = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
pairs = pytest.mark.parametrize(("source", "result"), PAIRS)
exact_kernels = pytest.mark.parametrize("kernel", EXACT, ids=lambda kernel: kernel.name)


# ---- oracle ---------------------------------------------------------------------------------------------------


def fma32(x: np.ndarray, s: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """fp32 fma: the fp64 product is exact; the fp64 sum is rounded to odd, so that rounding again is harmless."""
    with np.errstate(all="ignore"):
        product, addend = x.astype(np.float64) * s.astype(np.float64), acc.astype(np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        pattern = total.view(np.int64)
        fix = (error != 0) & np.isfinite(error) & np.isfinite(total) & (pattern & 1 == 0)
        step = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(fix, pattern + step, pattern).view(np.float64).astype(np.float32)


@cache
def finite_codes(form: str) -> np.ndarray:
    """Every finite magnitude of a small format in ascending order; its index is its code."""
    count = {"bf16": 0x7F80, "fp16": 0x7C00, "e4m3": 0x7F}[form]
    codes = torch.arange(count, dtype=torch.int32).to(BITS[form])
    return codes.view(DTYPES[form]).float().numpy().astype(np.float64)


def encode(form: str, value: np.ndarray) -> np.ndarray:
    """Bit patterns of fp32 values, to nearest even, by search among all codes."""
    if form == "fp32":
        return value.view(np.uint32)
    table = finite_codes(form)
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.abs(value.astype(np.float64))
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 2)
    below, above = magnitude - table[low], table[low + 1] - magnitude
    code = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    if form == "e4m3":
        code[magnitude >= 448] = 0x7E
        sign = 0x80
    else:
        code[magnitude >= table[-1] + (table[-1] - table[-2]) / 2] = len(table)
        sign = 0x8000
    code = np.where(np.signbit(value), code + sign, code)
    return np.where(np.isnan(value), NAN[form], code).astype(UNSIGNED[form])


def oracle(x: Tensor, positions: Tensor, weights: Tensor | None, x_sf: Tensor | None, sf: Tensor | None,
           result: str) -> np.ndarray:
    """Bit patterns [T, H] that the operator prescribes."""
    rows, slots = x.float().numpy(), positions.numpy()
    out = np.zeros((len(slots), rows.shape[1]), np.float32)
    for t, slot in enumerate(slots):
        for j, p in enumerate(slot):
            if p >= 0:
                with np.errstate(all="ignore"):
                    s = np.float32(1) if weights is None else weights[t, j].numpy()
                    s = s if x_sf is None else s * x_sf[p].numpy()
                out[t] = fma32(rows[p], np.asarray(s), out[t])
        if sf is not None and (slot >= 0).any():
            with np.errstate(all="ignore"):
                out[t] = out[t] * sf.numpy()
    return encode(result, out)


def run(kernel: Kernel, x: Tensor, positions: Tensor, weights: Tensor | None = None, x_sf: Tensor | None = None,
        sf: Tensor | None = None, result: str = "fp32", config: str | None = None) -> np.ndarray:
    """The bit patterns that a kernel leaves in an output that was filled with 0x55."""
    out = torch.full((len(positions), x.shape[1]), 0x55, dtype=torch.uint8).repeat(1, DTYPES[result].itemsize)
    out = out.view(DTYPES[result])
    forced = {} if config is None else {"config": config}
    kernel.function(x=x, token_topk_to_pos=positions, topk_weights=weights, x_sf=x_sf, sf=sf, out=out, **forced)
    return out.view(BITS[result]).numpy().view(UNSIGNED[result])


def assert_same(actual: np.ndarray, expected: np.ndarray, form: str) -> None:
    """Same bits; NaNs of fp32, whose payload no one prescribes, by place."""
    if form == "fp32":
        actual, expected = (np.where(np.isnan(v.view(np.float32)), 0x7FC00000, v) for v in (actual, expected))
    wrong = np.argwhere(actual != expected)
    assert not len(wrong), (
        f"{len(wrong)} of {actual.size} differ, first at {wrong[0]}: "
        f"{actual[tuple(wrong[0])]:#x} instead of {expected[tuple(wrong[0])]:#x}"
    )


def case(seed: int, tokens: int, topk: int, hidden: int, source: str) -> tuple[Tensor, ...]:
    """x (a wide range of magnitudes), positions (about a quarter padding), weights, x_sf (both signs), sf."""
    generator = np.random.default_rng(seed)
    rows = tokens * topk + 3
    x = generator.standard_normal((rows, hidden)) * np.exp2(generator.integers(-12, 8, (rows, 1)))
    positions = generator.permutation(rows)[: tokens * topk].reshape(tokens, topk)
    positions = np.where(generator.random(positions.shape) < 0.25, -1, positions).astype(np.int32)
    weights, x_sf = generator.standard_normal((tokens, topk)), generator.standard_normal(rows)
    return (torch.from_numpy(x).to(DTYPES[source]), torch.from_numpy(positions), torch.from_numpy(weights).float(),
            torch.from_numpy(x_sf).float(), torch.tensor([-0.37]))


def test_the_oracle_rounds_correctly() -> None:
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 2**32, (3, 4000), dtype=np.uint64).astype(np.uint32)
    x, s, acc = (np.where(np.isfinite(v), v, 1).astype(np.float32) for v in patterns.view(np.float32))
    # Sums near a tie: the product lies far below the last place of an accumulator of similar exponent range.
    with np.errstate(over="ignore"):
        acc[::2] = (x[::2] * s[::2] * np.exp2(generator.integers(0, 26, 2000))).astype(np.float32)
    acc = np.where(np.isfinite(acc), acc, 0).astype(np.float32)
    for a, b, c, r in zip(x, s, acc, fma32(x, s, acc), strict=True):
        if not np.isfinite(r):
            continue
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        off = abs(exact - Fraction(float(r)))
        for near in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
            if np.isfinite(near):
                other = abs(exact - Fraction(float(near)))
                assert off < other or (off == other and int(r.view(np.uint32)) % 2 == 0)


# ---- arithmetic -----------------------------------------------------------------------------------------------


@needs_tilelang
@pairs
@exact_kernels
def test_bitwise_for_every_variant_and_number_of_slots(kernel: Kernel, source: str, result: str) -> None:
    for index, topk in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16)):
        x, positions, weights, x_sf, sf = case(index, 5, topk, 512 * (1 + index % 2), source)
        for weighted, scaled, rescaled in np.ndindex(2, 2, 1 + (result == "e4m3")):
            given = (weights if weighted else None, x_sf if scaled else None, sf if rescaled else None)
            assert_same(run(kernel, x, positions, *given, result=result),
                        oracle(x, positions, *given, result), result)


@needs_tilelang
@pytest.mark.parametrize("config", h_tiled.h_tiled.configs)
def test_every_config_is_bitwise(config: str) -> None:
    for source, result, topk, hidden in (("bf16", "e4m3", 6, 1024), ("bf16", "e4m3", 3, 768)):
        x, positions, weights, x_sf, sf = case(1, 4, topk, hidden, source)
        assert_same(run(h_tiled.h_tiled, x, positions, weights, x_sf, sf, result, config),
                    oracle(x, positions, weights, x_sf, sf, result), result)


@needs_tilelang
@exact_kernels
def test_a_fixed_presence_of_arguments_gives_the_same_bits(kernel: Kernel) -> None:
    """As on GPUs, where it is compiled in."""
    module = h_tiled if kernel is EXACT[0] else per_token
    spec = (h_tiled.specialise(arch("cpu"), 5, 512, "fp32", "fp32") if kernel is EXACT[0]
            else per_token.specialise("c", "fp32", "fp32"))
    x, positions, weights, _, _ = case(2, 4, 5, 512, "fp32")
    out = torch.empty(4, 512)
    more = [3] if kernel is EXACT[0] else []  # tokens of a block
    launch(dataclasses.replace(spec, presence="100"), module.build, x, positions, weights, None, None, out, *more)
    assert_same(out.numpy().view(np.uint32), oracle(x, positions, weights, None, None, "fp32"), "fp32")


@needs_tilelang
@exact_kernels
@pytest.mark.parametrize(("source", "result"), [("fp32", "fp32"), ("bf16", "e4m3")])
def test_padding_slots_are_never_read(kernel: Kernel, source: str, result: str) -> None:
    x, positions, weights, x_sf, _ = case(3, 6, 5, 512, source)
    positions[2] = -1
    weights[positions < 0] = float("nan")
    unused = torch.ones(len(x), dtype=torch.bool)
    unused[positions[positions >= 0].long()] = False
    unused[0] = True
    positions[positions == 0] = -1
    weights[positions < 0] = float("nan")
    x[unused], x_sf[unused] = float("nan"), float("inf")
    for sf in (None, torch.tensor([-3.0]), torch.tensor([float("nan")])):
        if sf is not None and result != "e4m3":
            continue
        actual = run(kernel, x, positions, weights, x_sf, sf, result)
        assert not actual[2].any()  # +0, also when sf is negative or NaN
        assert_same(actual, oracle(x, positions, weights, x_sf, sf, result), result)


@needs_tilelang
@pairs
@exact_kernels
def test_special_values_follow_ieee(kernel: Kernel, source: str, result: str) -> None:
    x, positions, weights, x_sf, sf = case(4, 6, 4, 512, source)
    flat = x.view(-1)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 6e-8, -1e-40, 65504.0, 3e38, -3e38])
    flat[::7] = special.repeat(len(flat))[: len(flat[::7])].to(x.dtype)
    weights[0, 0], weights[1, 1], weights[2, 2], x_sf[positions[3]] = float("inf"), float("nan"), 0.0, -float("inf")
    factor = sf if result == "e4m3" else None
    variants: tuple[tuple[Tensor | None, Tensor | None], ...] = (
        (weights, x_sf), (None, None), (weights * 1e-38, x_sf), (weights * 1e30, None))
    for w, r in variants:
        assert_same(run(kernel, x, positions, w, r, factor, result), oracle(x, positions, w, r, factor, result), result)


@needs_tilelang
def test_rows_beyond_two_to_the_31_elements() -> None:
    """bf16 rows of which only the last is ever touched, so that the memory behind the others is never used."""
    hidden = 1 << 16
    rows = (1 << 31) // hidden + 2
    try:
        x = torch.empty(rows, hidden, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for {rows * hidden * 2 >> 20} MiB: {error}")
    x[-1] = torch.arange(hidden).to(torch.bfloat16)
    positions = torch.tensor([[-1, rows - 1]], dtype=torch.int32)
    for kernel in EXACT:
        actual = run(kernel, x, positions, result="bf16")
        assert (actual[0].view(np.int16) == x[-1].view(torch.int16).numpy()).all()


def test_no_tokens_means_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_build, "load", lambda *_, **__: pytest.fail("a kernel was loaded"))
    x, positions = torch.zeros(3, 256), torch.zeros(0, 2, dtype=torch.int32)
    for kernel in (*EXACT, vectorised.vectorised):
        assert run(kernel, x, positions).shape == (0, 256)


@needs_tilelang
def test_no_rows_at_all() -> None:
    x, positions = torch.zeros(0, 256), torch.full((3, 2), -1, dtype=torch.int32)
    for kernel in (*EXACT, vectorised.vectorised):
        assert not run(kernel, x, positions).any()


# ---- conversions ----------------------------------------------------------------------------------------------


def near_midpoints(form: str) -> np.ndarray:
    """fp32 values of both signs: every code, every midpoint of two codes, one fp32 step beside each, and specials."""
    if form == "fp32":
        values = np.random.default_rng(5).integers(0, 2**31, 1000).astype(np.uint32).view(np.float32)
    else:
        codes = finite_codes(form)
        values = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2]).astype(np.float32)
        values = np.append(values, np.float32(codes[-1] + (codes[-1] - codes[-2]) / 2))  # where overflow begins
    more = [0, 1e-45, 1e-40, 1.1754944e-38, 2.0**-10, 2.0**-25, 448, 464, 480, 1e5, 3.4028235e38, np.inf, np.nan]
    values = np.append(values, np.array(more, np.float32))
    with np.errstate(all="ignore"):
        values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])
    return np.concatenate([values, -values])


@needs_tilelang
@pairs
@exact_kernels
def test_every_rounding_midpoint_at_every_lane(kernel: Kernel, source: str, result: str) -> None:
    """x is 1 and each token's weight is one value, so that the accumulator holds the value in every lane."""
    x = torch.ones(1, 512, dtype=DTYPES[source])
    for values in np.array_split(near_midpoints(result), 8):  # keeps the outputs small
        positions = torch.zeros(len(values), 1, dtype=torch.int32)
        actual = run(kernel, x, positions, torch.from_numpy(values)[:, None], result=result)
        expected = encode(result, fma32(np.ones_like(values), values, np.zeros_like(values)))
        assert_same(actual[:, 0], expected, result)
        assert (actual == actual[:, :1]).all()


@needs_tilelang
@exact_kernels
@pytest.mark.parametrize("source", ["bf16", "fp16"])
@pytest.mark.parametrize("same", [True, False])
def test_every_input_pattern(kernel: Kernel, source: str, same: bool) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = patterns.view(DTYPES[source]).view(128, 512)
    positions = torch.arange(128, dtype=torch.int32)[:, None]
    result = source if same else "e4m3"
    assert_same(run(kernel, x, positions, result=result), oracle(x, positions, None, None, None, result), result)


@needs_tilelang
@exact_kernels
def test_every_e4m3_code(kernel: Kernel) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    expected = codes.numpy().copy()
    expected[[0x80, 0xFF]] = 0, 0x7F  # the accumulator starts at +0; NaN has one code here
    x = values.repeat(2)[None]
    actual = run(kernel, x, torch.zeros(1, 1, dtype=torch.int32), result="e4m3")
    assert (actual[0, :256] == expected).all() and (actual[0, 256:] == expected).all()


@needs_tilelang
def test_conversions_by_themselves_on_random_patterns() -> None:
    generator = np.random.default_rng(6)
    values = generator.integers(0, 2**32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.exp2(generator.uniform(-30, 18, 1 << 18)).astype(np.float32)  # where fp16 and e4m3 live
    values = np.concatenate([values, near, -near])
    outputs = [torch.zeros(len(values), dtype=dtype) for dtype in (torch.uint16, torch.uint16, torch.uint8)]
    convert = tilelang_build.load("test conversions", "c", _conversion_program)
    assert convert is not None
    convert(torch.from_numpy(values), *outputs)
    for form, output in zip(("bf16", "fp16", "e4m3"), outputs, strict=True):
        assert_same(output.numpy(), encode(form, values), form)


def test_unknown_formats_are_refused() -> None:
    pytest.importorskip("tilelang")
    with pytest.raises(ValueError, match="no widening from 'e5m2'; known: fp32, bf16, fp16, e4m3"):
        bits.widen("e5m2", 0)


# ---- vectorised -----------------------------------------------------------------------------------------------


@pairs
def test_vectorised_is_within_budget(source: str, result: str) -> None:
    for topk in (1, 2, 5, 9, 16):
        x, positions, weights, x_sf, sf = case(topk, 7, topk, 512, source)
        positions[3] = -1
        given = (weights, x_sf, sf if result == "e4m3" else None)
        actual = run(vectorised.vectorised, x, positions, *given, result=result)
        assert not actual[3].any()
        valid = (positions >= 0)[..., None]
        rows = x[positions.clamp(min=0).long()].double()
        terms = torch.where(valid, rows * (weights * x_sf[positions.clamp(min=0).long()]).double()[..., None], 0)
        factor = 1.0 if given[2] is None else sf.double()
        exact, magnitude = terms.sum(1) * factor, (terms.abs().sum(1) * factor).abs()
        got = torch.from_numpy(actual.view(np.dtype(f"i{actual.itemsize}")).copy()).view(DTYPES[result]).double()
        exact = exact.clamp(-448, 448) if result == "e4m3" else exact
        precision, smallest = {"fp32": (24, -149), "bf16": (8, -133), "fp16": (11, -24), "e4m3": (4, -9)}[result]
        allowed = (topk + 3) * 2.0**-24 * magnitude + (exact.abs() * 2.0**-precision).clamp(min=2.0 ** (smallest - 1))
        finite = exact.abs() < 65520 if result == "fp16" else torch.ones_like(exact, dtype=torch.bool)
        assert (got - exact).abs()[finite].le(allowed[finite] * 1.0001).all()


def test_vectorised_ignores_what_padding_would_read() -> None:
    x, positions, weights, x_sf, sf = case(8, 6, 4, 256, "bf16")
    positions[positions == 0] = -1
    positions[1] = -1
    weights[positions < 0] = float("nan")
    before = run(vectorised.vectorised, x, positions, weights, x_sf, sf, "e4m3")
    x[0], x_sf[0] = float("nan"), float("inf")
    after = run(vectorised.vectorised, x, positions, weights, x_sf, sf, "e4m3")
    assert (before == after).all() and not after[1].any()


def test_vectorised_keeps_nan_and_infinities_and_saturates() -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 500.0] * 64])
    positions = torch.tensor([[0, -1]], dtype=torch.int32)
    actual = run(vectorised.vectorised, x, positions, result="e4m3")[0, :4]
    assert actual[0] & 0x7F == 0x7F and list(actual[1:]) == [0x7E, 0xFE, 0x7E]


def test_vectorised_in_chunks_and_with_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x, positions, weights, x_sf, sf = case(9, 7, 3, 256, "fp16")
    whole = run(vectorised.vectorised, x, positions, weights, x_sf, sf, "e4m3")
    monkeypatch.setitem(vectorised.TEMPORARY_BYTES, "cpu", 3 * 256 * 6 * 2)
    assert vectorised.tokens_per_chunk(3, 256, 2, vectorised.TEMPORARY_BYTES["cpu"]) == 2
    assert vectorised.tokens_per_chunk(64, 8192, 4, 1) == 1
    assert (run(vectorised.vectorised, x, positions, weights, x_sf, sf, "e4m3") == whole).all()
    wide = torch.zeros(len(x), 300, dtype=torch.float16)
    wide[:, 5:261] = x
    strided = run(vectorised.vectorised, wide[:, 5:261], positions.t().contiguous().t(), weights.t().contiguous().t(),
                  x_sf.repeat_interleave(2)[::2], sf, "e4m3")
    assert (strided == whole).all()


@needs_tilelang
def test_all_kernels_agree_bitwise_on_exact_data() -> None:
    generator = np.random.default_rng(10)
    x = torch.from_numpy(generator.integers(-8, 9, (40, 512))).to(torch.bfloat16)
    positions = torch.from_numpy(generator.integers(-1, 40, (9, 6)).astype(np.int32))
    weights = torch.from_numpy(np.exp2(generator.integers(-2, 3, (9, 6)))).float()
    results = [run(kernel, x, positions, weights, result="bf16") for kernel in (*EXACT, vectorised.vectorised)]
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


# ---- specialisations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tiled"), [("cpu", 8), ("sm_90", 48)])
def test_the_official_matrix_needs_few_kernels(name: str, tiled: int) -> None:
    official = matrix("moe_reduce_fused").cases("official")
    assert len({h_tiled.for_case(case.params, arch(name)) for case in official}) == tiled
    target = arch(name).language
    assert len({per_token.specialise(target, case.params["in"], case.params["out"]) for case in official}) == 4


@pytest.mark.parametrize("name", ["cpu", "sm_90", "sm_100", "gfx942"])
def test_the_tile_divides_the_hidden_axis(name: str) -> None:
    for source in ("bf16", "fp32"):
        for hidden in range(256, 8193, 256):
            for config in (None, "block_h:1024", "block_h:512-ahead:1", "vectors:2", "vectors:1"):
                spec = h_tiled.specialise(arch(name), 8, hidden, source, "e4m3", config=config)
                assert hidden % spec.block == 0 and spec.block >= (256 if spec.target == "c" else 32 * spec.span)
                assert spec.threads % 32 == 0 or spec.target == "c"


def test_tiles_are_those_that_were_measured_and_safe_ones_elsewhere() -> None:
    def cut(name: str, topk: int, hidden: int, source: str, config: str | None = None) -> tuple[int, int, int]:
        spec = h_tiled.specialise(arch(name), topk, hidden, source, source, config=config)
        return spec.threads, spec.vectors, spec.ahead

    assert cut("sm_90", 8, 7168, "bf16") == (32, 4, 4) and cut("sm_90", 6, 2560, "bf16") == (32, 5, 1)
    assert cut("sm_90", 9, 2560, "fp32") == (32, 4, 1) and cut("sm_90", 2, 256, "bf16") == (32, 1, 1)
    assert cut("sm_90", 7, 768, "fp16") == (32, 3, 1) and cut("sm_90", 4, 7168, "fp16") == (32, 4, 4)
    assert cut("sm_80", 6, 7168, "bf16") == (128, 1, 2) and cut("sm_80", 9, 2560, "bf16") == (64, 1, 4)
    assert cut("sm_80", 6, 7168, "bf16", "vectors:2-ahead:1") == (64, 2, 1)
    assert cut("sm_90", 6, 7168, "bf16", "block_h:512") == (32, 2, 1)
    held = {name: h_tiled.specialise(arch(name), 8, 7168, "bf16", "bf16") for name in ("sm_90", "sm_80", "gfx942")}
    assert [spec.threads * spec.resident for spec in held.values()] == [512, 0, 0]
    sparse = h_tiled.specialise(arch("sm_90"), 6, 7168, "bf16", "bf16")
    assert sparse.threads * sparse.resident == 896 and h_tiled.specialise(
        arch("sm_90"), 6, 256, "bf16", "bf16").resident == 32  # blocks that a multiprocessor holds at most
    given = {h_tiled.specialise(arch("sm_90"), 8, 7168, "bf16", "e4m3", flags).presence for flags in ("101", "000")}
    assert given == {"101", "000"} and h_tiled.specialise(arch("cpu"), 8, 7168, "bf16", "e4m3").presence == "runtime"


def test_blocks_take_several_tokens_where_there_are_many_and_fit_into_a_grid() -> None:
    def each(name: str, tokens: int, config: str | None = None, block: int = 1024) -> int:
        return h_tiled.tokens_of(arch(name), tokens, 7168, block, config, multiprocessors=132)

    assert [each("sm_90", tokens) for tokens in (1, 512, 4096, 9000, 31_000)] == [1, 1, 1, 2, 2]
    assert each("sm_80", 31_000) == 1 and each("sm_80", 200_000) == 4  # 65535 blocks along that axis
    assert each("sm_90", 31_000, "tokens:3") == 3 and each("sm_90", 1_000_000, "tokens:1") == 16


@needs_tilelang
@pytest.mark.parametrize("each", ["1", "3", "16"])
def test_tokens_of_a_block_follow_one_another(each: str) -> None:
    """Positions are loaded for the next group of slots or the next token, also past tokens of padding slots only."""
    x, positions, weights, x_sf, _ = case(7, 11, 6, 512, "fp32")
    positions[[1, 2, 5, 10]] = -1
    positions[3, :3], positions[4, 3:] = -1, -1
    out = torch.empty(11, 512)
    given = {"x": x, "token_topk_to_pos": positions, "topk_weights": weights, "x_sf": x_sf, "sf": None}
    h_tiled.h_tiled.run(given, out, f"tokens:{each}")
    assert_same(out.numpy().view(np.uint32), oracle(x, positions, weights, x_sf, None, "fp32"), "fp32")


def test_configs_are_parsed_strictly() -> None:
    assert options("block_h:512-ahead:1", h_tiled.OPTIONS) == {"block_h": "512", "ahead": "1"}
    assert options(None, h_tiled.OPTIONS) == {}
    with pytest.raises(ValueError, match="sets 'tile'; known: block_h, vectors, ahead"):
        options("tile:3", h_tiled.OPTIONS)
    with pytest.raises(ValueError, match="sets ahead to '5'; known: 1, 3, 4"):
        options("ahead:5", h_tiled.OPTIONS)


def test_formats_have_the_names_of_case_parameters() -> None:
    assert [form_of(torch.empty(1, dtype=dtype)) for dtype in DTYPES.values()] == list(DTYPES)


@needs_tilelang
@exact_kernels
def test_prepare_compiles_what_the_call_will_use(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(label: str, *_: object, **__: object) -> object:
        asked.append(label)
        return lambda *_: None

    monkeypatch.setattr(tilelang_build, "load", load)
    params = {"send": "4001", "topk": "6", "experts": "72", "ranks": "8", "hidden": "2560", "weights": "yes",
              "in": "bf16", "out": "e4m3", "xsf": "no"}
    assert kernel.prepare is not None
    kernel.prepare(params, "cpu")
    x, positions, weights, _, sf = case(0, 4, 6, 2560, "bf16")
    run(kernel, x, positions, weights, None, sf, "e4m3")
    assert len(asked) == 2 and asked[0] == asked[1]


@pairs
@exact_kernels
def test_cuda_source(kernel: Kernel, source: str, result: str) -> None:
    """Generated without a GPU: 16-byte loads, guaranteed fma, saturating e4m3, 64-bit row offsets, no FTZ."""
    pytest.importorskip("tilelang")
    if kernel is EXACT[0]:
        program = partial(h_tiled.build, h_tiled.specialise(arch("sm_90"), 8, 7168, source, result, "110"))
    else:
        program = partial(per_token.build, per_token.specialise("cuda", source, result))
    text = tilelang_lower.lower(program, arch("sm_90")).source
    vector = "float4" if source == "fp32" else "uint4"
    assert f"= *({vector}*)(x + " in text
    assert "((int64_t)row[" in text and "* ((int64_t)chunks)" in text
    assert "__fmaf_rn(" in text
    assert ("__NV_SATFINITE, __NV_E4M3" in text) == (result == "e4m3")
    assert kernel.name + "_kernel" in text


def _conversion_program() -> Any:
    """fp32 values to the patterns of every small format, without a kernel of the operator around it."""
    import tilelang.language as T

    extent, narrow = T.dynamic("extent"), Dialect("c").narrow
    types = {form: T.Tensor((extent,), dtype) for form, dtype in bits.STORAGE.items()}

    def conversions(value, bf16, fp16, e4m3):  # type: ignore[no-untyped-def]
        with T.Kernel(extent) as i:
            bf16[i] = narrow("bf16", value[i])
            fp16[i] = narrow("fp16", value[i])
            e4m3[i] = narrow("e4m3", value[i])

    conversions.__annotations__ = {"value": types.pop("fp32")} | types
    return T.prim_func(conversions)
