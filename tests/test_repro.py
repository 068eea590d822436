"""Repeating one case: the pytest line, and the Python file that shows the mismatch on its own."""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance import environment
from conformance.cases import options
from conformance.commands import cli, lookup, repro
from conformance.errors import ConformanceError
from conformance.launching.snapshot import checksum
from conformance.operator import Shared
from conformance.registry import ROOT, matrix, operator
from conformance.result import Settings

OPERATOR = "moe_reduce_fused"
TINY = f"{OPERATOR}/model:tiny-tokens:32-topk:2-hidden:256-weights:yes-in:bf16-out:bf16-xsf:no"
ON_CPU = ("--arch", "cpu", "--sizes", "reduced")
MODULE = "kernels_of_the_repro_test"
SOURCE = '''
from conformance import kernel
from references.moe_reduce_fused import golden

@kernel("moe_reduce_fused", promise="bit-exact")
def one_wrong(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    out.copy_(golden(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
    out[3, 17] = 7.5

@kernel("moe_reduce_fused", promise="bit-exact")
def right(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    out.copy_(golden(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))

@kernel("moe_reduce_fused", promise="bit-exact")
def raises(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    raise RuntimeError("out of ideas")

@kernel("moe_reduce_fused", promise="bit-exact", supports=lambda params: "only fp32")
def picky(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    raise AssertionError("was called")

@kernel("moe_reduce_fused", promise="bit-exact")
def wrong_form(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None):
    return golden(x, token_topk_to_pos, topk_weights, x_sf, sf, x.dtype)[1:]
'''


@pytest.fixture
def own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of kernels outside the checkout; what it registers is forgotten afterwards."""
    registry = importlib.import_module("conformance.decorator")._REGISTRY
    before = dict(registry)
    (tmp_path / f"{MODULE}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield MODULE
    sys.modules.pop(MODULE, None)
    registry.clear()
    registry.update(before)


def run_file(file: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of the written file, run in this process."""
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    code: int = runpy.run_path(str(file))["main"]()
    return code


def write(capsys: pytest.CaptureFixture[str], file: Path, module: str, name: str) -> str:
    code = cli.main(["repro", TINY, "--kernels", module, "--kernel", name, "--write", str(file), *ON_CPU])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


# ---- the pytest line ----------------------------------------------------------------------------------------------


def test_repro_prints_one_line_and_nothing_else(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["repro", TINY, "--kernel", "vectorised", *ON_CPU]) == 0
    out, err = capsys.readouterr()
    line = f"-m pytest --case '{TINY}' --kernels vectorised --sizes reduced --arch cpu\n"
    assert out == f"{environment.python_here()} {line}"
    assert err == ""


def test_the_line_works_where_no_pytest_is_on_the_path(tmp_path):
    here = os.environ | {"PATH": "/usr/bin:/bin"}
    told = subprocess.run([sys.executable, "-m", "conformance", "repro", TINY, "--kernel", "vectorised", *ON_CPU],
                          cwd=ROOT, env=here, capture_output=True, text=True, check=True)
    again = subprocess.run(f"{told.stdout.strip()} --collect-only -q -p no:cacheprovider", shell=True, cwd=ROOT,
                           env=here, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"vectorised[{TINY.partition('/')[2]}]" in again.stdout


def test_the_shortest_name_of_this_python(monkeypatch, tmp_path):
    for own, path, name in (
        (tmp_path / "bin" / "python", tmp_path / "bin", "python"),
        (tmp_path / "bin" / "python", tmp_path / "other", shlex.quote(str(tmp_path / "bin" / "python"))),
        (ROOT / ".venv" / "bin" / "python", tmp_path / "bin", ".venv/bin/python"),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").touch(0o755)
        monkeypatch.setattr(sys, "executable", str(own))
        monkeypatch.setenv("PATH", str(path))
        assert environment.python_here.__wrapped__() == name


def test_without_a_kernel_the_line_reruns_all(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["repro", TINY, *ON_CPU]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert {"h_tiled", "per_token", "vectorised"} <= set(words[words.index("--kernels") + 1].split(","))


def test_a_node_id_brings_its_kernel(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = TINY.partition("/")[2]
    assert cli.main(["repro", f"matrices/{OPERATOR}.toml::vectorised[{name}]", *ON_CPU]) == 0
    assert f"--case '{TINY}' --kernels vectorised " in capsys.readouterr().out


def test_exact_data_becomes_part_of_the_case(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in ((TINY, "--data", "exact"), (f"{TINY}-data:exact",)):
        assert cli.main(["repro", *words, "--kernel", "vectorised", *ON_CPU]) == 0
        assert f"--case '{TINY}-data:exact' " in capsys.readouterr().out


def test_parameters_in_another_order_are_the_same_case_with_the_same_seed():
    operator_name, _, point = TINY.partition("/")
    shuffled = f"{operator_name}/{'-'.join(reversed(point.split('-')))}"
    assert lookup.find_case(shuffled).case.seed == lookup.find_case(TINY).case.seed


def test_a_case_that_does_not_run_here_is_said_on_stderr(capsys):
    case = next(case for case in matrix(OPERATOR).cases("edge") if matrix(OPERATOR).devices(case) == ("cuda",))
    assert cli.main(["repro", case.id, "--kernel", "vectorised", *ON_CPU]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert f"note: vectorised does not run this case here: {case.family} needs cuda" in err


def test_the_line_works_from_anywhere_for_a_kernel_from_elsewhere(capsys, own_kernels, tmp_path, monkeypatch):
    """One kernel of a module that holds several: only that item runs, and fails as it should."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["repro", TINY, "--kernels", own_kernels, "--kernel", "one_wrong", *ON_CPU]) == 0
    line = capsys.readouterr().out.strip()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        f"{line} -p no:cacheprovider --report-dir={tmp_path}", shell=True, cwd=tmp_path,
        env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout and "[3, 17]" in done.stdout
    assert "passed" not in done.stdout


# ---- the file -----------------------------------------------------------------------------------------------------


def test_the_file_of_a_wrong_kernel_shows_the_element_and_ends_with_1(capsys, own_kernels, tmp_path):
    file = tmp_path / "elsewhere" / "one_wrong.py"
    file.parent.mkdir()
    write(capsys, file, own_kernels, "one_wrong")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=file.parent, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 8192 elements differ from the golden" in done.stdout
    assert "in 1 of 32 rows: 3\n" in done.stdout and "in 1 of 256 columns: 17\n" in done.stdout
    shown = next(line for line in done.stdout.splitlines() if line.strip().startswith("[3, 17]"))
    assert shown.split()[3] == "7.5" and shown.endswith("0x40f0")  # 7.5 in bf16
    assert "fail [bits]" in done.stdout or "fail [budget]" in done.stdout
    assert "WARNING" not in done.stdout


def test_the_file_of_a_right_kernel_ends_with_0(capsys, own_kernels, tmp_path, monkeypatch):
    write(capsys, tmp_path / "right.py", own_kernels, "right")
    assert run_file(tmp_path / "right.py", monkeypatch) == 0
    out = capsys.readouterr().out
    assert "all 8192 elements equal the golden, bit for bit" in out
    assert "verdict of the suite: pass" in out
    assert TINY in out


def test_a_difference_within_the_promise_is_shown_and_ends_with_0(capsys, tmp_path, monkeypatch):
    case = TINY.replace("in:bf16-out:bf16", "in:fp16-out:fp16")
    file = tmp_path / "vectorised.py"
    assert cli.main(["repro", case, "--kernel", "vectorised", "--write", str(file), *ON_CPU]) == 0
    assert run_file(file, monkeypatch, "--show", "1") == 0
    assert "promised within-budget" in capsys.readouterr().out


def test_a_raising_kernel_ends_with_1_and_its_trace(capsys, own_kernels, tmp_path, monkeypatch):
    write(capsys, tmp_path / "raises.py", own_kernels, "raises")
    assert run_file(tmp_path / "raises.py", monkeypatch) == 1
    out = capsys.readouterr().out
    assert "raised RuntimeError: out of ideas" in out and "Traceback" in out


def test_a_result_of_a_wrong_form_ends_with_1(capsys, own_kernels, tmp_path, monkeypatch):
    write(capsys, tmp_path / "form.py", own_kernels, "wrong_form")
    assert run_file(tmp_path / "form.py", monkeypatch) == 1
    assert "the form is wrong: shape is (31, 256), (32, 256) is required" in capsys.readouterr().out


def test_a_case_that_the_kernel_does_not_take_ends_with_2(capsys, own_kernels, tmp_path, monkeypatch):
    write(capsys, tmp_path / "picky.py", own_kernels, "picky")
    assert run_file(tmp_path / "picky.py", monkeypatch) == 2
    assert "cannot run here: not supported by picky: only fp32" in capsys.readouterr().err


def test_a_missing_checkout_is_one_line(capsys, own_kernels, tmp_path):
    file = tmp_path / "right.py"
    write(capsys, file, own_kernels, "right")
    done = subprocess.run(
        [sys.executable, "-I", str(file), "--checkout", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no conformance suite in") and done.stderr.count("\n") == 1


def test_the_file_notices_other_inputs(capsys, own_kernels, tmp_path, monkeypatch):
    file = tmp_path / "right.py"
    write(capsys, file, own_kernels, "right")
    call = operator(OPERATOR).inputs(lookup.find_case(TINY).case, "reduced", torch.device("cpu"), Shared())
    call.set_poison(1)
    text, sum_of_x = file.read_text(encoding="utf-8"), checksum(call.arguments["x"])
    assert f"{{'x': {sum_of_x}, " in text
    file.write_text(text.replace(f"'x': {sum_of_x}", f"'x': {sum_of_x + 1}"), encoding="utf-8")
    run_file(file, monkeypatch)
    assert "WARNING: these are not the inputs" in capsys.readouterr().out


def test_an_earlier_file_is_replaced_and_any_other_is_left_alone(capsys, own_kernels, tmp_path):
    file = tmp_path / "right.py"
    write(capsys, file, own_kernels, "raises")
    write(capsys, file, own_kernels, "right")
    assert "KERNEL = 'right'" in file.read_text(encoding="utf-8")
    mine = tmp_path / "mine.py"
    mine.write_text("print('mine')\n", encoding="utf-8")
    assert cli.main(["repro", TINY, "--kernel", "vectorised", "--write", str(mine), *ON_CPU]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert mine.read_text(encoding="utf-8") == "print('mine')\n"


def test_what_cannot_be_written_or_is_ambiguous_is_one_line(capsys, tmp_path):
    for words, sentence in (
        (("--write", str(tmp_path / "file.py")), "give --kernel NAME"),
        (("--kernel", "vectorised", "--write", str(tmp_path / "none" / "file.py")), "No such file or directory"),
        (("--kernels", "h_tiled", "--kernel", "vectorised"), "unknown kernel 'vectorised'"),
    ):
        assert cli.main(["repro", TINY, *words, *ON_CPU]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        assert sentence in err


def test_inputs_are_not_built_where_that_is_slow_or_impossible(own_kernels):
    record = lookup.find_kernels(OPERATOR, (own_kernels,), "picky")[0]
    case = lookup.find_case(TINY).case
    for sizes in ("official", "reduced"):
        assert "CHECKSUMS: dict[str, int] | None = None" in repro.file_text(case, record, Settings("cpu", sizes, "cpu"))


def test_several_architectures_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(repro, "settings_of", lambda _: [Settings("cuda", "official", "sm_90"), Settings()])
    with pytest.raises(ConformanceError, match="one architecture"):
        repro.repro(TINY, options.selected(cli._parser().parse_args(["repro", TINY])), "vectorised", None)
