"""The bug zoo: its records, that every mutant does what it says, and that no ordinary run meets one."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from engine_samples import sample

from conformance import mutants
from conformance.cases import rounds
from conformance.commands import cli, zoo
from conformance.errors import ConformanceError
from conformance.judging.judge import Judge
from conformance.kernel import LEVELS
from conformance.mutants import FAULTS
from conformance.registry import MUTANTS, ROOT, arch, kernels, matrix
from conformance.result import Settings
from conformance.zoo import assembled, runs
from conformance.zoo.applied import differs
from kernels import tilelang_build, tilelang_lower

OPERATOR = "moe_reduce_fused"
kernels(OPERATOR, (MUTANTS,))
ZOO, CONTROLS = mutants.mutants(OPERATOR), mutants.controls(OPERATOR)
NO_COMPILER = tilelang_build.missing("cpu")


def test_every_fault_kind_has_mutants_and_many_are_tilelang():
    assert {one.fault for one in ZOO.values()} == set(FAULTS)
    assert len(ZOO) >= 40
    assert sum(one.name.startswith("tl_") for one in ZOO.values()) >= 15


@pytest.mark.parametrize("name", ZOO)
def test_a_record_is_complete(name):
    one = ZOO[name]
    assert one.wrong.endswith(".") and one.diagnosis and one.twin in CONTROLS
    assert LEVELS.index(one.kernel.promise) >= LEVELS.index(CONTROLS[one.twin].promise)
    assert one.kernel.module.startswith(f"{MUTANTS}.")


def test_no_two_mutants_say_the_same():
    assert max(Counter((one.twin, one.wrong) for one in ZOO.values()).values()) == 1


def test_an_ordinary_selection_holds_no_mutant_even_when_they_are_loaded():
    assert not {kernel.name for kernel in kernels(OPERATOR)} & {*ZOO, *CONTROLS}


def test_an_ordinary_process_does_not_import_them():
    code = f"import sys, conformance.registry as r; r.kernels({OPERATOR!r}); print({MUTANTS!r} in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(("change", "said"), [
    ({"fault": "NOISE"}, "unknown fault kind of mutant m: 'NOISE'"),
    ({"twin": "absent"}, "unknown twin of mutant m: 'absent'"),
    ({"diagnosis": ()}, "mutant m names no diagnosis"),
])
def test_a_malformed_record_is_refused(change, said):
    given = {"fault": "MAP", "wrong": "x.", "twin": "torch_control", "diagnosis": ("mean",)} | change
    with pytest.raises(ConformanceError, match=said.replace("(", r"\(")):
        mutants.mutant(OPERATOR, "m", lambda x, out: None, **given)


CASES = [sample(), sample(xsf="yes"), sample(**{"in": "bf16", "out": "e4m3", "xsf": "yes", "topk": 3})]


@pytest.mark.parametrize("name", [name for name in CONTROLS if not name.startswith("tl_")])
def test_a_control_is_not_flagged(name):
    judge = Judge(Settings())
    for case in CASES:
        assert judge.run(case, CONTROLS[name]).state == "pass"


@pytest.mark.parametrize("name", ["sentinel_row_0", "stale_last_row", "map_weight_slot", "tail_overrun",
                                  "state_sorts_in_place", "precision_bf16_sum", "semantic_output_type"])
def test_a_mutant_differs_from_its_twin_and_is_killed(name):
    one, twin = ZOO[name], CONTROLS[ZOO[name].twin]
    judge = Judge(Settings())
    seen = [case for case in CASES if differs(one.kernel, twin, case, judge)]
    assert seen
    assert any(Judge(Settings()).run(case, one.kernel).state in ("fail", "error") for case in seen)
    judge.forget()
    assert not differs(twin, twin, seen[0], judge)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize(("name", "state"), [("tl_control", "pass"), ("tl_row_0", "fail"), ("tl_bf16_sum", "fail")])
def test_a_tilelang_mutant_compiles_and_its_twin_passes(name, state):
    case = sample(**{"in": "bf16", "out": "bf16", "tokens": 9})
    kernel = CONTROLS[name] if name in CONTROLS else ZOO[name].kernel
    result = Judge(Settings()).run(case, kernel)
    assert result.state == state, result.message
    assert result.path == name


@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("tl_")])
def test_a_tilelang_mutant_lowers_for_cuda(name):
    """And its program is not the twin's."""
    from kernels.mutants.reduce_fused import tilelang_mutants

    for result in ("bf16", "e4m3"):
        traced = partial(tilelang_mutants.program, name, "cuda", "bf16", result)
        assert "__global__" in tilelang_lower.lower(traced, arch("sm_90")).source
    assert any(_script(name, result) != _script("tl_control", result) for result in ("bf16", "e4m3"))


@functools.cache
def _script(name: str, result: str) -> str:
    from kernels.mutants.reduce_fused import tilelang_mutants

    return str(tilelang_mutants.program(name, "cuda", "bf16", result).script())


# ---- the command --------------------------------------------------------------------------------------------------


def test_an_operator_without_mutants_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(zoo, "mutants", lambda name: {})
    assert cli.main(["zoo", "--operator", OPERATOR, "--out", str(tmp_path / "none")]) == cli.USAGE
    assert f"error: {OPERATOR}: no mutants in {MUTANTS}" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_run_of_the_zoo(capsys, tmp_path, monkeypatch):
    """Two mutants, one of which the smallest tier cannot kill, and a control, through pytest."""
    few = {name: ZOO[name] for name in ("sentinel_row_0", "overflow_fp16")}
    monkeypatch.setattr(zoo, "mutants", lambda name: few)
    monkeypatch.setattr(zoo, "controls", lambda name: {"torch_control": CONTROLS["torch_control"]})
    monkeypatch.setattr(zoo, "MUTANTS", "sentinel_row_0,overflow_fp16,torch_control")
    real = runs.line
    monkeypatch.setattr(runs, "line", lambda *given: [*real(*given), "-p", "kernels.mutants", "-k", "topk:2"])
    monkeypatch.setattr(zoo, "kernels", lambda *_: [])
    before = {path: path.stat().st_mtime for path in (ROOT / "reports").glob("*")}
    code = cli.main(["zoo", "--operator", OPERATOR, "--tier", "smoke", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == cli.FAILED
    assert out.splitlines()[-1] == "killed 1/2"
    assert "SURVIVED" in out and "checks that kill no mutant" in out
    assert "round 2, all other cases of 1 mutants: moe_reduce_fused/overflow_fp16" in out
    assert {path: path.stat().st_mtime for path in (ROOT / "reports").glob("*")} == before
    page = (tmp_path / OPERATOR / "kill-matrix.html").read_text(encoding="utf-8")
    assert "killed 1/2" in page and "sentinel_row_0" in page


def test_the_matrix_of_an_operator_is_the_one_that_pytest_runs():
    line = runs.line([OPERATOR], zoo.Selection(tiers=("smoke", "edge"), data="exact"), Path("out"), MUTANTS, 30.0)
    assert line[line.index("--tier") + 1] == "smoke,edge" and line[line.index("--data") + 1] == "exact"
    assert "--report-dir=out" in line
    assert matrix(OPERATOR).plan(("smoke", "edge"))


# ---- an architecture that is not here -----------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "workers"), [("cpu", "auto"), ("absent", "auto"), ("cuda", "8")])
def test_a_gpu_is_shared_by_half_as_many_processes_as_there_are_cores(device, workers, monkeypatch):
    monkeypatch.setattr(runs, "chosen_archs", lambda names: {"sm_90": device})
    monkeypatch.setattr(runs, "cores", lambda: 16)
    line = runs.line([OPERATOR], zoo.Selection(), Path("out"), MUTANTS, 30.0)
    assert line[line.index("-n") + 1] == workers


def test_compiled_mutants_are_assembled_where_they_cannot_run(capsys, tmp_path, monkeypatch):
    """One row for each mutant and twin; what is only lowered, or refused, is said and fails."""
    rows = [{"operator": OPERATOR, "kernel": name, "state": "pass", "lane": "assemble", "message": "", "stopped": "",
             "resources": {"config": config, "registers": 40}} for name in (*ZOO, *CONTROLS) if name.startswith("tl_")
            for config in ("a", "b", "a")]
    asked = []
    monkeypatch.setattr(assembled, "run", lambda *given: asked.append(given) or ("sm_120", rows))
    assert cli.main(["zoo", "--operator", OPERATOR, "--arch", "sm_120", "--out", str(tmp_path)]) == cli.OK
    out = capsys.readouterr().out
    assert asked[0][4] == "kernels.mutants.reduce_fused.tilelang_mutants"
    assert "46 programs for sm_120" in out and out.splitlines()[-1] == "assembled 23/23, not run"
    rows[0] |= {"lane": "lower", "stopped": "not assembled: no assembler"}
    rows[4] |= {"state": "error", "message": "refused"}
    assert cli.main(["zoo", "--operator", OPERATOR, "--arch", "sm_120", "--out", str(tmp_path)]) == cli.FAILED
    out = capsys.readouterr().out
    assert out.count("NOT ASSEMBLED") == 2 and "not assembled: no assembler" in out and "refused" in out
    assert out.splitlines()[-1] == "assembled 21/23, not run"


def test_the_zoo_takes_one_architecture(capsys):
    assert cli.main(["zoo", "--operator", OPERATOR, "--arch", "sm_90,sm_80"]) == cli.USAGE
    assert "the zoo runs on one architecture at a time" in capsys.readouterr().err


def test_a_mutant_routes_and_lowers_its_own_program():
    """Both are of the edited module, so that compiling ahead knows every program."""
    table, params = arch("sm_90"), CASES[2].params
    one = ZOO["tl_row_0"].kernel
    assert one.route(params, table).path == "tl_row_0" and "tl_row_0" in one.route(params, table).config
    kernels("moe_gemm2", (MUTANTS,))
    gemm = mutants.mutants("moe_gemm2")["tl_nibbles"].kernel
    point = {"in": "int4", "out": "f16", "tokens": "64", "topk": "2", "experts": "4", "bm": "16", "hidden": "256",
             "inter": "128"}
    configs = {gemm.route(point | {"mode": mode}, table).config for mode in ("atomic", "reduce")}
    assert len(configs) == 2 and all(config.startswith("tl_nibbles") for config in configs)


def test_large_cases_are_for_what_nothing_else_kills():
    """Of gigabytes: no twin meets them but beside a mutant that does."""
    cases = matrix(OPERATOR).plan(("smoke", "edge"))
    large = {case.id for case in cases if rounds.is_large(case)}
    one, twin = ZOO["tl_row_0"].kernel, CONTROLS["tl_control"]
    names = tuple(f"{OPERATOR}/{kernel.name}" for kernel in (one, twin))
    first, second, third = rounds.Round(), rounds.Round(survivors=names[:1]), rounds.Round(survivors=names, large=True)
    assert len(large) == 3 and all("F27-large" in name for name in large)
    assert not large & (first.takes(one, cases) | second.takes(one, cases) | first.takes(twin, cases))
    assert first.takes(twin, cases) == {case.id for case in cases} - large == first.takes(one, cases) | second.takes(
        one, cases)
    assert not second.takes(twin, cases) and third.takes(one, cases) == third.takes(twin, cases) == large
