"""What the mutants of moe_sorting have in common: their sources and their twin."""

from __future__ import annotations

from conformance.zoo.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit, Source, edited

OPERATOR = "moe_sorting"
PACKAGE = __name__.rpartition(".")[0]
_OF = "kernels.sorting."
TWIN = "torch_control"


def torch_source(name: str, *edits: Edit) -> Source:
    """The PyTorch kernel with the edits made."""
    module = f"{_OF}sort_torch"
    return edited(PACKAGE, name, (module,), {module: edits})[OPERATOR]


def tilelang_source(name: str, *edits: Edit) -> Source:
    """The TileLang kernel with its template edited; programs are labelled by ``name``."""
    label = ('return f"sort_block[', f'return f"{name}[')
    modules = (f"{_OF}template", f"{_OF}sort_block")
    return edited(PACKAGE, name, modules, {modules[0]: (label, *edits)})[OPERATOR]


def having(**values: str) -> Shown:
    """``shown_on`` for cases that have one of some values, separated by spaces, of each parameter; one that a case
    leaves out is "plain"."""
    wanted = {name: text.split() for name, text in values.items()}
    return lambda params: all(params.get(name, "plain") in known for name, known in wanted.items())


def wrong(name: str, fault: str, what: str, diagnosis: str, *edits: Edit, shown_on: Shown | None = None) -> None:
    """Register a mutant of the PyTorch kernel; ``diagnosis`` holds one or more keys, separated by spaces."""
    source = torch_source(name, *edits)
    mutant(OPERATOR, name, source.function, fault=fault, wrong=what, twin=TWIN, diagnosis=tuple(diagnosis.split()),
           shown_on=shown_on, **source.options)


_source = torch_source(TWIN)
control(OPERATOR, TWIN, _source.function, "the unedited PyTorch kernel", **_source.options)
