"""The commands about the suite itself: whether it sees faults, and the outputs of its references as they are now."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from conformance.cases import options

OK, FAILED = 0, 1

_ZOO = """\
Runs tiers (default: smoke,edge) on kernels that are wrong on purpose and on their right twins, through pytest: each
mutant on a few cases that differ most, and on all others while it is alive; twins on all. Prints which check kills
which mutant and, last, "killed N/N". Records, logs, kill matrices (JSON) and their pages go below --out. With --arch of
an architecture that is not here, compiled mutants and twins are lowered and assembled for it: "assembled N/N, not run".
A DIR that holds a zoo of other operators, tiers, data, sizes or architecture is refused.
"""

_PIN = """\
Writes references/pins/OPERATOR.json: digests of the reference outputs of the smoke cases. A run in which one of them
comes out otherwise reports "oracle changed" and fails. Needed after a change of reference, inputs or smoke cases.
"""


def add_to(add: Callable[[str, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]) -> None:
    """Declare the commands with the command line's own ``add``."""
    pin = add("pin", "accept the reference outputs as they are now", _pin, _PIN)
    options.add_to_argparse(pin, but=tuple(o.flag for o in options.OPTIONS if o.flag != "--operator"))

    zoo = add("zoo", "prove that the suite sees faults: run the mutants", _zoo, _ZOO)
    zoo.add_argument("--out", metavar="DIR", type=Path,
                     help="where everything goes (default: reports/zoo, which each zoo replaces)")
    zoo.add_argument("--complete", action="store_true", help="every mutant on every case, killed or not")
    options.add_to_argparse(zoo, but=("--kernels", "--case", "--expectations"),
                            operator="only the mutants of this operator (several: comma-separated; default: all)",
                            tier="tiers to run (default: smoke,edge)",
                            arch="one architecture (default: the GPU here, if any, else cpu)")


def _pin(args: argparse.Namespace) -> int:
    from conformance.judging.pins import pin

    for of in options.selected(args).matrices():
        path, count, changed = pin(of.operator)
        print(f"{path}: {count} cases, {changed} of them changed")
    return OK


def _zoo(args: argparse.Namespace) -> int:
    from conformance.commands.zoo import zoo

    return OK if zoo(options.selected(args), args.out, args.complete) else FAILED
