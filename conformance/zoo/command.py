"""``conformance zoo``: run tiers on all mutants and their twins through pytest, and read the kill matrix off it.

Everything is written below one directory of its own; the reports of ordinary runs are not touched.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from conformance.console import print_table
from conformance.errors import ConformanceError
from conformance.matrix import Matrix
from conformance.options import Selection
from conformance.registry import MUTANTS, ROOT, kernels, matrix
from conformance.zoo.kill_matrix import FATAL, Killed, KillMatrix, collect, matrix_of, read_results
from conformance.zoo.mutants import Mutant, controls, mutants

TIERS = ("smoke", "edge")
_TRIES = 8
_CASE_SECONDS = 20  # what an endless kernel costs; right ones compile within it


def zoo(selection: Selection, out: Path | None) -> bool:
    """Run, print the kill tables, last "killed N/N"; True when all mutants are killed and no control is flagged.

    Raises ConformanceError for an operator without mutants, and when pytest could not run.
    """
    selection = dataclasses.replace(selection, tiers=selection.tiers or TIERS)
    wanted = [of.operator for of in selection.matrices()]
    for name in wanted:
        kernels(name, (MUTANTS,))  # imports and registers them
    chosen = [name for name in wanted if mutants(name)]
    if not chosen or (selection.operators and set(chosen) != set(selection.operators)):
        raise ConformanceError(f"{', '.join(selection.operators or wanted)}: no mutants in {MUTANTS}")
    matrices = [_run(name, selection, (out or ROOT / "reports" / "zoo") / name) for name in chosen]
    for one in matrices:
        _print(one)
    total, killed = sum(len(one.rows) for one in matrices), sum(one.killed for one in matrices)
    flagged = [name for one in matrices for name in one.flagged]
    if flagged:
        print(f"controls flagged: {', '.join(flagged)}")
    print(f"killed {killed}/{total}")
    return all(one.sound for one in matrices)


def _run(name: str, selection: Selection, directory: Path) -> KillMatrix:
    """One operator: pytest, then its records."""
    known, twins = mutants(name), controls(name)
    cases = len(selection.cases_of(matrix(name)))
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "pytest.txt"
    print(f"{name}: {len(known)} mutants and {len(twins)} controls on {cases} cases; log: {log}", flush=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(_command(name, selection, directory), cwd=ROOT, stdout=file, stderr=file, check=False,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (
                                  str(ROOT), os.environ.get("PYTHONPATH"))))}).returncode
    records = sorted(directory.glob("*.jsonl"))
    if code not in (0, 1) or len(records) != 1:
        tail = " / ".join(log.read_text(encoding="utf-8").strip().splitlines()[-3:])
        raise ConformanceError(f"pytest ended with {code} on the mutants of {name}: {tail}")
    found = collect(read_results(records[0]), (*known, *twins))
    result = matrix_of(
        found, known, twins, _applied(found, known, selection, matrix(name)), operator=name, arch=records[0].stem,
        tiers=selection.tiers, data=selection.data, seconds=round(time.monotonic() - started, 1),
    )
    (directory / "kill-matrix.json").write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    _page(directory)
    return result


def _command(name: str, selection: Selection, directory: Path) -> list[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
            "--operator", name, "--kernels", MUTANTS, "--tier", ",".join(selection.tiers), "--data", selection.data,
            f"--case-timeout={_CASE_SECONDS}", f"--report-dir={directory}"]
    if selection.sizes:
        line += ["--sizes", selection.sizes]
    return [*line, *(["--arch", ",".join(selection.archs)] if selection.archs else [])]


def _applied(found: Mapping[str, Killed], known: Mapping[str, Mutant], selection: Selection, of: Matrix
             ) -> dict[str, str]:
    """Mutant -> case on which it was seen to differ from its twin: a case that kills it, run again side by side."""
    import torch

    from conformance.zoo.applied import differs

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = selection.sizes or ("official" if device.type == "cuda" else "reduced")
    cases = {case.id: case for case in selection.cases_of(of)}
    proven: dict[str, str] = {}
    for name, mutant in known.items():
        twin = controls(of.operator)[mutant.twin]
        if set(found[name].checks) <= FATAL:  # not to be repeated in this process, and no more is to be shown
            proven[name] = next((case for case in found[name].cases if case not in found[mutant.twin].cases), "")
            continue
        killing = [cases[case] for case in found[name].cases if case in cases]
        # A fault that depends on chance or on earlier calls shows best where the launch itself repeats calls.
        killing.sort(key=lambda case: case.get("launch", "plain") == "plain")
        seen = (case.id for case in killing[:_TRIES] if differs(mutant.kernel, twin, case, sizes, device))
        proven[name] = next(seen, "")
    return proven


def _page(directory: Path) -> None:
    """The HTML page; the reports folder is found by name, as pytest's plugin does."""
    try:
        page = importlib.import_module("reports.zoo").write_zoo(directory / "kill-matrix.json")
    except ImportError as error:
        raise ConformanceError(f"the page cannot be made here: {error} (pip install jinja2)") from None
    print(f"kill matrix: {directory / 'kill-matrix.json'}\npage: {page}")


def _print(result: KillMatrix) -> None:
    rows = [(row.name, row.fault, "killed" if row.killed else "not run" if not row.executed else "SURVIVED",
             f"{row.failed}/{row.executed}", " ".join(row.checks), next(iter(row.causes), "-"),
             {True: "yes", False: "NO", None: "-"}[row.diagnosed], "yes" if row.differs_on else "NO")
            for row in result.rows]
    print_table(("mutant", "fault", "state", "cases", "checks that kill it", "diagnosis", "right", "applied"), rows,
                f"{result.operator} on {result.arch}, tiers {', '.join(result.tiers)}, data {result.data}, "
                f"{result.seconds:.0f} s")
    print_table(("control", "cases", "flagged", "first"),
                [(name, *facts) for name, facts in result.controls.items()])
    print_table(("check", "mutants killed by it"), result.checks.items())
    if result.idle:
        print(f"checks that kill no mutant: {', '.join(result.idle)}")
    diagnosed = [row.diagnosed for row in result.rows if row.diagnosed is not None]
    print(f"diagnosed right: {sum(diagnosed)}/{len(diagnosed)}")
