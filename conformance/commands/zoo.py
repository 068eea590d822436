"""``conformance zoo``: run tiers on all mutants and their twins through pytest, and read the kill matrices off it.

Everything is written below one directory of its own; the reports of ordinary runs are not touched.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.cases.options import Selection
from conformance.cases.rounds import CASE_SECONDS, FEW, Round, is_large
from conformance.console import print_table
from conformance.environment import ABSENT, chosen_archs
from conformance.errors import ConformanceError
from conformance.mutants import Mutant, controls, is_shown, mutants
from conformance.registry import MUTANTS, ROOT, kernels, matrix
from conformance.zoo.assembled import assembled
from conformance.zoo.kill_matrix import KillMatrix, Row, collect, matrix_of
from conformance.zoo.runs import run
from conformance.zoo.scope import claimed

TIERS = ("smoke", "edge")


def zoo(selection: Selection, given: Path | None, complete: bool = False) -> bool:
    """Run, print the kill tables, last "killed N/N"; True when all mutants are killed and no control is flagged.

    complete: every mutant on every case that shows it, not only until it is killed. Raises ConformanceError for an
    operator without mutants, a folder ``given`` that holds a zoo of another scope, and when pytest could not run.
    """
    started = time.monotonic()
    selection = dataclasses.replace(selection, tiers=selection.tiers or TIERS)
    wanted = [of.operator for of in selection.matrices()]
    for name in wanted:
        kernels(name, (MUTANTS,))  # imports and registers them
    chosen = [name for name in wanted if mutants(name)]
    if not chosen or (selection.operators and set(chosen) != set(selection.operators)):
        raise ConformanceError(f"{', '.join(selection.operators or wanted)}: no mutants in {MUTANTS}")
    out = given or ROOT / "reports" / "zoo"
    (arch, device), *more = chosen_archs(selection.archs).items()
    if more:
        raise ConformanceError(f"--arch {','.join(selection.archs)}: the zoo runs on one architecture at a time")
    scope = {"operators": chosen, "tiers": list(selection.tiers), "data": selection.data,
             "sizes": selection.sizes or "usual", "arch": arch, "complete": complete}
    folder = out / arch if device == ABSENT else out
    with claimed(folder, scope, replaces=given is None):
        if device == ABSENT:
            return assembled(chosen, selection, folder)
        matrices = _matrices(chosen, selection, folder, complete)
        for one in matrices:
            _print(one)
            _write(one, folder / one.operator)
    _print_sums(matrices, time.monotonic() - started)
    return all(one.sound for one in matrices)


def _matrices(chosen: Sequence[str], selection: Selection, out: Path, complete: bool) -> list[KillMatrix]:
    """All rounds, or the one complete one, of all operators together."""
    if complete:
        arch, results = _run(chosen, selection, out / "complete", None)
        return [_matrix(name, selection, arch, results, complete) for name in chosen]
    arch, results = _run(chosen, selection, out / "round-1", Round())
    for number in (2, 3):
        large = number == 3
        alive = [(name, one) for name in chosen for one in _alive(name, arch, results)]
        if large:
            alive = [(name, one) for name, one in alive if _has_large(name, selection, arch, one)]
        if alive:
            labels = tuple(f"{name}/{one.name}" for name, one in alive)
            print(f"round {number}, {'the large cases' if large else 'all other cases'} of {len(labels)} mutants: "
                  f"{', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}", flush=True)
            also = tuple(dict.fromkeys(f"{name}/{one.twin}" for name, one in alive)) if large else ()
            results += _run(sorted({name for name, _ in alive}), selection, out / f"round-{number}",
                            Round(survivors=labels + also, large=large))[1]
    return [_matrix(name, selection, arch, results, complete) for name in chosen]


def _here(name: str, arch: str) -> dict[str, Mutant]:
    """The mutants of kernels for this kind of device."""
    return {key: one for key, one in mutants(name).items() if _device(arch) in one.kernel.devices}


def _device(arch: str) -> str:
    return "cpu" if arch == "cpu" else "cuda"


def _alive(name: str, arch: str, results: Sequence[Any]) -> list[Mutant]:
    """The mutants that nothing has killed yet."""
    here = _here(name, arch)
    found = collect(results, name, here, controls(name))
    return [one for key, one in here.items() if not found[key].cases]


def _has_large(name: str, selection: Selection, arch: str, one: Mutant) -> bool:
    of = matrix(name)
    return any(is_large(case) and _device(arch) in of.devices(case) and is_shown(one.kernel, case.params)
               for case in selection.cases_of(of))


def _matrix(name: str, selection: Selection, arch: str, results: Sequence[Any], complete: bool) -> KillMatrix:
    known, twins, cases = _here(name, arch), controls(name), selection.cases_of(matrix(name))
    shown = {key: sum(is_shown(one.kernel, case.params) for case in cases) for key, one in known.items()}
    found = collect(results, name, known, twins)
    return matrix_of(found, known, twins, shown, operator=name, arch=arch, tiers=selection.tiers, data=selection.data,
                     complete=complete, elsewhere=tuple(key for key in mutants(name) if key not in known))


def _run(names: Sequence[str], selection: Selection, directory: Path, this: Round | None) -> tuple[str, list[Any]]:
    """One pytest run over all mutants of these operators: the architecture, and the results."""
    count = sum(len(mutants(name)) for name in names)
    print(f"{', '.join(names)}: {count} mutants; log: {directory / 'pytest.txt'}", flush=True)
    return run(names, selection, directory, this, MUTANTS)


def _write(result: KillMatrix, directory: Path) -> None:
    """JSON and HTML page; the reports folder is found by name, as pytest's plugin does."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "kill-matrix.json"
    path.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    try:
        page = str(importlib.import_module("reports.zoo").write_zoo(path))
    except ImportError as error:
        page = f"cannot be made here: {error} (pip install jinja2)"
    print(f"kill matrix: {path}\npage: {page}")


def _print(result: KillMatrix) -> None:
    rows = [(row.name, row.fault, _state(row),
             f"{row.failed}/{row.executed}", " ".join(row.checks), next(iter(row.causes), "-"),
             {True: "yes", False: "NO", None: "-"}[row.diagnosed], "yes" if row.differs_on else "NO")
            for row in result.rows]
    print_table(("mutant", "fault", "state", "cases", "checks that kill it", "diagnosis", "right", "applied"), rows,
                f"{result.operator} on {result.arch}, tiers {', '.join(result.tiers)}, data {result.data}, "
                f"{result.seconds:.0f} s of all processes")
    print_table(("control", "cases", "flagged", "first"),
                [(name, *facts) for name, facts in result.controls.items()])
    print_table(("check", "mutants killed by it"), result.checks.items())
    if result.idle:
        print(f"checks that kill no mutant: {', '.join(result.idle)}")
    if result.elsewhere:
        print(f"not for this device: {', '.join(result.elsewhere)}")
    print("diagnosed right: {}/{}".format(*_diagnosed([result])))


def _state(row: Row) -> str:
    if row.killed:
        return "killed"
    return "not decided (timeout)" if row.undecided else "SURVIVED" if row.executed else "not run"


def _diagnosed(matrices: Sequence[KillMatrix]) -> tuple[int, int]:
    """(mutants with the right first sentence, those that were diagnosed at all)."""
    told = [row.diagnosed for one in matrices for row in one.rows if row.diagnosed is not None]
    return sum(told), len(told)


def _print_sums(matrices: Sequence[KillMatrix], seconds: float) -> None:
    rows = [(one.operator, f"{one.killed}/{len(one.rows)}", "{}/{}".format(*_diagnosed([one])),
             f"{len(one.flagged)}/{len(one.controls)}", one.executed, one.not_needed, f"{one.seconds:.0f}")
            for one in matrices]
    print_table(("operator", "killed", "diagnosed right", "controls flagged", "cases of mutants", "not needed",
                 "seconds"), rows)
    if any(one.not_needed for one in matrices):
        print(f"A killed mutant's cases beyond the first {FEW} were not run: kills are of at least that many. "
              "--complete runs all.")
    if flagged := [f"{one.operator}/{name}" for one in matrices for name in one.flagged]:
        print(f"controls flagged: {', '.join(flagged)}")
    if undecided := [f"{one.operator}/{name}" for one in matrices for name in one.undecided]:
        print(f"not decided (timeout): {', '.join(undecided)}: each was ended by the time limit of {CASE_SECONDS:g} s, "
              "and its right twin was not seen to be quick on the same case; run the zoo again on an idle machine")
    if unseen := [f"{one.operator}/{row.name}" for one in matrices for row in one.rows
                 if not row.differs_on and row.name not in one.undecided]:
        print(f"not seen to differ from their twins: {', '.join(unseen)}")
    print(f"{seconds:.0f} s")
    print(f"killed {sum(one.killed for one in matrices)}/{sum(len(one.rows) for one in matrices)}")
