"""Where the zoo looks for what a pytest run over mutants has recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from conformance.cases.options import Selection
from conformance.cases.rounds import Round
from conformance.errors import ConformanceError
from conformance.zoo import runs
from conformance.zoo.scope import NAME, claimed


def test_records_of_another_architecture_in_the_same_folder_are_no_records_of_the_run(tmp_path, monkeypatch):
    """As after a zoo on the CPU of a machine whose GPU had one: both write below reports/zoo."""

    def pytest_run(command: list[str], **options: object) -> SimpleNamespace:
        assert command[0] == sys.executable
        (tmp_path / "cpu.jsonl").write_text('{"type": "result", "kernel": "here"}\n{"type": "end"}\n')
        return SimpleNamespace(returncode=1)

    (tmp_path / "sm_90.jsonl").write_text('{"type": "result", "kernel": "elsewhere"}\n')
    monkeypatch.setattr(subprocess, "run", pytest_run)
    arch, results = runs.run(["moe_reduction"], Selection(archs=("cpu",)), Path(tmp_path), Round(), "a")
    assert arch == "cpu"
    assert [result["kernel"] for result in results] == ["here"]


@pytest.mark.parametrize("code", [0, 1])
def test_records_that_lay_there_before_are_not_of_the_run(code, tmp_path, monkeypatch):
    """As when pytest ends without a record: another zoo's, or somebody's own run, in the folder that --out names."""

    def pytest_run(command: list[str], *, stdout: TextIO, **options: object) -> SimpleNamespace:
        stdout.write("no tests ran\n")
        return SimpleNamespace(returncode=code)

    (tmp_path / "cpu.jsonl").write_text('{"type": "result", "kernel": "stale"}\n{"type": "end"}\n')
    monkeypatch.setattr(subprocess, "run", pytest_run)
    with pytest.raises(ConformanceError, match=f"pytest ended with {code}, without records, .*: no tests ran"):
        runs.run(["moe_reduction"], Selection(archs=("cpu",)), Path(tmp_path), Round(), "a")


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "cpu.jsonl").mkdir()
    for folder in (tmp_path, tmp_path / "cpu.jsonl" / "file" / "round-1"):
        (tmp_path / "cpu.jsonl" / "file").touch()
        with pytest.raises(ConformanceError, match="cannot be written to"):
            runs.run(["moe_reduction"], Selection(archs=("cpu",)), folder, Round(), "a")


SCOPE = {"operators": ["moe_sorting"], "tiers": ["smoke"], "data": "real", "sizes": "usual", "arch": "cpu",
         "complete": False}


def test_a_folder_holds_the_zoo_of_one_scope(tmp_path):
    with claimed(tmp_path, SCOPE, replaces=False):
        for name in ("round-2", "moe_sorting", "mine"):
            (tmp_path / name).mkdir()
    other = SCOPE | {"operators": ["moe_reduction"], "tiers": ["smoke", "edge"]}
    words = "holds another zoo (operators moe_sorting there, moe_reduction here, tiers smoke there, smoke+edge here)"
    with pytest.raises(ConformanceError, match=re.escape(f"--out {tmp_path}: {words}: name another folder")), \
            claimed(tmp_path, other, replaces=False):
        raise AssertionError("it was refused")
    assert (tmp_path / "round-2").exists()
    with claimed(tmp_path, SCOPE, replaces=False):  # the same again: nothing of the earlier one is left
        assert {path.name for path in tmp_path.iterdir()} == {NAME, "mine"}
        (tmp_path / "moe_sorting").mkdir()
    with claimed(tmp_path, other, replaces=True):  # as in reports/zoo
        assert {path.name for path in tmp_path.iterdir()} == {NAME, "mine"}
        with pytest.raises(ConformanceError, match=r"another run is writing .*give --out=DIR"), \
                claimed(tmp_path, other, replaces=True):
            raise AssertionError("two zoos at once")


@pytest.mark.parametrize("content", ["garbage", "[1]", '{"operators": ["../mine"]}', "\x00"])
def test_what_is_no_zoos_folder_is_refused_and_nothing_else_is_deleted(content, tmp_path):
    (tmp_path / "mine").mkdir()
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / NAME).write_text(content)
    with pytest.raises(ConformanceError, match="holds another zoo"), claimed(folder, SCOPE, replaces=False):
        raise AssertionError("it was refused")
    with claimed(folder, SCOPE, replaces=True):
        assert (tmp_path / "mine").exists()


def test_an_error_of_the_zoo_itself_passes_through(tmp_path):
    with pytest.raises(BrokenPipeError), claimed(tmp_path, SCOPE, replaces=False):
        raise BrokenPipeError
