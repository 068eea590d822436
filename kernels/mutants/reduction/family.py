"""What the mutants of moe_reduction have in common: their sources and their twin."""

from __future__ import annotations

from conformance.mutants import Shown
from kernels.mutants.edit import Edit
from kernels.mutants.family import Family

FAMILY = Family("moe_reduction", __name__.rpartition(".")[0], "kernels.moe_reduction", "reduction_torch",
                "reduction_tiled")


def only(*dtypes: str) -> Shown:
    """``shown_on`` for these dtypes."""
    return lambda params: params["in"] in dtypes


def wrong(name: str, fault: str, what: str, diagnosis: str, *edits: Edit, dtypes: tuple[str, ...] = ("bf16",)) -> None:
    """Register a mutant of the PyTorch kernel, shown on these dtypes."""
    FAMILY.wrong(name, fault, what, diagnosis, *edits, shown_on=only(*dtypes))


FAMILY.register_twin()
