"""One pytest run over mutants and their twins: the engine of ordinary runs, with records in a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.cases.options import Selection
from conformance.cases.rounds import CASE_SECONDS, VARIABLE, Round
from conformance.devices.gpus import cores
from conformance.environment import chosen_archs
from conformance.errors import ConformanceError
from conformance.registry import ROOT
from conformance.zoo.kill_matrix import read_results

ASSEMBLE_SECONDS = 300.0  # of a case on an absent architecture, whose limit is that of a compiler


def run(names: Sequence[str], selection: Selection, directory: Path, this: Round | None, words: str,
        seconds: float = CASE_SECONDS) -> tuple[str, list[Any]]:
    """(architecture, results) of one pytest run over the kernels that ``words`` choose, of the operators ``names``.

    The selection has one architecture. this: the round that it is; None: all cases of every mutant. seconds: the time
    limit of a case. Raises ConformanceError when pytest could not run, or not to its end.
    """
    (arch,) = chosen_archs(selection.archs)  # another one's records may lie there, of an earlier zoo
    log, records = directory / "pytest.txt", directory / f"{arch}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        records.unlink(missing_ok=True)  # whoever wrote them: what is read afterwards is of this run
    except OSError as error:
        raise ConformanceError(f"{error.filename}: cannot be written to: {error.strerror}") from None
    told = {} if this is None else {VARIABLE: this.text()}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(line(names, selection, directory, words, seconds), cwd=ROOT, stdout=file, stderr=file,
                              check=False, env=os.environ | told | {"PYTHONPATH": path}).returncode
    if code not in (0, 1) or not records.exists():
        tail = " / ".join(log.read_text(encoding="utf-8").strip().splitlines()[-3:])
        how = f"{code}" if records.exists() else f"{code}, without records,"
        raise ConformanceError(f"pytest ended with {how} on the mutants of {', '.join(names)}: {tail}")
    return arch, list(read_results(records))


def _workers(selection: Selection) -> str:
    """On GPUs more processes than usual, one for two cores: cases are small, so that what takes time is launching."""
    return str(max(1, cores() // 2)) if "cuda" in chosen_archs(selection.archs).values() else "auto"


def line(names: Sequence[str], selection: Selection, directory: Path, words: str, seconds: float) -> list[str]:
    """The command of such a run."""
    found = [sys.executable, "-m", "pytest", "-q", "-n", _workers(selection),
             "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--operator", ",".join(names), "--kernels", words,
             "--tier", ",".join(selection.tiers), "--data", selection.data, "--tb=no",
             "--vacuity", "off",  # ordinary runs prove that cases can fail
             f"--case-timeout={seconds:g}", f"--report-dir={directory}"]
    if selection.sizes:
        found += ["--sizes", selection.sizes]
    return [*found, *(["--arch", ",".join(selection.archs)] if selection.archs else [])]
