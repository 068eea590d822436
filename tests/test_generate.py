"""Data never changes: golden values, the definition of every generator in plain Python, and sane distributions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_samples import CPU, digest, mixed

from conformance.data.generate import POOL, WINDOW, fill_rows, integers, mix, normal, uniform

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- counters ---------------------------------------------------------------------------------------------------


def test_mix_is_murmurs_finaliser_keyed_by_both_halves_of_the_seed() -> None:
    counters = [0, 1, 2, 3, 1000, 2**31, 2**32 - 1]
    for seed in (0, 1, 42, 2**32, 0x123456789ABCDEF, 2**63 - 1):
        assert mix(torch.tensor(counters), seed).tolist() == [mixed(counter, seed) for counter in counters]
    assert mix(torch.tensor([0, 1, 2, 2**32 - 1]), 0).tolist() == [0, 804215951, 3050591713, 3807975093]
    assert mix(torch.tensor([0, 1]), 0x123456789ABCDEF).tolist() == [3200340909, 4283125913]


def test_mix_maps_no_two_counters_to_one() -> None:
    mixed_up = mix(torch.arange(1 << 16), 99)
    assert len(mixed_up.unique()) == 1 << 16
    assert int(mixed_up.min()) >= 0
    assert int(mixed_up.max()) < 2**32


def test_golden_values() -> None:
    assert integers((2, 5), -3, 9, 42, CPU).tolist() == [[4, 1, -2, 8, -3], [6, 2, 6, 6, -2]]
    assert digest(integers((1000,), 0, 1 << 30, 7, CPU)) == "b67ade4a39f5822e"
    assert (uniform((4,), 42, CPU) * 2**24).tolist() == [12180161, 16117787, 12952579, 3684335]
    assert digest(uniform((1000,), 7, CPU)) == "5c1dafb752ecbc2e"
    assert digest(normal((1000,), 7, CPU)) == "32baa5d54792aa1b"


@pytest.mark.parametrize(("kind", "dtype", "expected"), [
    ("real", "fp32", "1f366eb76b1bb74b"), ("real", "bf16", "54c31d425bb70464"), ("real", "fp16", "9bab4d876a88f55b"),
    ("exact", "fp32", "bef1ab5fb70817df"), ("exact", "bf16", "ad0a99520ea5328e"), ("exact", "fp16", "d5f2a34d3d9b3233"),
])
def test_golden_rows(kind: str, dtype: str, expected: str) -> None:
    assert digest(fill_rows(torch.empty(5, 256, dtype=DTYPES[dtype]), kind, 12345)) == expected


def test_integers_are_their_definition_within_their_bounds() -> None:
    values = integers((3, 4, 5), -7, 20, 5, CPU)
    assert values.flatten().tolist() == [mixed(counter, 5) % 27 - 7 for counter in range(60)]
    assert values.dtype == torch.int64
    many = integers((20000,), -7, 20, 5, CPU)
    counts = torch.bincount(many + 7, minlength=27)
    assert len(counts) == 27
    assert int(counts.min()) > 600  # 741 expected, deviation 27
    assert int(counts.max()) < 880


def test_uniform_is_exact_and_even() -> None:
    values = uniform((40, 500), 3, CPU)
    assert values.dtype == torch.float32
    assert torch.equal(values * 2**24, (values * 2**24).round())
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    assert values.flatten()[:50].tolist() == [(mixed(n, 3) >> 8) * 2.0**-24 for n in range(50)]
    counts = torch.histc(values, bins=10, min=0, max=1)
    assert int(counts.min()) > 1800  # 2000 expected, deviation 42


def test_normal_is_centred_with_variance_1_and_both_tails() -> None:
    values = normal((40000,), 11, CPU).double()
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.var()) - 1) < 0.03
    assert float(values.max()) > 2.8
    assert float(values.min()) < -2.8
    assert float(values.abs().max()) <= 2 * 1.734375


def test_shapes_without_elements() -> None:
    for values in (uniform((0, 4), 1, CPU), normal((0, 4), 1, CPU), integers((0, 4), 0, 9, 1, CPU)):
        assert values.shape == (0, 4)


def test_seeds_give_different_data() -> None:
    for make in (uniform, normal):
        assert not torch.equal(make((100,), 1, CPU), make((100,), 2, CPU))
        assert not torch.equal(make((100,), 1, CPU), make((100,), 1 + 2**32, CPU))


# ---- rows -------------------------------------------------------------------------------------------------------


def pool(kind: str) -> np.ndarray:
    """The pool by its definition, with numpy's Philox."""
    draw = np.random.Generator(np.random.Philox(key=0x5EED))
    count = (1 << 20) + (1 << 14)
    if kind == "exact":
        return draw.integers(-8, 9, count).astype(np.float32)
    total = draw.integers(0, 1 << 16, (4, count), dtype=np.uint32).astype(np.float32).sum(axis=0) - np.float32(2**17)
    exponents = draw.integers(-4, 4, count)
    return (total * np.float32(2.0**-16 * 1.734375) * np.exp2(exponents)).astype(np.float32)


@pytest.mark.parametrize("kind", ["real", "exact"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rows_are_windows_of_the_pool(kind: str, dtype: str) -> None:
    source = torch.from_numpy(pool(kind)).to(DTYPES[dtype])
    seed, first = 0x7123456, 3
    rows = fill_rows(torch.empty(70, 512, dtype=DTYPES[dtype]), kind, seed, first)
    for number in range(70):
        start = ((first + number) * 0x9E3779B1 + seed) % POOL
        assert torch.equal(rows[number], source[start : start + 512])


def test_the_last_window_of_the_ring_is_whole() -> None:
    """A row that starts at the last offset reads up to the end of the pool, not beyond."""
    source, seed = torch.from_numpy(pool("real")), POOL - 1
    rows = fill_rows(torch.empty(1, WINDOW), "real", seed)
    assert torch.equal(rows[0], source[POOL - 1 : POOL - 1 + WINDOW])


def test_strided_rows_are_the_same_and_the_space_between_is_untouched() -> None:
    storage = torch.full((20, 300), -99.0)
    target = storage[:, 10:266]
    assert fill_rows(target, "real", 77) is target
    assert torch.equal(target, fill_rows(torch.empty(20, 256), "real", 77))
    assert bool((storage[:, :10] == -99).all())
    assert bool((storage[:, 266:] == -99).all())


def test_a_part_of_the_rows_equals_that_part_of_all() -> None:
    whole = fill_rows(torch.empty(40, 256), "real", 5)
    assert torch.equal(fill_rows(torch.empty(10, 256), "real", 5, first=13), whole[13:23])


def test_the_order_of_calls_and_other_generators_change_nothing() -> None:
    calls = [
        lambda: fill_rows(torch.empty(9, 256), "real", 5),
        lambda: fill_rows(torch.empty(9, 256, dtype=torch.float16), "exact", 5),
        lambda: uniform((50,), 5, CPU),
        lambda: normal((50,), 5, CPU),
    ]
    first = [call() for call in calls]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    again = [call() for call in reversed(calls)]
    for one, two in zip(first, reversed(again), strict=True):
        assert torch.equal(one, two)


def test_rows_are_all_different() -> None:
    rows = fill_rows(torch.empty(5000, 16), "real", 1)
    assert len(rows.unique(dim=0)) == 5000
    assert not torch.equal(rows[:-1, 1:], rows[1:, :-1])


def test_real_rows_have_both_signs_and_many_binades() -> None:
    values = fill_rows(torch.empty(200, 1024), "real", 9).double()
    assert 0.49 < float((values > 0).double().mean()) < 0.51
    exponents = values[values != 0].abs().log2().floor()
    share = torch.stack([(exponents == e).double().mean() for e in range(-6, 3)])
    assert float(share.min()) > 0.02
    assert float(values.abs().max()) <= 8 * 2 * 1.734375
    assert bool(fill_rows(torch.empty(200, 1024, dtype=torch.float16), "real", 9).isfinite().all())


def test_exact_rows_are_integers_of_every_value_up_to_8() -> None:
    values = fill_rows(torch.empty(100, 512), "exact", 9)
    found, counts = values.unique(return_counts=True)
    assert found.tolist() == list(range(-8, 9))
    assert int(counts.min()) > 2700  # 3012 expected
    for dtype in DTYPES.values():
        assert torch.equal(fill_rows(torch.empty(100, 512, dtype=dtype), "exact", 9).float(), values)


def test_rows_wider_than_the_window_are_refused() -> None:
    with pytest.raises(ValueError, match=f"width {WINDOW + 1} exceeds the window of {WINDOW}"):
        fill_rows(torch.empty(1, WINDOW + 1), "real", 0)
