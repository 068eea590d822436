"""What the mutants of moe_sorting have in common: their sources and their twin."""

from __future__ import annotations

from conformance.mutants import Shown
from kernels.mutants.family import Family

FAMILY = Family("moe_sorting", __name__.rpartition(".")[0], "kernels.sorting", "sort_torch", "sort_block")


def having(**values: str) -> Shown:
    """``shown_on`` for cases that have one of some values, separated by spaces, of each parameter; one that a case
    leaves out is "plain"."""
    wanted = {name: text.split() for name, text in values.items()}
    return lambda params: all(params.get(name, "plain") in known for name, known in wanted.items())


FAMILY.register_twin()
wrong = FAMILY.wrong
