"""Mutants of an operator that has a kernel in PyTorch and one in TileLang: their sources, and how they are registered.

`Family.wrong` makes mutants of the PyTorch kernel, which all have one twin, its unedited source.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit, Source, edited

TWIN = "torch_control"


@dataclass(frozen=True)
class Family:
    """``package``: where the mutants stand. ``of``: the package of the kernels, whose modules ``in_torch`` and
    ``in_tilelang`` are, beside the ``template`` of the latter."""

    operator: str
    package: str
    of: str
    in_torch: str
    in_tilelang: str

    def torch_source(self, name: str, *edits: Edit) -> Source:
        """The PyTorch kernel with the edits made."""
        module = f"{self.of}.{self.in_torch}"
        return edited(self.package, name, (module,), {module: edits})[self.operator]

    def tilelang_source(self, name: str, *edits: Edit) -> Source:
        """The TileLang kernel with its template edited; programs are labelled by ``name``."""
        label = (f'return f"{self.in_tilelang}[', f'return f"{name}[')
        modules = (f"{self.of}.template", f"{self.of}.{self.in_tilelang}")
        return edited(self.package, name, modules, {modules[0]: (label, *edits)})[self.operator]

    def wrong(self, name: str, fault: str, what: str, diagnosis: str, *edits: Edit, shown_on: Shown | None = None
              ) -> None:
        """Register a mutant of the PyTorch kernel; ``diagnosis`` holds one or more keys, separated by spaces."""
        source = self.torch_source(name, *edits)
        mutant(self.operator, name, source.function, fault=fault, wrong=what, twin=TWIN,
               diagnosis=tuple(diagnosis.split()), shown_on=shown_on, **source.options)

    def register_twin(self) -> None:
        source = self.torch_source(TWIN)
        control(self.operator, TWIN, source.function, "the unedited PyTorch kernel", **source.options)
