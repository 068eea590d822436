"""Wrong options, modules and files: one line that says what is wrong and what is known, and pytest's exit code 4."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from suite_runs import OPERATOR, ROOT, Ran, run

KERNEL = "from conformance import kernel\n@kernel('moe_reduce_fused', name={name!r})\ndef f(x, out): pass\n"

WRONG_OPTIONS = [
    (("--kernels", "h_tilde"), ("unknown kernel 'h_tilde'", "Did you mean 'h_tiled'?", "Known: ", "vectorised")),
    (("--kernels", "my_kernel"), ("unknown kernel 'my_kernel'", "Known: ", "A module is found through PYTHONPATH")),
    (("--kernels=no/such.py",), ("--kernels no/such.py: there is no file", "no/such.py")),
    (("--operator", "moe_sorting", "--kernels", "h_tiled"), ("--kernels h_tiled", "none is a kernel of moe_sorting")),
    (("--tier", "ofical"), ("unknown tier 'ofical'", "Known: ", "official", "smoke")),
    (("--arch", "sm_1"), ("unknown architecture", "'sm_1'", "cpu")),
    (("--sizes", "huge"), ("--sizes 'huge'", "official, reduced")),
    (("--data", "fake"), ("--data 'fake'", "exact, real")),
    (("--operator", "gemm"), ("unknown operator 'gemm'", OPERATOR)),
    (("--case", "nonsense"), ("malformed case id 'nonsense'", "operator/[family/]key:value")),
    (("--case", f"{OPERATOR}/tokens:1"), ("no tier of", "holds the case", "conformance list")),
    (("--case-timeout=-1",), ("--case-timeout -1", "seconds from 0")),
    (("--case-timeout", "nan"), ("--case-timeout nan",)),
    (("--memory-limit", "plenty"), ("--memory-limit plenty", "24GB")),
    (("--kernels", ""), ("--kernels is empty", "leave the option out")),
    (("--kernels", ","), ("--kernels is empty",)),
    (("--kernels", "h_tiled,"), ("--kernels 'h_tiled,': a name is missing",)),
    (("--operator", ""), ("--operator is empty",)),
    (("--tier", ","), ("--tier is empty",)),
    (("--arch", ""), ("--arch is empty",)),
    (("--case", " "), ("--case is empty",)),
    (("--expectations=",), ("--expectations is empty",)),
    (("--resume=",), ("--resume is empty",)),
    (("--shard", "1/2", "--shard-costs="), ("--shard-costs is empty",)),
    (("--shard", ""), ("--shard : give I/N",)),
    (("--memory-limit", ""), ("--memory-limit : give a size",)),
]


def is_one_line(ran: Ran, *words: str) -> bool:
    """Exit code 4, one ERROR line with all ``words``, and nothing else."""
    lines = [line for line in ran.output.splitlines() if line.strip()]
    assert ran.code == 4, ran.output
    assert len(lines) == 1, ran.output
    assert lines[0].startswith("ERROR: ")
    for word in words:
        assert word in lines[0]
    return True


@pytest.mark.parametrize(("arguments", "words"), WRONG_OPTIONS, ids=[" ".join(given) for given, _ in WRONG_OPTIONS])
def test_options(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert is_one_line(run(tmp_path, *arguments), *words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_library", ("cannot be imported", "No module named 'no_such_library'")),
        ("x = (", ("cannot be imported", "SyntaxError")),
        ("import sys; sys.exit(3)", ("sys.exit(3) while it was imported",)),
        ("", ("defines no kernel", "@conformance.kernel")),
        (KERNEL.format(name="h_tiled"), ("two kernels of moe_reduce_fused are called 'h_tiled'", "another name=")),
    ],
    ids=["import", "syntax", "exit", "empty", "name taken"],
)
def test_modules(tmp_path: Path, source: str, words: tuple[str, ...]) -> None:
    (tmp_path / "wrong_module.py").write_text(source, encoding="utf-8")
    assert is_one_line(run(tmp_path, "--kernels", "wrong_module"), *words)


def test_a_report_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    assert is_one_line(run(tmp_path), "--report-dir: cannot write to ", "name another directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_report_directory_without_permission(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    assert is_one_line(run(tmp_path), "--report-dir: cannot write to ", "Permission denied")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a run needs of this checkout."""
    root = tmp_path / "checkout"
    for name in ("conformance", "references", "kernels", "matrices"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('operator = "', "operator = ", ("malformed TOML", "line")),
        ("default_tiers = [", 'default_tiers = ["nope", ', ("unknown tier", "'nope'", "official")),
        ("cover = 48", "coverage = 48", ("unknown key", "'coverage'", "cover")),
        (f'operator = "{OPERATOR}"', 'operator = "moe_sorting"', ("'moe_sorting'", "must be the file's name")),
    ],
    ids=["syntax", "tier", "key", "operator"],
)
def test_matrix_files(checkout: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    file = checkout / "matrices" / f"{OPERATOR}.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert is_one_line(run(tmp_path, root=checkout), file.name, *words)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_number_that_only_expanding_shows_to_be_wrong(checkout: Path, tmp_path: Path, workers: int) -> None:
    file = checkout / "matrices" / f"{OPERATOR}.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("cover = 48", "cover = -3", 1), encoding="utf-8")
    ran = run(tmp_path, "--operator", OPERATOR, "-n", str(workers), root=checkout)
    assert ran.code == 4, ran.output
    assert f"{file.name}: tier 'smoke': cover = -3: give a number from 1 to 1152" in ran.output
    assert "Traceback" not in ran.output and "INTERNALERROR" not in ran.output


def test_a_matrix_whose_operator_nobody_defines(checkout: Path, tmp_path: Path) -> None:
    text = (checkout / "matrices" / "moe_sorting.toml").read_text(encoding="utf-8")
    (checkout / "matrices" / "moe_new.toml").write_text(text.replace('"moe_sorting"', '"moe_new"'), encoding="utf-8")
    ran = run(tmp_path, "--tier", "smoke", "--kernels", "vectorised", "-n", "0", root=checkout)
    assert ran.code == 4, ran.output
    assert "unknown operator 'moe_new'. " in ran.output and "Traceback" not in ran.output
