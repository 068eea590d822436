"""What a process asks for before it begins a group of cases, and what the group really took."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from conformance.case import Case
from conformance.devices.admission import Admission, Refused
from conformance.devices.memory import DeviceMemory, cuda_memory, family, host_memory, spelled
from conformance.environment import visible_gpus
from conformance.registry import matrix, operator
from conformance.result import Result, Settings


class Gate:
    """The admission of one process on one device. ``folder``: where the processes of a run meet, None = it is the only
    one. ``limit``: bytes that the run may take, None = what is free. ``workers``: how many processes judge."""

    def __init__(self, settings: Settings, folder: Path | None, limit: int | None, workers: int) -> None:
        self._settings = settings
        if settings.device == "cuda":
            self._memory: DeviceMemory = cuda_memory(limit)
            name = "-".join(visible_gpus())
        else:
            top = os.getppid() if folder else os.getpid()  # workers are started by the controller
            self._memory = host_memory(limit, lambda: family(top), workers if folder else 0)
            name = settings.device
        self._admission = Admission(folder / f"memory-{name}.json" if folder else None, self._memory)
        self._group: tuple[str, str] | None = None
        self._estimate = 0
        self._free = 0
        self._modules = 0

    def enter(self, case: Case, times: int = 1, alone: bool = False) -> Refused | None:
        """Wait for ``times`` the estimate of the case. Refused: the device has too little for it. ``alone``: no other
        process holds memory meanwhile."""
        self._group = case.operator, matrix(case.operator).group_of(case)
        self._estimate = times * self._estimate_of(case)
        refused = self._admission.acquire(self._estimate, case.operator, alone=alone)
        self._memory.restart()
        self._free = self._memory.free()
        self._modules = len(sys.modules)
        return refused

    def told(self, result: Result, case: Case) -> Result:
        """The result with the estimate of its case and the peak of its group so far; later estimates of the operator
        are corrected by it."""
        if self._group != (case.operator, matrix(case.operator).group_of(case)):
            return result
        self._estimate = max(self._estimate, self._estimate_of(case))
        peak = self._memory.peak()
        if len(sys.modules) == self._modules:  # what a process loads once is no case's
            self._admission.observe(self._estimate, case.operator, peak)
            return replace(result, memory={"estimate": self._estimate_of(case), "peak": peak})
        return result

    def explained(self, result: Result) -> Result:
        """The result of a case that ran out of memory although no other process held any: not run, where it had less
        than its estimate; else as it is."""
        if self._free >= self._estimate:
            return result
        message = f"needs {spelled(self._estimate)}, {spelled(self._free)} free; tried with that, it ran out of memory"
        return replace(result, state="not-run", kind="memory", level=None, message=message, trace=None)

    def release(self) -> None:
        self._admission.release()

    def _estimate_of(self, case: Case) -> int:
        return operator(case.operator).memory(case, self._settings.sizes)


def out_of_memory(result: Result) -> bool:
    """Whether the suite, or a kernel, asked for more memory than there was."""
    return result.state == "error" and "out of memory" in result.message
