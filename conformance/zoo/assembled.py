"""The zoo for an architecture that is not here: its compiled mutants are lowered and assembled there, never run.

That shows that each is a program of the architecture: a mutant that does not compile proves nothing where it is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.cases.options import Selection
from conformance.cases.rounds import Round
from conformance.console import print_table
from conformance.errors import ConformanceError
from conformance.kernel import Kernel
from conformance.mutants import controls, mutants
from conformance.zoo.runs import ASSEMBLE_SECONDS, run

_FIGURES = ("registers", "spill_bytes", "shared_bytes")


@dataclass
class Programs:
    """What became of one kernel's programs. ``made``: configuration -> its figures, of those that the assembler took.
    ``wrong``: the first thing said of one that it did not take, or that got no further than being lowered."""

    made: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    wrong: str = ""

    @property
    def whole(self) -> bool:
        return bool(self.made) and not self.wrong


def assembled(chosen: Sequence[str], selection: Selection, out: Path) -> bool:
    """Lower and assemble the compiled mutants and twins of these operators for the one absent architecture that is
    selected; print what became of each, last "assembled N/N, not run"; True when all were taken.

    Raises ConformanceError where nothing is compiled, and when pytest could not run.
    """
    known = {(name, kernel.name): kernel for name in chosen for kernel in _compiled(name)}
    if not known:
        raise ConformanceError(f"{', '.join(chosen)}: no mutant is compiled, so none can be assembled")
    words = ",".join(sorted({kernel.module for kernel in known.values()}))
    operators = sorted({name for name, _ in known})
    print(f"{', '.join(operators)}: {len(known)} compiled mutants and twins; log: {out / 'pytest.txt'}", flush=True)
    arch, results = run(operators, selection, out, Round(), words, ASSEMBLE_SECONDS)
    found = gather(results, known)
    rows = [(*key, "assembled" if one.whole else "NOT ASSEMBLED", len(one.made),
             *(max((made.get(figure, 0) for made in one.made.values()), default=0) for figure in _FIGURES), one.wrong)
            for key, one in found.items()]
    print_table(("operator", "kernel", "state", "programs", "registers", "spills", "shared", "first problem"), rows,
                f"for {arch}, which is not here: assembled, not run")
    whole = sum(one.whole for one in found.values())
    print(f"{sum(len(one.made) for one in found.values())} programs for {arch}")
    print(f"assembled {whole}/{len(found)}, not run")
    return whole == len(found)


def _compiled(name: str) -> list[Kernel]:
    every = [*(one.kernel for one in mutants(name).values()), *controls(name).values()]
    return [kernel for kernel in every if kernel.lower is not None]


def gather(results: Iterable[Mapping[str, Any]], known: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Programs]:
    """By (operator, kernel), what the records say. Cases that are not meant for a kernel count for nothing."""
    found = {key: Programs() for key in known}
    for result in results:
        one = found.get((result["operator"], result["kernel"]))
        if one is None or result["state"] == "not-run":
            continue
        if result["state"] == "pass" and result["lane"] == "assemble":
            one.made[result["resources"]["config"]] = result["resources"]
        else:
            one.wrong = one.wrong or result["message"] or result["stopped"] or f"reached {result['lane']}"
    return found
