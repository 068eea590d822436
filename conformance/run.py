"""What one pytest process knows about its run: the selection, the architectures, and the judge of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.admission import Admission
from conformance.case import Case
from conformance.isolation import CrashLog
from conformance.judge import Judge, Result, Settings
from conformance.kernel import Kernel
from conformance.options import Selection
from conformance.registry import operator


@dataclass
class Run:
    """State of one process (worker, or the only one)."""

    selection: Selection
    archs: dict[str, str]
    case_timeout: float
    crash_log: CrashLog
    shared_dir: Path | None = None
    worker: tuple[int, int] = (0, 1)
    _judges: dict[str, Judge] = field(default_factory=dict)
    _admission: Admission | None = None

    def settings(self, arch: str) -> Settings:
        device = self.archs[arch]
        sizes = self.selection.sizes or ("official" if device == "cuda" else "reduced")
        return Settings(device=device, sizes=sizes, arch=arch)

    def judge_case(self, case: Case, kernel: Kernel, arch: str | None) -> Result:
        """Judge one case within its time limit, after memory for its group was granted.

        A case that runs out of device memory is tried again with room for twice its estimate.
        """
        arch = arch or next(iter(self.archs))
        judge = self._judge(arch)
        for attempt in (1, 2):
            self._admit(judge, case, attempt)
            result = self._timed(judge, case, kernel)
            if not (result.state == "error" and "out of memory" in result.message):
                break
        if judge.lost:
            self.crash_log.give_up(f"{result.message} (the GPU context is lost; later cases run in a fresh worker)")
        return result

    def _timed(self, judge: Judge, case: Case, kernel: Kernel) -> Result:
        self.crash_log.arm(self.case_timeout)
        try:
            return judge.run(case, kernel)
        finally:
            self.crash_log.disarm()

    def close(self) -> None:
        """Give memory back: a finished worker's process lives on until the whole run ends."""
        for judge in self._judges.values():
            judge.forget()
        if self._admission is not None:
            self._admission.release()

    def prepare(self, work: Iterable[tuple[Case, Kernel, str | None]]) -> None:
        """Compile ahead. Each worker starts at another place of the list, so that together they compile in
        parallel; a kernel's ``prepare`` skips what another worker is already compiling."""
        todo: dict[tuple[str, ...], tuple[Kernel, Case, str]] = {}
        for case, kernel, arch in work:
            device = self.archs[arch or next(iter(self.archs))]
            if kernel.prepare is None or device not in kernel.devices or (kernel.requires and kernel.requires(device)):
                continue
            signature = (kernel.name, device, *(case.get(key) for key in ("in", "out", "weights", "xsf", "hidden")))
            todo.setdefault(signature, (kernel, case, device))
        entries = list(todo.values())
        index, count = self.worker
        for kernel, case, device in _rotated(entries, index * len(entries) // max(1, count)):
            try:
                assert kernel.prepare is not None
                kernel.prepare(case.params, device)
            except Exception:
                continue

    def _judge(self, arch: str) -> Judge:
        if arch not in self._judges:
            self._judges[arch] = Judge(self.settings(arch))
        return self._judges[arch]

    def _admit(self, judge: Judge, case: Case, attempt: int) -> None:
        """Wait for device memory when the group changes, or when the last attempt ran out of it."""
        if judge.settings.device != "cuda" or self.shared_dir is None:
            return
        if self._admission is None:
            self._admission = Admission(self.shared_dir / "memory.json")
        if attempt > 1 or not judge.holds(case):
            judge.forget()
            self._admission.acquire(operator(case.operator).memory(case, judge.settings.sizes) * attempt)


def _rotated(entries: Sequence[tuple[Kernel, Case, str]], start: int) -> Sequence[tuple[Kernel, Case, str]]:
    return [*entries[start:], *entries[:start]]


def bind_gpu(index: int) -> None:
    """Give a worker one of the visible GPUs, by index *into* CUDA_VISIBLE_DEVICES; before torch starts CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        count = _gpu_count()
        names = [str(number) for number in range(count)]
    else:
        names = [name.strip() for name in given.split(",") if name.strip()]
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index % len(names)]


def _gpu_count() -> int:
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
