"""Cases that an architecture's table leaves out: counted, given a reason, never run there, and stale when they are
about nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance import cli
from conformance.applies import meant, why_not_meant
from conformance.arch import Arch
from conformance.environment import ABSENT
from conformance.errors import ConformanceError
from conformance.expectations.check import problems
from conformance.expectations.files import read_arch
from conformance.expectations.rule import Expectation
from conformance.lanes.take import Lanes, would_take
from conformance.registry import arch, kernels, matrix
from conformance.result import Settings, why_not_run

OPERATOR = "moe_gemm_2stage"
FP8 = matrix(OPERATOR).cases("fp8")
SKIPPED = next(case for case in FP8 if case.params["shape"] == "FP4_S")
TABLE = """name = "new"
about = "a new chip"
device = "cuda"
language = "hip"
"""
SKIP = """[[skip]]
match = { operator = "moe_gemm_2stage", shape = "L" }
reason = "too long"
source = "its manual"
"""


@pytest.mark.parametrize(("operator", "tier", "cdna3", "cdna4"), [
    (OPERATOR, "fp8", 42, 84), ("moe_gemm1", "fp8", 24, 48), ("moe_gemm2", "fp8", 60, 120),
    ("moe_gemm2", "stand_alone", 27, 36),  # nine and twelve published ids, three sub-runs each
])
def test_the_published_matrix_on_each_architecture(
    capsys: pytest.CaptureFixture[str], operator: str, tier: str, cdna3: int, cdna4: int
) -> None:
    for name, count in (("gfx942", cdna3), ("gfx950", cdna4), ("sm_90", cdna4), ("cpu", cdna4)):
        assert cli.main(["list", "--operator", operator, "--tier", tier, "--arch", name, "--count"]) == 0
        out, err = capsys.readouterr()
        assert out == f"{count}\n"
        assert (f"{operator} on gfx942: {cdna4 - cdna3} of {cdna4} cases are not run: left out on gfx942: " in err
                ) == (name == "gfx942")
    assert cli.main(["list", "--operator", operator, "--tier", tier, "--count"]) == 0
    assert capsys.readouterr().out == f"{cdna4}\n"


def test_several_architectures_and_ids(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["list", "--operator", OPERATOR, "--tier", "fp8", "--arch"]
    assert cli.main([*words, "gfx942,gfx950", "--count"]) == 0
    assert capsys.readouterr().out == "gfx942: 42\ngfx950: 84\n"
    assert cli.main([*words, "gfx942"]) == 0
    kept = capsys.readouterr().out.split()
    assert len(kept) == 42
    assert not [text for text in kept if "FP4_" in text]
    assert cli.main([*words, "gfx942,gfx950"]) == 0  # what any of them runs
    assert len(capsys.readouterr().out.split()) == 84


def test_a_family_that_needs_a_gpu_is_not_counted_for_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    edge = matrix("moe_reduce_fused").cases("edge")
    gpu = sum(matrix("moe_reduce_fused").devices(case) == ("cuda",) for case in edge)
    assert gpu > 0
    assert cli.main(["list", "--operator", "moe_reduce_fused", "--tier", "edge", "--arch", "cpu", "--count"]) == 0
    out, err = capsys.readouterr()
    assert int(out) == len(edge) - gpu
    assert "needs cuda" in err


def test_a_case_that_is_left_out_is_not_run_and_says_why() -> None:
    (kernel,) = kernels(OPERATOR, ["legacy"])
    result = Lanes(Settings(ABSENT, "official", "gfx942"), arch("gfx942"), 60.0).run(SKIPPED, kernel)
    assert (result.state, result.lane, result.kind) == ("not-run", "route", None)
    assert "left out on gfx942: " in result.message and "scaled 4-bit floats" in result.message
    assert "matrices/archs/gfx942.toml:" in result.message
    assert would_take(SKIPPED, kernel, arch("gfx942")).startswith("not run: left out on gfx942")
    assert why_not_run(SKIPPED, kernel, Settings("cuda", "official", "gfx942")) == result.message
    assert why_not_meant(SKIPPED, arch("gfx950")) is None


def test_a_skip_that_hangs_on_an_unknown_fact_skips_nothing() -> None:
    table = Arch("new", skips=(replace(arch("gfx942").skips[0]),))
    assert table.fact("fp4") is None
    assert len(meant(FP8, table)[0]) == 84


def test_a_skip_that_matches_nothing_is_stale() -> None:
    table = replace(arch("gfx942"), rules=(), skips=(Expectation(match={"operator": ("none",)}, where="f.toml:3"),))
    assert problems(table, (), [{**SKIPPED.params, "operator": OPERATOR}]) == [
        "f.toml:3: stale: it matches no case on gfx942; remove or mend it"]


@pytest.mark.parametrize(("old", "new", "words"), [
    ('reason = "too long"\n', "", "new.toml:5: key 'reason' is missing"),
    ('source = "its manual"', 'source = ""', "new.toml:5: key 'source' must not be empty"),
    ('operator = "moe_gemm_2stage", ', "", "new.toml:5: a skip's match needs 'operator'"),
    ('shape = "L"', 'kernel = "legacy"', "takes neither 'kernel' nor 'variant'"),
    ("reason", "expect", "unknown key in"),
    ("[[skip]]\nmatch", "skip = [{}]\nmatch", "1 tables and 0 headers [[skip]]"),
])
def test_a_malformed_skip(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "new.toml"
    file.write_text(TABLE + SKIP, encoding="utf-8")
    (skip,) = read_arch(file).skips
    assert skip.match == {"operator": ("moe_gemm_2stage",), "shape": ("L",)}
    text = SKIP.replace(old, new)
    file.write_text(TABLE + text if "[[skip]]" in text else text.split("\n")[0] + "\n" + TABLE, encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        read_arch(file)
    assert words in str(error.value)
