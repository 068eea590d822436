"""Formats: spacings against every neighbour there is, and casts against exact rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from engine_samples import FORMS, e4m3_value, rounded
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.formats import BY_DTYPE, FORMATS, bits, cast, format_of, ulps_apart

E4M3 = torch.float8_e4m3fn
every_form = pytest.mark.parametrize("name", list(FORMATS))


def magnitudes(name: str) -> Tensor:
    """fp64: every finite magnitude of a 8- or 16-bit format in ascending order, from 0."""
    count, dtype = {"bf16": (0x7F80, torch.int16), "fp16": (0x7C00, torch.int16), "e4m3": (0x7F, torch.uint8)}[name]
    return torch.arange(count, dtype=torch.int32).to(dtype).view(FORMATS[name].dtype).double()


# ---- constants and spacings ---------------------------------------------------------------------------------------


@every_form
def test_constants_agree_with_torch(name: str) -> None:
    form, info = FORMATS[name], torch.finfo(FORMATS[name].dtype)
    assert form.maximum == info.max == float(FORMS[name][2])
    assert 2.0**form.minimum_exponent == info.smallest_normal
    assert 2.0 ** (1 - form.precision) == info.eps
    assert (form.precision, form.minimum_exponent) == FORMS[name][:2]
    assert form.name == name
    assert BY_DTYPE[form.dtype] is format_of(form.dtype) is form


def test_published_tolerances() -> None:
    assert {name: form.published for name, form in FORMATS.items()} == {
        "fp32": 1e-3, "fp16": 1e-3, "bf16": 1.6e-2, "e4m3": 0.1}


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_half_ulp_is_half_the_way_to_the_next_number(name: str) -> None:
    values = magnitudes(name)
    form = FORMATS[name]
    gaps = (values[1:] - values[:-1]) / 2
    assert torch.equal(form.half_ulp(values[:-1]), gaps)  # 0, subnormals, every edge between binades
    assert torch.equal(form.half_ulp(values[:-1] + gaps), gaps)  # also between two numbers
    assert float(form.half_ulp(values[-1:])) == float(gaps[-1])


@every_form
def test_steps_between_numbers(name: str) -> None:
    dtype, form = FORMATS[name].dtype, FORMATS[name]
    one, above = torch.tensor([1.0, 1.0 + 2 * form.unit_roundoff]).to(dtype).split(1)
    smallest = (torch.tensor([2.0**form.minimum_exponent]) * 2 * form.unit_roundoff).to(dtype)
    zero, minus = (torch.tensor([value]).to(dtype) for value in (0.0, -0.0))
    assert ulps_apart(one, above).tolist() == ulps_apart(above, one).tolist() == [1]
    assert ulps_apart(smallest, zero).tolist() == [1] and ulps_apart(zero, minus).tolist() == [0]
    assert ulps_apart(smallest, (-smallest.float()).to(dtype)).tolist() == [2]
    assert ulps_apart(one, (one.float() * 2).to(dtype)).tolist() == [2 ** (form.precision - 1)]


def test_half_ulp_of_fp32_is_numpys() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    inner = powers * np.float32(1.6180340)
    below = np.nextafter(powers, np.float32(0))
    values = np.concatenate([[np.float32(0)], powers, inner, below, [np.finfo(np.float32).max]]).astype(np.float32)
    expected = np.concatenate([np.spacing(values[:-1]), [np.spacing(powers[-1])]]).astype(np.float64) / 2
    actual = FORMATS["fp32"].half_ulp(torch.from_numpy(values.astype(np.float64)))
    assert np.array_equal(actual.numpy(), expected)


@every_form
def test_half_ulp_leaves_its_argument_alone(name: str) -> None:
    magnitude = torch.tensor([0.0, 1.0, 1e-30], dtype=torch.float64)
    FORMATS[name].half_ulp(magnitude)
    assert magnitude.tolist() == [0.0, 1.0, 1e-30]


@every_form
def test_unit_roundoff_is_half_the_spacing_at_1(name: str) -> None:
    form = FORMATS[name]
    assert form.unit_roundoff == float(form.half_ulp(torch.ones(1, dtype=torch.float64)))
    assert form.unit_roundoff == {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}[name]


# ---- bits -------------------------------------------------------------------------------------------------------


@every_form
def test_bits_tell_zeros_apart_and_hold_the_same_bytes(name: str) -> None:
    value = torch.tensor([[0.0, -0.0, 1.0, -2.0, math.nan]]).to(FORMATS[name].dtype)
    raw = bits(value)
    assert raw.shape == value.shape
    assert raw.element_size() == value.element_size()
    assert not raw.dtype.is_floating_point
    assert int(raw[0, 0]) != int(raw[0, 1])
    assert raw.numpy().tobytes() == value.view(torch.uint8).numpy().tobytes()
    assert torch.equal(raw, bits(value.clone()))


def test_bits_of_integers_and_fp64() -> None:
    assert bits(torch.tensor([1, -1], dtype=torch.int32)).tolist() == [1, -1]
    assert bits(torch.tensor([1.0], dtype=torch.float64)).tolist() == [0x3FF0000000000000]


def test_no_format_is_known_for_integers() -> None:
    assert format_of(torch.int32) is None
    assert format_of(torch.float8_e5m2) is None


# ---- casts ------------------------------------------------------------------------------------------------------


def code_of(value: float) -> int:
    return int(cast(torch.tensor([value], dtype=torch.float32), E4M3).view(torch.uint8))


def test_all_256_codes_of_e4m3_return() -> None:
    for code in range(256):
        value = e4m3_value(code)
        if math.isnan(value):
            assert code & 0x7F == 0x7F
            assert code_of(value) & 0x7F == 0x7F
        else:
            assert code_of(value) == code
            assert float(torch.tensor([code], dtype=torch.uint8).view(E4M3).float()) == value
    assert code_of(-0.0) == 0x80


@pytest.mark.parametrize("sign", [1, -1])
def test_every_midpoint_of_e4m3_goes_to_even_and_its_neighbours_do_not(sign: int) -> None:
    for code in range(0x7E):
        middle = np.float32((e4m3_value(code) + e4m3_value(code + 1)) / 2)
        low, high = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1000))
        even = code + code % 2
        negative = 0x80 if sign < 0 else 0
        assert code_of(sign * float(middle)) == even | negative
        assert code_of(sign * float(low)) == code | negative
        assert code_of(sign * float(high)) == code + 1 | negative


@pytest.mark.parametrize(("value", "code"), [
    (448.0, 0x7E), (449.0, 0x7E), (464.0, 0x7E), (480.0, 0x7E), (1e30, 0x7E), (math.inf, 0x7E),
    (-448.0, 0xFE), (-464.0, 0xFE), (-465.0, 0xFE), (-math.inf, 0xFE), (432.0, 0x7E), (431.9, 0x7D),
    (2.0**-9, 0x01), (2.0**-10, 0x00), (2.0**-10 * 1.0001, 0x01), (-(2.0**-10), 0x80), (1e-30, 0x00),
])
def test_the_ends_of_e4m3(value: float, code: int) -> None:
    assert code_of(value) == code


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3"])
def test_casts_round_to_nearest_even(name: str) -> None:
    values = magnitudes(name).float()
    middle = (values[:-1].double() + values[1:].double()).div(2).float()
    points = torch.cat([middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0)])
    points = points[:: 7 if name != "e4m3" else 1]
    actual = cast(points, FORMATS[name].dtype).double().tolist()
    assert actual == [rounded(Fraction(point), name) for point in points.tolist()]
    assert cast(-points, FORMATS[name].dtype).double().tolist() == [-value for value in actual]


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("fp16", 65519.996, 65504.0), ("fp16", 65520.0, math.inf), ("fp16", -65520.0, -math.inf),
    ("bf16", 3.3961775292304957e38, math.inf), ("bf16", 3.396177e38, 3.3895313892515355e38),
    ("fp32", 3.4028234663852886e38, 3.4028234663852886e38), ("fp16", math.inf, math.inf),
])
def test_other_formats_overflow_to_infinity(name: str, value: float, expected: float) -> None:
    assert float(cast(torch.tensor([value]), FORMATS[name].dtype)) == expected


@every_form
def test_nan_stays_nan_and_the_argument_stays_as_it_is(name: str) -> None:
    value = torch.tensor([math.nan, 1000.0, -0.0])
    result = cast(value, FORMATS[name].dtype).float()
    assert result.isnan().tolist() == [True, False, False]
    assert math.copysign(1, float(result[2])) == -1
    assert value[1:].tolist() == [1000.0, 0.0]
