"""The golden's budget fraction in one pass: that of the formula in fp64, and none where it cannot tell."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from conformance.case import Case
from conformance.data.values import PATTERNS
from conformance.formats import FORMATS
from conformance.operator import OracleRows, Reference, Shared
from conformance.registry import operator
from conformance.verdicts import fused
from conformance.verdicts.measurement import element_errors
from conformance.verdicts.verdict import golden_fraction

on_cuda = pytest.mark.skipif(not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
                             reason="needs a CUDA device and Triton, one of which is not here")
BASE = {"tokens": "67", "topk": "6", "hidden": "512", "routing": "padding", "weights": "yes", "xsf": "yes"}


def reference_of(value: float, error: float, golden: float, form: str, device: str) -> Reference:
    """Of 3 x 700 elements, one of which is as given; the others are 1, exactly."""
    exact = torch.ones((3, 700), dtype=torch.float64, device=device)
    allowed = torch.full((3, 700), 1e-6, device=device)
    found = exact.clone()
    exact[2, 699], allowed[2, 699], found[2, 699] = value, error, golden
    rows = [OracleRows(0, 2, exact[:2], allowed[:2]), OracleRows(2, 3, exact[2:], allowed[2:])]
    return Reference(found.to(FORMATS[form].dtype), lambda: iter(rows))


@on_cuda
@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize(("source", "target"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3")])
def test_the_same_figure_in_one_pass(name: str, source: str, target: str) -> None:
    contract, device = operator("moe_reduce_fused"), torch.device("cuda", 0)
    case = Case("moe_reduce_fused", {**BASE, "in": source, "out": target, "data": name})
    call = contract.inputs(case, "official", device, Shared())
    call.set_poison(1)
    reference = contract.reference(call, Shared())
    assert isinstance(reference, Reference)
    found, known = fused.begin(reference)(), 0.0
    for rows in reference.oracle():
        error, budget, _ = element_errors(reference.golden[rows.start : rows.stop], reference.golden, rows)
        known = max(known, float((error / budget).max()))
    if found is None:
        assert name in ("nonfinite", "overflow")
    else:
        assert found == pytest.approx(known, rel=1e-6, abs=1e-12)


@on_cuda
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "e4m3"])
def test_it_says_nothing_of_what_is_over_budget_or_not_finite(form: str) -> None:
    def tell(reference: Reference) -> float | None:
        return fused.begin(reference)()

    step = 2.0 ** (1 - FORMATS[form].precision)
    assert tell(reference_of(1.0, 1e-6, 1.0, form, "cuda")) == 0.0
    half = tell(reference_of(1 + step / 2, step / 2, 1.0, form, "cuda"))
    assert half == pytest.approx(0.5, rel=1e-5)
    assert tell(reference_of(1 + 2.5 * step, step, 1.0, form, "cuda")) is None
    assert tell(reference_of(math.nan, 1e-6, math.nan, form, "cuda")) is None
    assert tell(reference_of(1.0, math.inf, 1.0, form, "cuda")) is None
    assert tell(reference_of(1.0, 1e-6, math.nan, form, "cuda")) is None
    if form != "e4m3":
        assert tell(reference_of(math.inf, 1e-6, math.inf, form, "cuda")) is None


@on_cuda
def test_what_saturates_is_no_error() -> None:
    assert fused.begin(reference_of(1e6, 1.0, 448.0, "e4m3", "cuda"))() == 0.0


def test_on_a_cpu_pytorch_measures() -> None:
    reference = reference_of(1 + 2.0**-8, 2.0**-9, 1.0, "bf16", "cpu")
    assert fused.begin(reference)() is None
    assert golden_fraction(reference)() == pytest.approx(2 / 3, rel=1e-4)


@on_cuda
def test_a_triton_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a compiler for its launcher, or on a card that it does not know."""
    class Fails:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "_kernel", Fails)
    reference = reference_of(1 + 2.0**-8, 2.0**-9, 1.0, "bf16", "cuda")
    assert fused.begin(reference)() is None
    assert golden_fraction(reference)() == pytest.approx(2 / 3, rel=1e-4)
