"""Cases prove that they can fail; a case, a reference or a verdict that accepts what is wrong is named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from engine_samples import call_of, right, sample, subject

from conformance.case import Case
from conformance.judging import vacuity, vacuity_exact
from conformance.judging.judge import Judge
from conformance.operator import OracleRows, Reference, References, Shared
from conformance.registry import ROOT, matrices, matrix, operator
from conformance.result import Settings
from conformance.verdicts.joint import Joint
from conformance.verdicts.verdict import Verdict

OPERATOR = "moe_reduce_fused"
SMOKE = matrix(OPERATOR).plan(("smoke",))


@pytest.mark.parametrize("case", SMOKE[::6], ids=lambda case: case.name)
def test_a_smoke_case_accepts_nothing_wrong(case):
    assert vacuity.accepted(*call_of(case)) is None


@pytest.mark.parametrize("params", [
    {"data": "exact"}, {"data": "zeros", "xsf": "no"}, {"in": "bf16", "out": "bf16"}, {"in": "fp16", "out": "e4m3"},
    {"data": "nonfinite"}, {"routing": "none"}, {"in": "bf16", "out": "e4m3", "sf": "nan"}, {"tokens": 1},
    {"data": "overflow", "in": "fp16", "out": "fp16"}, {"hidden": 16384, "tokens": 3},
], ids=str)
def test_special_data_is_not_called_vacuous(params):
    assert vacuity.accepted(*call_of(sample(**params))) is None


def test_a_case_without_elements_proves_nothing():
    assert vacuity.accepted(*call_of(sample(tokens=0))) is None


def test_the_golden_is_left_as_it_was():
    call, reference = call_of(sample())
    before = reference.golden.clone()
    vacuity.accepted(call, reference)
    assert torch.equal(before, reference.golden)


def wide(reference: Reference, factor: float) -> Reference:
    """The reference with an error budget that is too large."""
    rows = [OracleRows(r.start, r.stop, r.value, r.error * 0 + factor) for r in reference.oracle()]
    return Reference(reference.golden, lambda: iter(rows))


def test_an_error_budget_that_is_too_large_is_noticed(monkeypatch):
    """The published tolerance still rejects most; without it nothing does."""
    call, reference = call_of(sample())
    from conformance.formats import BY_DTYPE, FORMATS

    loose = replace(FORMATS["fp32"], published=1e9)
    assert vacuity.accepted(call, wide(reference, 1e9)) is None
    monkeypatch.setitem(BY_DTYPE, torch.float32, loose)
    taken = vacuity.accepted(call, wide(reference, 1e9))
    assert taken is not None and "one element changed" in taken


def test_a_verdict_that_ignores_nan_is_noticed(monkeypatch):
    real = vacuity.judge

    def blind(result, *rest):
        return Verdict("within-budget") if bool(result.isnan().any()) else real(result, *rest)

    monkeypatch.setattr(vacuity, "judge", blind)
    assert vacuity.accepted(*call_of(sample())) == "one NaN"


def test_a_verdict_without_rows_is_noticed(monkeypatch):
    """One that looks at sums only: whatever keeps them passes."""
    real = vacuity.judge

    def sums(result, call, reference, *rest):
        same = torch.allclose(result.sum(1), reference.golden.sum(1), rtol=1e-3, equal_nan=True)
        return Verdict("within-budget") if same else real(result, call, reference, *rest)

    monkeypatch.setattr(vacuity, "judge", sums)
    assert vacuity.accepted(*call_of(sample())) == "columns in reverse, columns shifted by one"


@pytest.mark.parametrize(("mode", "tiers", "proved"), [
    ("smoke", {"smoke", "official"}, True), ("smoke", {"official"}, False), ("all", set(), True),
    ("off", {"smoke"}, False),
])
def test_which_cases_prove_themselves(mode, tiers, proved):
    assert vacuity.is_proved(Case("o", {}, tiers=frozenset(tiers)), mode) is proved


def test_a_vacuous_case_fails_for_a_right_kernel_too(monkeypatch):
    def filler(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))

    calls: list[int] = []
    monkeypatch.setattr("conformance.judging.judge.accepted",
                        lambda call, reference, before: calls.append(1) or "zeros")
    judge, kernel = Judge(Settings(), "all"), subject(filler)
    for _ in range(2):
        result = judge.run(sample(), kernel)
        assert (result.state, result.kind) == ("error", "vacuous")
        assert result.message == f"{sample().id}: the case is vacuous: its verdict accepts zeros"
    assert calls == [1]
    assert Judge(Settings(), "smoke").run(sample(), kernel).state == "pass"


def test_an_unknown_mode_is_one_line():
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--vacuity", "some", "--collect-only", "-q"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "unknown value of --vacuity 'some'" in done.stderr + done.stdout


@pytest.mark.parametrize("name", matrices())
def test_another_expert_and_the_case_before_are_tried_for_every_operator(name):
    """On a few smoke cases, whose outputs differ: each is rejected, and by name."""
    of, before, tried = operator(name), {}, set()
    for case in [case for case in matrix(name).plan(("smoke",)) if not matrix(name).devices(case)][:6]:
        shared = Shared()
        call = of.inputs(case, "reduced", torch.device("cpu"), shared)
        call.set_poison(1)
        references = References.made_of(of.reference(call, shared))
        assert vacuity.accepted(call, references, before) is None, case.id
        joint = Joint.of(call, references)
        for output, one in references.of.items():
            tried |= (vacuity_exact.accepted(joint, output, before.get(output)) if one.exact else
                      vacuity._within_bounds(call.part(output), one, before.get(output)))[0]
        before = {output: one.golden.clone() for output, one in references.of.items()}
    assert "the previous case's output" in tried and any(label.startswith("another expert's") for label in tried)
