"""Where the zoo looks for what a pytest run over mutants has recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from conformance.cases.options import Selection
from conformance.cases.rounds import Round
from conformance.zoo import runs


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
