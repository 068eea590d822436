"""Proof that a mutation was applied: a case on which the mutant does something else than its unmutated twin."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.case import Case
from conformance.errors import KernelRaised
from conformance.formats import bits
from conformance.guards import checksum
from conformance.kernel import Kernel
from conformance.launch import Launcher
from conformance.operator import Shared
from conformance.registry import operator
from conformance.restore import process_kept


def differs(mutant: Kernel, twin: Kernel, case: Case, sizes: str, device: torch.device) -> bool:
    """Whether the two leave other bits, raise differently, overrun, or change their inputs differently."""
    return _trace(mutant, case, sizes, device) != _trace(twin, case, sizes, device)


def _trace(kernel: Kernel, case: Case, sizes: str, device: torch.device) -> list[object]:
    """What one kernel does with a case, launch by launch, as comparable facts."""
    contract, shared = operator(case.operator), Shared()
    call = contract.inputs(case, sizes, device, shared)
    launcher = Launcher(contract, kernel, call, sizes, device, shared)
    seen: list[object] = []
    with torch.no_grad(), process_kept():
        try:
            for launched in launcher.launch(case.get("launch", "plain")):
                seen.append(launched.overrun)
                for name, result in launched.results.items():
                    form = call.outputs.get(name)
                    same_form = form is not None and isinstance(result, Tensor) and result.dtype == form.dtype
                    seen.append(checksum(bits(result.contiguous()).clone()) if same_form else str(type(result)))
        except KernelRaised as raised:
            seen.append(type(raised.__cause__).__name__)
    call.set_poison(1)
    seen += [checksum(value) for value in call.arguments.values() if isinstance(value, Tensor)]
    return seen
