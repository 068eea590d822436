"""Cases that an architecture's table or a matrix leaves out: counted, given a reason, never run there, and stale when
they are about nothing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.arch import Arch
from conformance.cases.applies import meant, why_not_meant
from conformance.cases.matrix import load_matrix
from conformance.commands import cli
from conformance.environment import ABSENT
from conformance.errors import ConformanceError
from conformance.expectations.check import problems
from conformance.expectations.files import read_arch
from conformance.expectations.rule import Expectation
from conformance.judging.judge import Judge
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
    assert problems(table, (), [{**SKIPPED.params, "operator": OPERATOR}])[-1:] == [
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


# ---- the published 2592 ids -----------------------------------------------------------------------------------------


PUBLISHED = matrix(OPERATOR).cases("published")
DTYPES = ("fp8", "fp16", "bf16", "int8", "int8smooth", "int4", "int4_bf16", "fp4", "a8w4")


def test_the_published_ids_are_the_product_of_their_axes() -> None:
    axes = {key: Counter(case.params[key] for case in PUBLISHED) for key in ("shape", "in", "out", "mode", "mask",
                                                                            "launch")}
    assert len({case.id for case in PUBLISHED}) == len(PUBLISHED) == 2592 == 6 * 9 * 3 * 2 * 2 * 2 * 2
    assert set(axes["in"]) == {*DTYPES, *(f"{name}_g32" for name in DTYPES)}
    assert all(len(set(counts.values())) == 1 for counts in axes.values())
    run = {case.id for case in meant(PUBLISHED, None)[0]}
    official = {case.id for case in matrix(OPERATOR).cases("official")}
    assert official < run and {case.params["in"] for case in PUBLISHED if case.id in run - official} == {"fp4", "a8w4"}
    assert not [case for tier in ("official", "fp8", "dtypes", "smoke", "benchmark", "edge")
                for case in matrix(OPERATOR).cases(tier) if matrix(OPERATOR).left_out(case)]


@pytest.mark.parametrize(("dtype", "cdna3", "cdna4"), [
    *((name, 42, 84) for name in (*DTYPES[:7], "int4_bf16_g32")), ("fp4", 0, 8), ("a8w4", 0, 8),
    *((f"{name}_g32", 0, 0) for name in DTYPES if name != "int4_bf16"),
])
def test_published_counts_by_dtype(dtype: str, cdna3: int, cdna4: int) -> None:
    cases = [case for case in PUBLISHED if case.params["in"] == dtype]
    assert len(cases) == 144  # 288 with both group sizes
    assert [len(meant(cases, arch(name))[0]) for name in ("gfx942", "gfx950")] == [cdna3, cdna4]
    small = [case for case in cases if case.params["shape"] not in ("L", "FP4_L")]
    assert len(meant(small, arch("gfx950"))[0]) == {84: 56, 8: 4, 0: 0}[cdna4]


def test_published_counts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """With 44 ids of other tests these are the 716 and 349 that the whole published file runs: 28 and 13 of its own."""
    for name, count in (("gfx942", 336), ("gfx950", 688), ("", 688)):
        words = ["list", "--operator", OPERATOR, "--tier", "published", *(("--arch", name) if name else ())]
        assert cli.main([*words, "--count"]) == 0
        out, err = capsys.readouterr()
        assert out == f"{count}\n"
        notes = err.splitlines()
        start = f"{OPERATOR} on {name}: " if name else f"{OPERATOR}: "
        numbers = [int(note.removeprefix(start).split(" of 2592 cases are not run: left out ")[0]) for note in notes]
        assert sum(numbers) == 2592 - count and 1152 in numbers and 360 in numbers and 240 in numbers
        assert all("matrices/moe_gemm_2stage.toml:" in note or "matrices/archs/gfx942.toml:" in note for note in notes)
        assert cli.main(words) == 0
        assert len(capsys.readouterr().out.split()) == count
    assert cli.main(["list", "--operator", OPERATOR, "--tier", "published", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert len(entries) == 2592 and sum(entry["skip"] is None for entry in entries) == 688


@pytest.mark.parametrize(("params", "words"), [
    ({"in": "fp8_g32"}, "int4 weights and bf16 activations only"),
    ({"in": "bf16", "mode": "atomic", "mask": "yes"}, "a mask goes with reduce mode only"),
    ({"in": "bf16", "mode": "reduce", "out": "f32"}, "partials are f16 or bf16"),
    ({"in": "fp4", "shape": "FP4_S"}, "more than 512 columns"),
    ({"in": "a8w4", "shape": "M", "mode": "reduce", "out": "f16"}, "tile_k of at least 256"),
    ({"in": "a8w4", "shape": "FP4_L", "mode": "reduce", "mask": "yes", "out": "f16"}, "takes no mask"),
    ({"in": "fp4", "shape": "FP4_L", "mode": "reduce", "mask": "no", "out": "bf16"}, "writes f16 only"),
])
def test_an_id_that_the_matrix_leaves_out_is_not_run_anywhere(params: dict[str, str], words: str) -> None:
    case = next(case for case in PUBLISHED if params.items() <= case.params.items())
    (kernel,) = kernels(OPERATOR, ["per_expert"])
    result = Lanes(Settings(ABSENT, "official", "gfx950"), arch("gfx950"), 60.0).run(case, kernel)
    here = Judge(Settings()).run(case, kernel)
    for found in (result, here):
        assert found.state == "not-run" and found.message.startswith("left out by the matrix: ") and (
            words in found.message)


def test_what_the_matrix_leaves_to_run_runs() -> None:
    (kernel,) = kernels(OPERATOR, ["per_expert"])
    for dtype in ("fp4", "a8w4"):
        case = next(case for case in meant(PUBLISHED, None)[0] if case.params["in"] == dtype)
        assert case.params["shape"] == "FP4_M"
        assert Judge(Settings()).run(case, kernel).state == "pass"


MATRIX = """operator = "moe_gemm_2stage"
[tier.one]
expand = [{ shape = ["S", "L"], bm = [16, 32] }]
[[edge]]
family = "F01"
about = "a"
source = "s"
expand = [{ bm = 64 }]
[[skip]]
match = { shape = "L", bm = { max = 16 } }
reason = "too long"
source = "its test"
"""


def test_a_skip_of_a_matrix(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(MATRIX, encoding="utf-8")
    of = load_matrix(file)
    assert [of.left_out(case) for case in of.cases("one")] == [
        None, None, f"left out by the matrix: too long ({file}:9)", None]
    assert of.stale_skips() == []
    file.write_text(MATRIX.replace('shape = "L", bm = { max = 16 }', 'family = "F01"'), encoding="utf-8")
    assert load_matrix(file).stale_skips() == []
    for stale in ("M", "S_"):
        file.write_text(MATRIX.replace('shape = "L"', f'shape = "{stale}"'), encoding="utf-8")
        assert load_matrix(file).stale_skips() == [
            f"{file}:9: stale: it matches no case of moe_gemm_2stage; remove or mend it"]


def test_a_value_of_a_skip_that_no_case_has_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(MATRIX.replace('shape = "L"', 'shape = ["L", "XL"]'), encoding="utf-8")
    assert load_matrix(file).stale_skips() == [
        f"{file}:9: match: no case of moe_gemm_2stage has shape = 'XL'; remove or mend it"]


def test_a_misspelt_parameter_of_an_architectures_skip_is_named() -> None:
    skip = Expectation(match={"operator": (OPERATOR,), "shap": ("L",)}, where="f.toml:3")
    found = problems(replace(arch("gfx942"), rules=(), skips=(skip,)), (), [{**SKIPPED.params, "operator": OPERATOR}])
    assert "unknown key in f.toml:3: match: 'shap'. Did you mean 'shape'?" in found[0]


def test_a_stale_skip_of_a_matrix_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                              ) -> None:
    of = matrix(OPERATOR)
    monkeypatch.setattr(type(of), "stale_skips", lambda self: ["f.toml:3: stale"] if self.skips else [])
    assert cli.main(["list", "--operator", OPERATOR, "--tier", "published", "--count"]) == 2
    assert "f.toml:3: stale" in capsys.readouterr().err
    assert cli.main(["expectations", "--arch", "cpu"]) == 1
    assert "f.toml:3: stale" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new", "words"), [
    ('reason = "too long"', "", "own.toml:9: key 'reason' is missing"),
    ('reason = "too long"', 'reason = ""', "own.toml:9: key 'reason' must not be empty"),
    ("{ max = 16 }", '{ above = "threads" }', "own.toml:9: a skip of a matrix compares with no fact"),
    ("{ max = 16 }", "{}", "a range needs"),
    ('shape = "L", bm = { max = 16 }', "", "own.toml:9: a skip of a matrix matches parameters"),
    ('shape = "L"', 'kernel = "legacy"', "it takes no 'facts', 'operator', 'kernel'"),
    ('shape = "L"', 'operator = "moe_gemm1"', "it takes no 'facts', 'operator', 'kernel'"),
    ('source = "its test"', 'source = "its test"\nfacts = { fp4 = [false] }', "it takes no 'facts'"),
    ('reason = "too long"', 'reason = "too long"\nuntil = "2030-01-01"', "unknown key in"),
])
def test_a_malformed_skip_of_a_matrix(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert MATRIX.count(old) == 1
    file = tmp_path / "own.toml"
    file.write_text(MATRIX.replace(old, new), encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        load_matrix(file)
    assert words in str(error.value)
