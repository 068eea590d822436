"""Shrinking a failing case: to the smallest one that fails alike, within its time, and only if it fails."""

from __future__ import annotations

import itertools

import pytest
from engine_samples import right, sample, subject

from conformance import mutants
from conformance.case import parse_case
from conformance.commands import minimise as minimise_module
from conformance.commands import repro
from conformance.commands.minimise import minimise
from conformance.errors import ConformanceError
from conformance.registry import MUTANTS, kernels
from conformance.result import Settings

START = sample(tokens=63, topk=6, hidden=1024, routing="ragged", data="real", xsf="yes")
SETTINGS = Settings()


def _zero_from(row: int):
    def kernel(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
        out[row:] = 0

    return subject(kernel)


def test_a_number_shrinks_to_the_boundary_between_known_values():
    found = minimise(START, _zero_from(11), SETTINGS, 1e9)
    assert found.case.number("tokens") == 12
    assert (found.case.number("topk"), found.case.number("hidden")) == (1, 256)
    assert found.result.state == "fail" and not found.cut_short


def test_words_become_usual_ones_and_the_failure_keeps_its_cause():
    kernels(START.operator, (MUTANTS,))
    found = minimise(START, mutants.mutants(START.operator)["semantic_unweighted"].kernel, SETTINGS, 1e9)
    assert found.case.get("routing") != "ragged" and found.case.number("tokens") == 1
    assert "the weights are left out" in found.result.message
    assert found.case.get("weights", "yes") == "yes"  # without weights it would not fail


def test_a_format_becomes_no_coarser_one():
    """In the matrix e4m3 is the more usual output; a failure in it is no plainer."""
    found = minimise(sample(tokens=3, **{"in": "bf16", "out": "bf16"}), _zero_from(1), SETTINGS, 1e9)
    assert found.case.get("out") == found.case.get("in") != "e4m3"


def test_parameters_that_must_change_at_once_do():
    """No step of one parameter leads on from six tokens of six slots."""
    def kernel(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
        if len(out) == token_topk_to_pos.shape[1]:
            out[-1] = 0

    found = minimise(sample(tokens=6, topk=6, xsf="no"), subject(kernel), SETTINGS, 1e9)
    assert found.case.number("tokens") == found.case.number("topk") <= 2


def test_what_compiles_again_changes_last(monkeypatch):
    tried = []
    real = minimise_module._run

    def run(case, *given, **named):
        tried.append(case)
        return real(case, *given, **named)

    monkeypatch.setattr(minimise_module, "_run", run)
    minimise(sample(tokens=9, topk=3, hidden=1024), _zero_from(0), SETTINGS, 1e9)
    widths = [case.number("hidden") for case in tried]
    changed = next(place for place, width in enumerate(widths) if width != 1024)
    assert tried[changed].number("tokens") == 1


def test_the_time_is_kept():
    clock = itertools.count()
    found = minimise(START, _zero_from(0), SETTINGS, 4, clock=lambda: float(next(clock)))
    assert found.cut_short and found.tried < 5
    assert found.result.state == "fail"


def test_a_case_that_does_not_fail_is_refused():
    with pytest.raises(ConformanceError, match=r"does not fail on .* \(pass\): there is nothing to shrink"):
        minimise(sample(tokens=5), _zero_from(99), SETTINGS, 10)


def test_a_kernel_that_ends_the_process_is_not_shrunk(tmp_path):
    target = tmp_path / "repro.py"
    target.write_text("import os; os.abort()", encoding="utf-8")
    with pytest.raises(ConformanceError, match=r"the case ends the process \(exit code -6\): it is not shrunk"):
        repro._confirm(target, "the case")


def test_a_file_that_shows_no_failure_is_not_handed_out(tmp_path):
    target = tmp_path / "repro.py"
    target.write_text("print('all elements equal')", encoding="utf-8")
    with pytest.raises(ConformanceError, match="does not fail by itself: all elements equal"):
        repro._confirm(target, "the case")


def test_without_a_file_there_is_no_shrinking():
    kernels("moe_gemm1", (MUTANTS,))
    case = "moe_gemm1/F17-dtypes/tokens:23-hidden:128-inter:64-experts:8-topk:2-bm:16-in:fp8-out:f16-mask:no"
    assert parse_case(case)
    with pytest.raises(ConformanceError, match="--minimise needs --write FILE"):
        repro.repro(case, repro.Selection(archs=("cpu",)), "per_expert", None, 5.0)
