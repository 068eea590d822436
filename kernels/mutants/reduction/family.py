"""What the mutants of moe_reduction have in common: their sources and their twin."""

from __future__ import annotations

from conformance.zoo.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit, Source, edited

OPERATOR = "moe_reduction"
PACKAGE = __name__.rpartition(".")[0]
_OF = "kernels.moe_reduction."
TWIN = "torch_control"


def torch_source(name: str, *edits: Edit) -> Source:
    """The PyTorch kernel with the edits made."""
    module = f"{_OF}reduction_torch"
    return edited(PACKAGE, name, (module,), {module: edits})[OPERATOR]


def tilelang_source(name: str, *edits: Edit) -> Source:
    """The TileLang kernel with its template edited; programs are labelled by ``name``."""
    label = ('return f"reduction_tiled[', f'return f"{name}[')
    modules = (f"{_OF}template", f"{_OF}reduction_tiled")
    return edited(PACKAGE, name, modules, {modules[0]: (label, *edits)})[OPERATOR]


def only(*dtypes: str) -> Shown:
    """``shown_on`` for these dtypes."""
    return lambda params: params["in"] in dtypes


def wrong(name: str, fault: str, what: str, diagnosis: str, *edits: Edit, dtypes: tuple[str, ...] = ("bf16",)) -> None:
    """Register a mutant of the PyTorch kernel; ``diagnosis`` holds one or more keys, separated by spaces."""
    source = torch_source(name, *edits)
    mutant(OPERATOR, name, source.function, fault=fault, wrong=what, twin=TWIN, diagnosis=tuple(diagnosis.split()),
           shown_on=only(*dtypes), **source.options)


_source = torch_source(TWIN)
control(OPERATOR, TWIN, _source.function, "the unedited PyTorch kernel", **_source.options)
