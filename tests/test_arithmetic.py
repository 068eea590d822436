"""fma: one rounding of the exact sum, against fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from engine_samples import rounded
from torch import Tensor

from conformance.data.arithmetic import divided, fma

INF, NAN = math.inf, math.nan
MAX = 3.4028234663852886e38


def fp32(values: list[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64).float()
    assert tensor.double().tolist() == values, "the test's operands must be fp32 numbers"
    return tensor


def expected(x: Tensor, scale: Tensor, acc: Tensor) -> list[float]:
    """Finite operands only."""
    triples = zip(x.tolist(), scale.tolist(), acc.tolist(), strict=True)
    return [rounded(Fraction(a) * Fraction(b) + Fraction(c), "fp32") for a, b, c in triples]


def agree(x: Tensor, scale: Tensor, acc: Tensor) -> None:
    wanted = expected(x, scale, acc)
    actual = fma(x, scale, acc).double().tolist()
    wrong = [entry for entry in zip(x.tolist(), scale.tolist(), acc.tolist(), actual, wanted, strict=True)
             if entry[3] != entry[4]]
    assert not wrong, f"{len(wrong)} of {len(actual)} differ (x, scale, acc, actual, expected): {wrong[:3]}"


def products_near_1(side: int, count: int = 40) -> list[tuple[float, float]]:
    """fp32 pairs whose exact product is 1 + d or 1 - d with 0 < d < 2**-30: beside an accumulator of 2**24, such an
    addend is lost in fp64's sum although it decides a tie of fp32's."""
    found = []
    for low in range(1 << 23, 1 << 24):
        high = (1 << 46) // low + (1 if side > 0 else 0)
        rest = low * high - (1 << 46)
        if 0 < side * rest < 1 << 16 and high < 1 << 24:
            found.append((low * 2.0**-23, high * 2.0**-23))
        if len(found) == count:
            return found
    raise AssertionError("not enough pairs")


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("scale", [0, 60, -90])
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_that_double_rounding_gets_wrong(side: int, scale: int, sign: int) -> None:
    pairs = products_near_1(side)
    # One unit in the last place of acc is 2: the product lies at the tie, decided by its last bits alone.
    odd = 0 if side > 0 else 2  # the last bit of acc for which fp64's tie goes the wrong way
    x = fp32([sign * a for a, _ in pairs])
    s = fp32([b * 2.0**scale for _, b in pairs])
    acc = fp32([sign * (2.0**24 + 4 * n + odd) * 2.0**scale for n in range(len(pairs))])
    agree(x, s, acc)
    naive = (x.double() * s.double() + acc.double()).float()
    assert naive.double().tolist() != expected(x, s, acc), "these operands do not show double rounding"
    product_rounded = (x * s) + acc
    assert product_rounded.double().tolist() != expected(x, s, acc)


def test_real_ties_go_to_even() -> None:
    x, s = fp32([1.0, 1.0, -1.0, -1.0]), fp32([1.0, 1.0, 1.0, 1.0])
    acc = fp32([2.0**24, 2.0**24 + 2, -(2.0**24), -(2.0**24) - 2])
    assert fma(x, s, acc).tolist() == [2.0**24, 2.0**24 + 4, -(2.0**24), -(2.0**24) - 4]


def test_the_product_is_not_rounded() -> None:
    value = fp32([1.0 + 2.0**-12])
    assert fma(value, value, fp32([-(1.0 + 2.0**-11)])).tolist() == [2.0**-24]


@pytest.mark.parametrize("spread", [2, 12, 60])
def test_random_operands(spread: int) -> None:
    draw = np.random.Generator(np.random.Philox(key=spread))
    values = np.ldexp(draw.uniform(-2, 2, (3, 2000)), draw.integers(-spread, spread + 1, (3, 2000)))
    agree(*torch.from_numpy(values.astype(np.float32)))


def test_random_bit_patterns() -> None:
    draw = np.random.Generator(np.random.Philox(key=7))
    x, s, acc = (torch.from_numpy(draw.integers(0, 2**32, 6000, dtype=np.uint32).view(np.float32)) for _ in range(3))
    finite = x.isfinite() & s.isfinite() & acc.isfinite()
    assert int(finite.sum()) > 5000
    agree(x[finite], s[finite], acc[finite])


def test_sums_below_the_normal_range() -> None:
    """Products and accumulators in units of a quarter of the smallest subnormal, so that ties abound."""
    draw = np.random.Generator(np.random.Philox(key=11))
    steps = draw.integers(-40, 41, 3000)
    x = fp32((steps * 2.0**-75).tolist())
    s = fp32([2.0**-76] * 3000)  # the product is a multiple of 2**-151
    acc = fp32((draw.integers(-9, 10, 3000) * 2.0**-149).tolist())
    agree(x, s, acc)
    tie = fp32([2.0**-75]), fp32([2.0**-75])
    for units, result in ((0, 0.0), (1, 2.0), (2, 2.0), (3, 4.0)):
        assert fma(*tie, fp32([units * 2.0**-149])).double().tolist() == [result * 2.0**-149]


def test_a_tie_below_the_normal_range_decided_beyond_fp64() -> None:
    """2**-150 +- 2**-240 beside an accumulator of 2**-127: fp64 keeps 53 bits of it and loses the last term."""
    for side in (1, -1):
        pairs = products_near_1(side, 10)
        x, s = fp32([a * 2.0**-75 for a, _ in pairs]), fp32([b * 2.0**-75 for _, b in pairs])
        acc = fp32([2.0**-127 + (2.0**-149 if side < 0 else 0.0)] * 10)
        agree(x, s, acc)
        naive = (x.double() * s.double() + acc.double()).float()
        assert naive.double().tolist() != expected(x, s, acc)


def test_overflow() -> None:
    x = fp32([MAX, MAX, MAX, -MAX, 2.0**127, 2.0**127])
    s = fp32([1.0, 1.0, 2.0, 2.0, 1.0, 2.0])
    acc = fp32([2.0**102, 2.0**103, 0.0, 0.0, 2.0**127 - 2.0**104, -MAX])
    # MAX + 2**103 is the tie that already goes to infinity
    assert fma(x, s, acc).tolist() == [MAX, INF, INF, -INF, MAX, 2.0**104]
    agree(x, s, acc)


@pytest.mark.parametrize(("x", "scale", "acc", "result"), [
    (INF, 1.0, 0.0, INF), (INF, -1.0, 5.0, -INF), (1.0, 1.0, -INF, -INF), (INF, 0.0, 1.0, NAN), (0.0, INF, 1.0, NAN),
    (INF, 1.0, -INF, NAN), (-INF, 1.0, -INF, -INF), (NAN, 0.0, 0.0, NAN), (0.0, NAN, 1.0, NAN), (1.0, 1.0, NAN, NAN),
    (MAX, MAX, -INF, -INF), (MAX, MAX, -MAX, INF),
])
def test_infinities_and_nan(x: float, scale: float, acc: float, result: float) -> None:
    actual = float(fma(torch.tensor([x]), torch.tensor([scale]), torch.tensor([acc])))
    assert actual == result or (math.isnan(actual) and math.isnan(result))


@pytest.mark.parametrize(("x", "scale", "acc", "sign"), [
    (0.0, 1.0, 0.0, 1), (-0.0, 1.0, 0.0, 1), (-0.0, 1.0, -0.0, -1), (0.0, -1.0, -0.0, -1), (1.0, 1.0, -1.0, 1),
    (-1.0, 1.0, 1.0, 1), (-(2.0**-100), 2.0**-100, 0.0, -1), (2.0**-100, 2.0**-100, -0.0, 1),
])
def test_signs_of_zero(x: float, scale: float, acc: float, sign: int) -> None:
    actual = float(fma(torch.tensor([x]), torch.tensor([scale]), torch.tensor([acc])))
    assert actual == 0.0
    assert math.copysign(1, actual) == sign


def test_a_scale_per_row_is_spread_over_the_row() -> None:
    x, acc = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    result = fma(x, torch.tensor([[2.0], [-1.0]]), acc)
    assert result.tolist() == [[1.0, 3.0, 5.0], [-2.0, -3.0, -4.0]]
    assert result.dtype == torch.float32
    assert torch.equal(acc, torch.ones(2, 3))
    assert fma(torch.empty(0, 3), torch.ones(1, 1), torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device here"))])
@pytest.mark.parametrize("number", [5.0, 127.0, 448.0])
def test_division_rounds_once(device: str, number: float) -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    found = divided(torch.from_numpy(values).to(device), number).cpu().numpy()
    assert (found == values / np.float32(number)).all()
    assert (found != values * (np.float32(1) / np.float32(number))).any()  # what CUDA does with a number
