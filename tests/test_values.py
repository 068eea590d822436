"""Value patterns: each holds what its kind of fault needs to show."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from engine_samples import CPU, e4m3_value
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.data.generate import fill_rows
from conformance.data.routing import pattern
from conformance.data.values import EXACT, PATTERNS, SPARSE, e4m3_decision_points, fill
from conformance.errors import ConformanceError
from conformance.formats import bits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
UNTOUCHED = -60000.0  # what no pattern writes


def filled(name: str, dtype: torch.dtype = torch.float32, topk: int = 4, routing: str = "shuffled", hidden: int = 512,
           seed: int = 3) -> tuple[Tensor, Tensor]:
    positions, rows = pattern(routing, 13, topk, 7, CPU)
    x = torch.full((rows, hidden), UNTOUCHED, dtype=dtype)
    fill(x, name, positions, seed)
    return x, positions


@pytest.mark.parametrize("name", list(PATTERNS))
@every_dtype
def test_every_pattern_fills_everything_and_alike_each_time(name: str, dtype: torch.dtype) -> None:
    """All rows that a slot refers to; the others just as well, or not at all."""
    x, positions = filled(name, dtype)
    again, _ = filled(name, dtype)
    assert torch.equal(bits(x), bits(again))
    assert x.dtype == dtype
    used = positions.flatten().long()
    unused = sorted(set(range(len(x))) - set(used.tolist()))
    untouched = x == torch.tensor(UNTOUCHED, dtype=dtype)
    assert not bool(untouched[used].any())
    assert len(unused) == 2
    assert bool(untouched[unused].all()) == (name in SPARSE)


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"nonfinite"}))
@every_dtype
def test_all_but_one_are_finite(name: str, dtype: torch.dtype) -> None:
    assert bool(filled(name, dtype)[0].isfinite().all())


def test_real_and_exact_are_rows_of_the_pools() -> None:
    for name in ("real", "exact"):
        assert torch.equal(filled(name, routing="complete")[0], fill_rows(torch.empty(52, 512), name, 3))


def test_which_data_is_exact() -> None:
    everywhere, for_single_slots = {"exact", "coded", "zeros", "negative_zeros", "small_addends"}, {"codes"}
    assert everywhere | for_single_slots == EXACT


@pytest.mark.parametrize("name", ["exact", "coded", "zeros", "negative_zeros"])
@every_dtype
def test_sums_of_exact_data_are_exact_in_any_order(name: str, dtype: torch.dtype) -> None:
    """16 terms with factors of up to 16 and down to 1/16 stay multiples of 1/16 below 2**24 / 16."""
    x, _ = filled(name, dtype, routing="complete")
    values = x.double()
    assert torch.equal(values, values.round())
    assert float(values.abs().max()) <= 30
    assert 30 * 16 * 16 < 2**24 / 16
    assert torch.equal(values, filled(name, routing="complete")[0].double())  # the same numbers in every dtype


def test_coded_rows_and_columns_are_told_apart() -> None:
    x, _ = filled("coded", hidden=2304)
    assert len(x.unique(dim=0)) == len(x)
    for shift in (1, 16, 32, 64, 128, 256, 512, 1024):
        assert float((x[:, shift:] == x[:, :-shift]).float().mean()) < 0.3, f"columns {shift} apart look alike"
    for shift in (1, 2, 3, 4, 8):
        assert bool((x[shift:] != x[:-shift]).all()), f"rows {shift} apart look alike"


@every_dtype
@pytest.mark.parametrize("topk", [2, 5, 8])
def test_cancel_leaves_only_the_last_odd_slot(dtype: torch.dtype, topk: int) -> None:
    x, positions = filled("cancel", dtype, topk)
    rows = x[positions.long()].double()  # [tokens, topk, hidden]
    pairs = topk // 2 * 2
    assert float(rows[:, :pairs].sum(dim=1).abs().max()) == 0.0
    assert float(rows[:, 0].abs().max()) > 1.0
    if topk % 2:
        assert 0.0 < float(rows[:, -1].abs().max()) < 0.06


def test_cancel_with_padding_leaves_single_slots_alone() -> None:
    x, positions = filled("cancel", topk=4, routing="padding")
    both = (positions[:, 0] >= 0) & (positions[:, 1] >= 0)
    assert bool(both.any())
    assert not bool(both.all())
    assert torch.equal(x[positions[both, 0].long()], -x[positions[both, 1].long()])


@every_dtype
def test_small_addends_vanish_in_16_bits_and_not_in_fp32(dtype: torch.dtype) -> None:
    x, positions = filled("small_addends", dtype, topk=8)
    rows = x[positions.long()]
    assert rows.float().sum(dim=1).unique().tolist() == [1.0 + 7 * 2.0**-9]
    narrow = torch.ones(1, dtype=torch.bfloat16)
    for slot in range(1, 8):
        narrow = narrow + rows[0, slot, :1].to(torch.bfloat16)
    assert narrow.tolist() == [1.0]


def test_zeros_of_both_signs() -> None:
    for name, negative in (("zeros", False), ("negative_zeros", True)):
        x, _ = filled(name)
        assert bool((x == 0).all())
        assert bool((x.signbit() == negative).all())


@every_dtype
def test_nonfinite_has_each_kind_in_single_elements(dtype: torch.dtype) -> None:
    x, positions = filled("nonfinite", dtype)
    used = x[positions.flatten().long()]
    for found in (used.isnan(), used == math.inf, used == -math.inf):
        assert 8 <= int(found.sum()) <= 15
        assert int(found.sum(dim=1).max()) == 1
    assert float(used.isfinite().float().mean()) > 0.99


@every_dtype
def test_overflow_lies_around_448_with_both_signs(dtype: torch.dtype) -> None:
    x, _ = filled("overflow", dtype)
    largest = torch.finfo(dtype).max
    assert bool((x[:, ::97].float() == largest).all())
    assert bool((x[:, 48::97].float() == -largest).all())
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
    for start, part in ((24, 0.25), (72, 0.75)):  # sums that overflow by a part of an ULP, or just do not
        assert set(x[:, start::97].double().flatten().tolist()) == {largest, ulp * part}
    ladder = x.clone()
    for start in (0, 24, 48, 72):
        ladder[:, start::97] = 448
    magnitudes = set(ladder.float().abs().unique().tolist())
    assert {400.0, 448.0, 464.0, 480.0, 512.0, 4096.0} <= magnitudes
    assert {447.0, 465.0} <= magnitudes or dtype == torch.bfloat16  # rounded to 8 bits there
    assert 0.4 < float((ladder < 0).float().mean()) < 0.6


def test_decision_points_are_every_value_and_midpoint_with_both_neighbours() -> None:
    values = [e4m3_value(code) for code in range(127)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)] + [464.0]
    points = set(e4m3_decision_points(CPU).double().tolist())
    for point in values + middles:
        tensor = torch.tensor(point)
        up = float(torch.nextafter(tensor, torch.tensor(math.inf)))
        down = float(torch.nextafter(tensor, torch.tensor(0.0)))
        assert {point, up, down, -point, -up, -down} <= points
    assert max(points) > 1000 - 1
    assert len(e4m3_decision_points(CPU)) == 6 * (127 + 126 + 3)


def test_codes_hold_every_decision_point_at_many_lanes() -> None:
    x, _ = filled("codes", hidden=2048)
    points = e4m3_decision_points(CPU)
    for row in x:
        assert set(row.tolist()) == set(points.tolist())
    assert not torch.equal(x[0], x[1])
    assert len(x[:, 7].unique()) > 40


@every_dtype
def test_tiny_values_are_subnormal_in_e4m3_and_in_their_own_format(dtype: torch.dtype) -> None:
    x, _ = filled("tiny", dtype)
    even, own, plain = x[:, ::2].float().abs(), x[:, 1::4].double().abs(), x[:, 3::4].float().abs()
    assert float((even < 2.0**-6).float().mean()) > 0.99
    assert float((even > 2.0**-10).float().mean()) > 0.2
    below = (own < torch.finfo(dtype).smallest_normal) & (own > 0)
    assert float(below.float().mean()) > 0.3
    assert float((plain > 2.0**-6).float().mean()) > 0.8


def test_an_unknown_pattern_lists_the_known_ones() -> None:
    positions, rows = pattern("identity", 2, 2, 0, CPU)
    with pytest.raises(ConformanceError, match=r"unknown data pattern 'reel'\. Did you mean 'real'"):
        fill(torch.empty(rows, 256), "reel", positions, 0)
