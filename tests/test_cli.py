"""The command line: what each subcommand prints, and that a wrong name is one line and exit code 2."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conformance import console, decorator
from conformance.case import Case
from conformance.commands import cli, listing, shapes
from conformance.operator import Shared
from conformance.registry import ROOT, matrices, matrix, operator

OPERATOR = "moe_reduce_fused"
TINY = f"{OPERATOR}/model:tiny-tokens:32-topk:2-hidden:256-weights:yes-in:bf16-out:e4m3-xsf:no"


@functools.cache
def edge_cases() -> tuple[Case, ...]:
    return tuple(matrix(OPERATOR).cases("edge"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


# ---- list ---------------------------------------------------------------------------------------------------------


def test_list_shows_tiers_families_and_kernels(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    families = matrix(OPERATOR).families
    for word in (OPERATOR, "official", "1152", "upstream-full", "7584", *families, "vectorised", "within-budget"):
        assert word in out


def test_list_with_a_selection_prints_one_id_per_line(capsys):
    code, out, _ = run(capsys, "list", "--operator", OPERATOR, "--tier", "smoke")
    ids = out.splitlines()
    assert code == 0
    assert set(ids) == {case.id for case in matrix(OPERATOR).cases("smoke")}
    assert len(ids) == 48


def test_list_by_operator_prints_ids_of_the_default_tiers(capsys):
    of = matrix(OPERATOR)
    _, out, _ = run(capsys, "list", "--operator", OPERATOR)
    assert len(out.splitlines()) == len(of.plan(of.default_tiers))


@pytest.mark.parametrize(
    ("tier", "count"), [("official", 1152), ("full", 7489), ("benchmark", 144), ("smoke,benchmark", None)]
)
def test_count_is_one_integer(capsys, tier, count):
    _, out, _ = run(capsys, "list", "--operator", OPERATOR, "--tier", tier, "--count")
    assert int(out) == (count or len(matrix(OPERATOR).plan(tier.split(","))))


def test_the_contract_of_an_operator_says_what_a_kernel_has_to_know(capsys):
    for name in matrices():
        code, out, _ = run(capsys, "show", name)
        contract = operator(name)
        assert code == 0 and contract.contract.strip().splitlines()[0] in out
        words = " ".join(out.split())
        assert all(argument in words for argument in (*contract.arguments, *contract.policies))
        assert contract.budget in words
    assert "sum_s w[t, s] (w2[e]" in out or "grouped by expert" in out


def test_an_operator_without_the_tier_is_told(capsys):
    code, out, err = run(capsys, "list", "--tier", "full", "--count")
    assert code == 0
    assert f"{OPERATOR}: 7489\n" in out and "moe_sorting: 0\n" in out
    assert "moe_sorting: has no tier full, only official, smoke, masks, models, edge\n" in err
    assert f"{OPERATOR}: has no tier" not in err


def test_count_of_several_operators_names_them(capsys, monkeypatch):
    monkeypatch.setattr(listing, "_selected", lambda _: [(matrix(OPERATOR), [1, 2]), (_Named("other"), [3])])
    _, out, _ = run(capsys, "list", "--count")
    assert out == f"{OPERATOR}: 2\nother: 1\n"


class _Named:
    def __init__(self, operator: str) -> None:
        self.operator = operator


def test_json_holds_every_field_and_all_tiers_of_a_case(capsys):
    _, out, _ = run(capsys, "list", "--operator", OPERATOR, "--tier", "smoke", "--json")
    cases = json.loads(out)
    assert len(cases) == 48
    assert set(cases[0]) == {"id", "operator", "family", "params", "tiers", "variant", "group", "devices", "skip"}
    assert all({"official", "smoke", "full"} <= set(case["tiers"]) for case in cases)
    assert {case["variant"] for case in cases} == set(operator(OPERATOR).variants)


def test_json_of_exact_data_and_of_edge_cases(capsys):
    words = ("list", "--operator", OPERATOR, "--tier", "smoke,edge", "--data", "exact", "--json")
    cases = json.loads(run(capsys, *words)[1])
    assert all("data" in case["params"] for case in cases)
    assert {case["family"] for case in cases} == {None, *matrix(OPERATOR).families}
    assert {"official", "smoke"} <= set(cases[0]["tiers"])


def test_coverage_of_smoke_is_measured(capsys):
    code, out, _ = run(capsys, "list", "--operator", OPERATOR, "--coverage")
    figures = {line.split()[0]: line.split() for line in out.splitlines() if "-way" in line}
    assert code == 0
    assert figures["2-way"][3] == "100.0"
    assert float(figures["3-way"][3]) >= 93
    assert 0 < float(figures["4-way"][3]) < 100
    assert "compile configurations" in out


def test_coverage_of_official_by_itself_is_complete(capsys):
    _, out, _ = run(capsys, "list", "--operator", OPERATOR, "--coverage", "--tier", "official")
    assert out.count("100.0 %") == 3
    assert "16, of which 16 of the 16" in out


def test_no_share_is_rounded_up_to_100_percent():
    assert listing._percent(9999, 10000) == "99.9"
    assert listing._percent(7, 7) == "100.0"


@pytest.mark.parametrize("operator", sorted(matrices()))
def test_show_counts_slots_only_where_an_argument_marks_them(capsys, operator):
    case = matrix(operator).cases("smoke")[0]
    code, out, _ = run(capsys, "show", case.id, "--sizes", "reduced")
    assert code == 0
    assert all(name in out for name in ("at reduced sizes", "the result", "FLOPs"))
    slots = matrix(operator).slots
    assert ("valid slots" in out) == ("-1 = padding slot" in out) == bool(slots)
    assert bool(slots) == (operator == OPERATOR)


def test_listing_ids_and_counts_imports_no_torch():
    program = (
        "import sys; from conformance.commands.cli import main\n"
        "codes = [main(['list', '--tier', 'smoke', *more]) for more in ([], ['--count'], ['--coverage'])]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_causes_no_traceback():
    command = [sys.executable, "-m", "conformance", "list", "--operator", OPERATOR, "--tier", "full"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(OPERATOR)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == cli.NO_READER


# ---- show ---------------------------------------------------------------------------------------------------------


def test_show_tells_all_about_a_case(capsys):
    code, out, _ = run(capsys, "show", TINY, "--arch", "cpu")
    assert code == 0
    for word in ("fp8", "models", "[32, 256]", "e4m3", "at reduced sizes", "at official sizes"):
        assert word in out
    assert out.count("--kernels vectorised --sizes reduced --arch cpu") == 1
    assert out.count("valid slots  64 of 64") == 2
    assert "FLOPs        40960 " in out  # 2 T K H + T H


def test_show_of_a_kernel_that_does_not_say_whether_it_takes_the_case(capsys, tmp_path, monkeypatch):
    (tmp_path / "silent_kernels.py").write_text(
        "from conformance import kernel\n"
        f"@kernel('{OPERATOR}', name='says_true', supports=lambda params: True, requires=lambda device: None)\n"
        "def first(x, token_topk_to_pos, *, out, **rest): out.zero_()\n"
        f"@kernel('{OPERATOR}', name='says_nothing', supports=lambda: None, requires=lambda device: 1 / 0)\n"
        "def second(x, token_topk_to_pos, *, out, **rest): out.zero_()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(decorator, "_REGISTRY", dict(decorator._REGISTRY))
    given = "--kernels", "silent_kernels", "--arch", "cpu"
    code, out, err = run(capsys, "show", TINY, *given, "--sizes", "reduced")
    assert (code, err) == (0, "")
    assert "error: supports= of says_true returned True: return None where the case is taken" in out
    assert "error: requires= of says_nothing raised ZeroDivisionError" in out
    code, out, err = run(capsys, "repro", TINY, *given)
    assert code == 0 and "note: on says_true this case ends in an error: supports= of says_true returned True" in err
    code, out, _ = run(capsys, "list", "--kernels", "silent_kernels")
    assert code == 0 and "requires= of says_nothing raised ZeroDivisionError" in out


def test_show_gives_the_reason_and_source_of_an_edge_family(capsys):
    of = matrix(OPERATOR)
    case = next(case for case in edge_cases() if of.devices(case) == ("cuda",))
    _, out, _ = run(capsys, "show", case.id, "--arch", "cpu", "--sizes", "reduced")
    assert of.families[case.family].source in out
    assert f"not run: {case.family} needs cuda" in out
    assert "pytest --case" not in out
    assert "official sizes" not in out


@pytest.mark.parametrize("index", range(0, 389, 30))
def test_forms_without_memory_equal_the_real_ones(monkeypatch, index):
    # Of one or two tokens, x is smaller than the bands around the other tensors: no limit tells them apart.
    cases = [case for case in edge_cases() if case.family != "F27-large" and case.number("tokens") > 2]
    case, contract, device = cases[index % len(cases)], operator(OPERATOR), torch.device("cpu")
    real = contract.inputs(case, "reduced", device, Shared())
    x = real.arguments["x"]
    monkeypatch.setattr(shapes, "LIMIT", max(0, x.nbytes - 1))
    form = shapes.call_form(contract, case, "reduced", device)
    assert form.output == real.output
    assert contract.cost(form) == contract.cost(real)
    assert form.arguments["x"].is_meta == (x.numel() > 0)
    for name, value in real.arguments.items():
        other = form.arguments[name]
        assert (other is None) == (value is None)
        if value is not None:
            assert (other.shape, other.dtype, other.stride()) == (value.shape, value.dtype, value.stride())
            assert other.is_meta or torch.equal(other.view(torch.uint8), value.view(torch.uint8))


def test_the_form_of_two_to_the_31_elements_takes_no_memory():
    case = next(case for case in edge_cases() if case.family == "F27-large")
    call = shapes.call_form(operator(OPERATOR), case, "official", torch.device("cpu"))
    assert call.arguments["x"].is_meta
    assert call.arguments["x"].numel() > 1 << 31


# ---- report -------------------------------------------------------------------------------------------------------


def records(path: Path, state: str = "pass", end: bool = True, problems: tuple[str, ...] = ()) -> Path:
    lines = [
        {"type": "run", "schema": 1, "arch": "cpu", "kernels": {}, "planned": {"mine": 1}, "operators": [OPERATOR]},
        {"type": "result", "case": TINY, "kernel": "mine", "state": state, "params": {"tokens": "32"}, "tiers": []},
    ]
    if end:
        failed = int(state != "pass")
        lines.append({"type": "end", "counts": {state: 1}, "problems": list(problems), "exit": failed})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_report_writes_pages_and_prints_their_paths(capsys, tmp_path):
    code, out, err = run(capsys, "report", str(records(tmp_path / "cpu.jsonl")), "--out", str(tmp_path / "pages"))
    assert (code, err) == (0, "")
    assert [Path(line) for line in out.splitlines()] == [tmp_path / "pages" / "cpu.html", tmp_path / "pages" / "cpu.md"]
    assert all(Path(line).stat().st_size for line in out.splitlines())


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"state": "fail"}, "1 of 1 results failed"),
        ({"end": False}, "no end line"),
        ({"problems": ("mine executed nothing",)}, "mine executed nothing"),
    ],
)
def test_report_of_a_bad_run_is_made_and_ends_with_1(capsys, tmp_path, about, sentence):
    code, out, err = run(capsys, "report", str(records(tmp_path / "cpu.jsonl", **about)))
    assert code == 1
    assert sentence in err
    assert len(out.splitlines()) == 2


def test_report_of_no_record_file_is_one_line(capsys, tmp_path):
    for path in (tmp_path / "none.jsonl", Path(__file__), tmp_path):
        code, out, err = run(capsys, "report", str(path))
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {path}") and err.count("\n") == 1
    assert "a directory without record files" in err


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("list", "--operator", "moe_reduce"), "moe_reduce_fused"),
        (("list", "--tier", "oficial"), "Did you mean 'official'"),
        (("list", "--kernels", "vectorized"), "h_tiled"),
        (("list", "--arch", "sm_1"), "cpu"),
        (("list", "--sizes", "small"), "official, reduced"),
        (("list", "--case", "x"), "malformed case id"),
        (("show", f"other/{TINY}"), OPERATOR),
        (("show", "moe_gem1"), "Did you mean 'moe_gemm1'"),
        (("bench-diff", "docs", "docs"), "docs: a directory with no files of timings"),
        (("show", TINY.replace("hidden:256", "hidden:257")), "it has hidden:256"),
        (("show", f"{OPERATOR}/F00-none/tokens:1"), "F06-tokens"),
        (("show", f"tests/test_cli.py::{TINY}"), "node id of no case"),
        (("show", TINY, "--kernels", "nobody"), "vectorised"),
        (("list", "--count", "--json"), "not allowed with"),
        (("repro", TINY, "--kernel", "per_token", "--write", "f.py", "--minimise", "--within", "nan"), "--within nan"),
        (("repro", TINY, "--kernel", "per_token", "--write", "f.py", "--minimise", "--within", "-1"), "above 0"),
        (("expectations", "--update", "none.jsonl"), "none.jsonl: cannot be read: No such file"),
        (("expectations", "--update", "docs"), "docs: a directory without record files"),
        (("diff", "docs", "docs"), "docs: a directory without record files"),
        (("list", "--coun"), "python -m conformance --help"),
        (("list", "--kernels", ""), "--kernels is empty: give a value, or leave the option out"),
        (("list", "--kernels="), "--kernels is empty"),
        (("list", "--kernels", ","), "--kernels is empty"),
        (("list", "--operator", " , "), "--operator is empty"),
        (("list", "--tier", ",smoke"), "--tier ',smoke': a name is missing beside a comma"),
        (("list", "--arch", ","), "--arch is empty"),
        (("list", "--case", " "), "--case is empty"),
        (("list", "--expectations", ""), "--expectations is empty"),
        (("repro", TINY, "--kernel", ""), "--kernel is empty"),
        (("repro", ""), "an argument is empty"),
        (("expectations", "--rule-set", ""), "--rule-set is empty"),
        (("merge", "none.jsonl", "--allow", ","), "--allow is empty"),
        (("report", "none.jsonl", "--out="), "--out is empty"),
        (("zoo", "--expectations", "rules.toml"), "unrecognized arguments"),
        (("lst",), "'list'"),
        ((), "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_that_lists_what_is_known(capsys, words, known):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert known in err


def test_an_interrupt_ends_with_130(capsys, monkeypatch):
    def interrupted(_selection: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "print_overview", interrupted)
    assert run(capsys, "list")[0] == 130


@pytest.mark.parametrize("command", ["", "list", "show", "repro", "report"])
def test_help_ends_well(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "usage: python -m conformance" in capsys.readouterr().out


# ---- text ---------------------------------------------------------------------------------------------------------


def test_tables_are_plain_and_aligned_where_stdout_is_no_terminal(capsys):
    console.print_table(("name", "n"), [("[a]", 1), ("bb", 22)], "title")
    assert capsys.readouterr().out == "title\n  name   n\n  [a]    1\n  bb    22\n\n"


def test_tables_on_a_terminal_keep_brackets(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.print_table(("name",), [("[bold]",)])
    assert "[bold]" in capsys.readouterr().out


def test_a_terminal_without_rich_gets_plain_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    console.print_table(("name",), [("a",)])
    assert capsys.readouterr().out == "  name\n  a\n\n"


@pytest.mark.parametrize(
    ("count", "unit", "base", "text"),
    [(0, "B", 1024, "0 B"), (1023, "B", 1024, "1023 B"), (1536, "B", 1024, "1.5 KiB"), (2e9, "FLOP", 1000, "2.0 GFLOP"),
     (5e16, "B", 1000, "50000.0 TB"), (1500, "B", 1000, "1.5 kB")],
)
def test_amounts(count, unit, base, text):
    assert console.amount(count, unit, base) == text
