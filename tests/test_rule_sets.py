"""FlyDSL's published rules as data: every count and cell that its authors and our measurements state must come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.commands import cli
from conformance.errors import ConformanceError
from conformance.expectations.check import governed
from conformance.expectations.rule_set import Point, load_rule_set, runnable, value_of, word
from conformance.registry import arch, rule_set_file

FILE = rule_set_file("flydsl_moe_gemm_2stage")
RULES = load_rule_set(FILE)
SEED, HEAD = RULES.revisions["seed"], RULES.revisions["head"]


@pytest.mark.parametrize("revision", ["seed", "seed-intermediate", "head"])
@pytest.mark.parametrize(("arch_name", "fp8", "alone"), [("gfx950", 84, 12), ("gfx942", 42, 9)])
def test_the_published_counts(revision: str, arch_name: str, fp8: int, alone: int) -> None:
    found = RULES.revisions[revision]
    matrix, single = (RULES.outcomes(found, cells, arch(arch_name)) for cells in ("fp8", "stand-alone"))
    assert (sum(matrix.values()), sum(single.values())) == (84, 12)
    assert (runnable(matrix), runnable(single)) == (fp8, alone)


def test_the_seeds_cells_of_each_kind() -> None:
    gfx942 = {"unsupported = refused": 42, "native": 34, "fallback = legacy": 6, "unsupported = process-exit": 2}
    assert RULES.outcomes(SEED, "fp8", arch("gfx942")) == gfx942
    assert RULES.outcomes(SEED, "fp8", arch("gfx950")) == {"native": 84}
    assert RULES.outcomes(SEED, "variants", arch("gfx950")) == {"fallback = legacy": 2}
    between = RULES.outcomes(RULES.revisions["seed-intermediate"], "fp8", arch("gfx942"))
    assert between == {"unsupported = refused": 42, "fallback = legacy": 42}


def test_heads_cells_of_each_kind() -> None:
    assert RULES.outcomes(HEAD, "fp8", arch("gfx942")) == {"native": 42, "unsupported = refused": 42}
    assert RULES.outcomes(HEAD, "fp8", arch("gfx950")) == {"native": 84}
    for name in ("gfx90a", "gfx1201", "gfx1250"):
        assert runnable(RULES.outcomes(HEAD, "fp8", arch(name))) == 0
    beside = RULES.outcomes(HEAD, "neighbours", arch("gfx942"))
    assert beside["fallback = k16"] == 2
    assert beside["unsupported = compiler-abort"] == 1
    assert beside["unsupported = refused-by-compiler ('v_cvt_scalef32_pk_bf16_fp4')"] == 1
    for name in ("gfx942", "gfx950", "gfx1201", "gfx1250"):
        assert "unknown" not in RULES.outcomes(HEAD, "neighbours", arch(name)), name


@pytest.mark.parametrize(("wanted", "arch_name", "expected"), [
    ({"in": "fp8", "stage": "2", "mode": "atomic", "out": "bf16", "shape": "S"}, "gfx942", "fallback = legacy"),
    ({"in": "fp8", "stage": "1", "mode": "atomic", "out": "bf16", "shape": "S"}, "gfx942", "native"),
    ({"in": "fp8", "stage": "2", "mode": "reduce", "out": "bf16", "shape": "S"}, "gfx942", "native"),
    ({"in": "fp8", "stage": "2", "mode": "atomic", "out": "bf16", "shape": "S"}, "gfx950", "native"),
    ({"in": "bf16", "mode": "atomic", "out": "f16"}, "gfx950", "fallback = legacy"),
    ({"in": "int4", "mode": "atomic", "out": "f16"}, "gfx950", "fallback = legacy"),
    ({"in": "fp4", "mode": "atomic", "out": "f16"}, "gfx942", "unsupported = refused"),
    ({"in": "fp8", "mode": "reduce", "out": "f32"}, "gfx950", "unsupported = refused ('ValueError')"),
])
def test_single_cells_of_the_seed(wanted: Point, arch_name: str, expected: str) -> None:
    points = [p for p in RULES.points(SEED) if p.items() >= wanted.items() and "scales" not in p and "k_batch" not in p]
    assert points
    from conformance.expectations.rule import expected as expectation

    assert {word(expectation(SEED.rules, point, arch(arch_name))) for point in points} == {expected}


@pytest.mark.parametrize(("shape", "dtype", "stage", "seed", "head"), [
    ("L", "fp8", "2", 73728, 65536),
    ("FP4_L", "fp8", "2", 163840, 131072),
    ("FP4_L", "bf16", "2", 196608, None),
    ("wide", "fp8", "2", None, 262144),
    ("wide", "fp8", "1", 131072, 131072),
])
def test_bytes_of_lds(shape: str, dtype: str, stage: str, seed: int | None, head: int | None) -> None:
    wanted = {"shape": shape, "in": dtype, "stage": stage} | ({"out": "f32"} if stage == "2" else {})
    for revision, bytes_of_lds in ((SEED, seed), (HEAD, head)):
        points = [p for p in RULES.points(revision) if p.items() >= wanted.items()]
        if bytes_of_lds is not None:
            assert {int(point["lds"]) for point in points} == {bytes_of_lds}


def test_the_cell_that_fits_exactly_and_the_one_that_does_not() -> None:
    boundary = RULES.outcomes(SEED, "boundary", arch("gfx950"))
    assert arch("gfx950").limit("shared_bytes") == 163840
    assert boundary == {"native": 2, "unsupported = process-exit": 2}


def test_no_rule_is_about_nothing() -> None:
    for revision in RULES.revisions.values():
        counts: dict[str, int] = {}
        for entry in governed(revision.rules, [arch(name) for name in revision.archs], RULES.points(revision)):
            counts[entry.rule.where] = counts.get(entry.rule.where, 0) + entry.points
        assert len(counts) == len(revision.rules)
        assert [where for where, count in counts.items() if not count] == []


def test_the_command_line_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["expectations", "--rule-set", "flydsl_moe_gemm_2stage", "--arch", "gfx942"]) == 0
    out = capsys.readouterr().out
    assert "  gfx942 " in out and "  gfx950 " not in out
    assert "42 unsupported = refused, 34 native, 6 fallback = legacy" in out
    assert cli.main(["expectations", "--rule-set", "flydsl"]) == 2
    assert "Known: flydsl_moe_gemm_2stage" in capsys.readouterr().err
    assert cli.main(["expectations", "--rule-set", "flydsl_moe_gemm_2stage", "--arch", "sm_90"]) == 2
    assert "it speaks of gfx" in capsys.readouterr().err


@pytest.mark.parametrize(("expression", "value"), [
    (3, 3), ("a", 4), (["a", "a", 2], 32), ({"sum": ["a", 1]}, 5), ({"max": ["a", ["a", 2], 7]}, 8),
    ({"of": "t", "to": {"x": 9}}, 9),
])
def test_expressions(expression: object, value: int) -> None:
    assert value_of(expression, {"a": "4", "t": "x"}) == value


@pytest.mark.parametrize(("old", "new", "words"), [
    ('value = [2, "bm", "bk", "in_bytes"]', 'value = [2, "bm", "kb", "in_bytes"]', ("revision 'seed'", "kb")),
    ('cells = ["fp8", "stand-alone", "dtypes", "variants"', 'cells = ["fp9", "stand-alone"', ("unknown cell", "fp9")),
    ('[cells.tiles]\nabout', '[cells.tiles]\nabuot', ("unknown key", "abuot")),
])
def test_a_malformed_file(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "rules.toml"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        load_rule_set(file)
    assert all(word in str(error.value) for word in words), str(error.value)
