"""Re-quantisation between the stages: however a right kernel spells its two divisions, it passes; another scale,
rounding or target does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import per_expert, prepared, result, verdict
from torch import Tensor

from conformance.registry import matrix
from kernels.gemm_2stage import per_expert as kernel_module
from references.moe_gemm_2stage.bounds import Arithmetic, Bounded
from references.moe_gemm_2stage.chain import intermediate
from references.moe_gemm_2stage.decoded import decode
from references.moe_gemm_2stage.dtypes import MODES
from references.moe_gemm_2stage.stages import Routes, combine_atomic, stage2

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[..., Tensor]


def beside(value: Tensor, up: bool, ulps: int = 1) -> Tensor:
    for _ in range(ulps):
        value = torch.nextafter(value, torch.full_like(value, torch.inf if up else 0.0))
    return value


def plain_scale(top: Tensor, largest: float) -> Tensor:
    return top / largest


def plain_ratio(value: Tensor, scale: Tensor, top: Tensor, largest: float) -> Tensor:
    return value / scale


def by_rule(ratio: Tensor, rule: str) -> Tensor:
    return ratio.trunc() if rule == "truncate" else ratio.round()


@dataclass(frozen=True)
class Spelling:
    """How a kernel gets a row's scale from its largest magnitude, ratios from values, and integers from ratios."""

    scale: Step = plain_scale
    ratio: Step = plain_ratio
    integers: Step = by_rule

    def __call__(self, out1: Tensor, x: Tensor, smooth2: Tensor | None, local: Tensor, rule: str
                 ) -> tuple[Tensor, Tensor]:
        value = out1.float()
        if smooth2 is not None:
            value = value * smooth2[local.clamp(min=0).flatten()]
        largest = 127.0 if x.dtype == torch.int8 else torch.finfo(x.dtype).max
        top = value.abs().amax(dim=1)
        top = torch.where(top == 0, largest, top)
        scale = self.scale(top, largest)
        ratio = self.ratio(value, scale[:, None], top[:, None], largest)
        if x.dtype == torch.int8:
            ratio = self.integers(ratio, rule)
        return (ratio.clamp(-largest, largest) + 0.0).to(x.dtype), scale  # + 0: -0 is NaN in FNUZ


RIGHT = {
    "quotients": Spelling(),
    "times a reciprocal": Spelling(ratio=lambda value, scale, *_: value * (1 / scale)),
    "largest magnitude times a reciprocal": Spelling(lambda top, largest: top * (torch.tensor(1.0) / largest)),
    "times largest over magnitude": Spelling(ratio=lambda value, _, top, largest: value * (largest / top)),
    "reciprocal an ULP up": Spelling(ratio=lambda value, scale, *_: value * beside(1 / scale, True)),
    "reciprocal an ULP down": Spelling(ratio=lambda value, scale, *_: value * beside(1 / scale, False)),
    "scale 2 ULPs up": Spelling(lambda top, largest: beside(top / largest, True, 2)),
    "scale 2 ULPs down": Spelling(lambda top, largest: beside(top / largest, False, 2)),
}
RIGHT_INTEGERS = {
    "ties away from zero": Spelling(integers=lambda ratio, rule: (
        ratio.trunc() if rule == "truncate" else (ratio.abs() + 0.5).floor() * ratio.sign())),
    "ties up": Spelling(integers=lambda ratio, rule: ratio.trunc() if rule == "truncate" else (ratio + 0.5).floor()),
}
WRONG = {
    "scale 1 % up": Spelling(lambda top, largest: top / largest * 1.01),
    "scale 0.1 % up": Spelling(lambda top, largest: top / largest * 1.001),
    "ratio 1 % up": Spelling(ratio=lambda value, scale, *_: value / scale * 1.01),
    "largest number missed by one": Spelling(lambda top, largest: top / (largest - 1)),
    "scale in bf16": Spelling(lambda top, largest: (top / largest).bfloat16().float()),
    "ratio in bf16": Spelling(ratio=lambda value, scale, *_: (value / scale).bfloat16().float()),
}
WRONG_INTEGERS = {
    "floor": Spelling(integers=lambda ratio, rule: ratio.floor()),
    "half up of what is cut": Spelling(integers=lambda ratio, rule: (
        (ratio + 0.5).floor() if rule == "truncate" else ratio.trunc())),
    "towards the even one of two": Spelling(integers=lambda ratio, rule: 2 * (ratio / 2).round()),
}
_REST = "tokens:23-hidden:128-inter:64-experts:8-topk:2-bm:16-in:{}-mode:{}-out:{}-mask:no{}"
CASES = {
    name: "moe_gemm_2stage/F/" + _REST.format(*params)
    for name, params in {
        "fp8": ("fp8", "atomic", "f32", ""), "fp8 f16": ("fp8", "reduce", "f16", ""),
        "fnuz": ("fp8", "atomic", "f32", "-encoding:fnuz"), "int8": ("int8", "atomic", "f32", ""),
        "int8 nearest": ("int8", "atomic", "f32", "-rule:nearest"), "int8smooth": ("int8smooth", "reduce", "f16", ""),
        "int4 nearest": ("int4", "reduce", "f16", "-rule:nearest"),
        "zeros": ("int8", "reduce", "f16", "-data:zero_rows"),
    }.items()
}


def kinds(case: str, spellings: dict[str, Spelling], monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The kind of failure of each spelling."""
    call, reference = prepared(case)
    found = {}
    for name, spelling in spellings.items():
        monkeypatch.setattr(kernel_module, "requantise", spelling)
        found[name] = verdict(result(per_expert("moe_gemm_2stage"), call), call, reference).kind
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_spelling_of_the_divisions_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RIGHT if "f" in name.split()[0] else RIGHT | RIGHT_INTEGERS
    assert kinds(CASES[name], right, monkeypatch) == dict.fromkeys(right)


@pytest.mark.parametrize("how", RIGHT_INTEGERS)
def test_a_tie_of_nearest_goes_either_way(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the contract says of ties: rows of stage 1 are made of which every number but the largest is one."""
    call, _ = prepared(CASES["int8 nearest"])
    out1 = torch.full((call.arguments["topk_ids"].numel(), 64), 2.5, dtype=torch.float16)
    out1[:, 0], out1[:, 1::2] = 127.0, -4.5

    def stage1(*given: Any) -> None:
        given[-1].copy_(out1)

    monkeypatch.setattr(kernel_module, "_stage1", stage1)
    even = result(per_expert("moe_gemm_2stage"), call)
    monkeypatch.setattr(kernel_module, "requantise", RIGHT_INTEGERS[how])
    other = result(per_expert("moe_gemm_2stage"), call)
    exact = out1.view(*call.arguments["topk_ids"].shape, 64).double()
    decoded = decode(call)
    assert decoded.w2 is not None
    between = intermediate(Bounded(exact, torch.zeros_like(exact)), MODES["int8"], decoded.routes, rule="nearest")
    terms = stage2(between, decoded.w2, decoded.routes, True, Arithmetic(integer=True))
    found = combine_atomic(terms, decoded.routes, "f32")
    assert not torch.equal(even, other)
    for one in (even, other):
        assert bool(((one - found.value).abs() <= found.error + 1e-7 * found.value.abs()).all())


@pytest.mark.parametrize("name", CASES)
def test_another_scale_or_rounding_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = WRONG if "f" in name.split()[0] else WRONG | WRONG_INTEGERS
    found = kinds(CASES[name], wrong, monkeypatch)
    assert set(found.values()) <= {"budget", "bits"}, found


def test_spellings_pass_where_terms_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One code more or less is a unit of 32 in terms at the end of f16's range, whose sum may be near 0."""
    cases = [case for case in matrix("moe_gemm_2stage").cases("edge")
             if case.family == "F23-overflow" and case.params["in"] in ("fp8", "int8", "int4", "int8smooth")]
    assert len(cases) > 6
    spelled = {"times largest over magnitude": RIGHT["times largest over magnitude"]}
    for case in cases:
        assert kinds(case.id, spelled, monkeypatch) == dict.fromkeys(spelled), case.id


@pytest.mark.parametrize(("name", "values", "steps"), [
    # 127 itself is cut to 126 by who is an ULP below it; 63.5 is no decision point of cutting, but one of rounding
    ("int8", {"truncate": [127.0, 63.5, 10.25, 0.0], "nearest": [127.0, 63.5, 10.25, 0.0]},
     {"truncate": [1.0, 0.0, 0.0, 0.0], "nearest": [0.0, 1.0, 0.0, 0.0]}),
    # 17 is halfway between the codes of 16 and 18 where the scale is 1; 448 saturates
    ("fp8", {"": [448.0, 17.0, 16.5, 18.0]}, {"": [0.0, 2.0, 0.0, 0.0]}),
])
def test_either_code_beside_a_decision_point_and_one_elsewhere(
        name: str, values: dict[str, list[float]], steps: dict[str, list[float]]) -> None:
    for rule, row in values.items():
        exact = torch.tensor([[row]], dtype=torch.float64)
        routes = Routes(torch.zeros((1, 1), dtype=torch.int32), torch.ones((1, 1)))
        found = intermediate(Bounded(exact, torch.zeros_like(exact)), MODES[name], routes, rule=rule or "truncate")
        assert found.error is not None and float(found.scale) == 1.0
        size = exact.abs().amax()
        assert bool(((found.error - torch.tensor(steps[rule])).abs() <= size * 2.0**-21).all()), found.error
