"""The controlling process: records results as they come, shows progress, names crashes, writes the reports."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.isolation import read_crash
from conformance.judge import blank_result
from conformance.plan import Planned, parse_nodeid
from conformance.recorder import Recorder, run_line
from conformance.registry import ROOT, kernels, operator
from conformance.run import Run

_PROGRESS_SECONDS = 5.0
_QUARANTINE = 10  # crashes of one kernel after which its remaining cases are not started any more
_GPU_WORKERS = 6


def workers_for(run: Run) -> int:
    """``-n auto``: all cores on the CPU; on GPUs a few processes each, which admission keeps within memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "cuda" not in run.archs.values():
        return cores
    import torch

    return max(1, min(cores, _GPU_WORKERS * torch.cuda.device_count()))


class Controller:
    """One per run. ``directory`` is where records and pages go; None = reports/, or reports/rerun for single cases."""

    def __init__(self, run: Run, directory: Path | None) -> None:
        self.run = run
        self.directory = directory or ROOT / "reports" / ("rerun" if run.selection.cases else "")
        self.recorders: dict[str, Recorder] = {}
        self.scheduler: Any = None
        self.terminal: Any = None
        self.pages: list[Path] = []
        self._crashes: Counter[str] = Counter()
        self._last_line = time.monotonic()
        self._started = time.monotonic()

    def start(self, nodeids: Sequence[str], workers: int) -> None:
        """Open one record file per architecture, once it is known what will run."""
        from conformance.environment import identity

        by_arch: dict[str, list[Planned]] = {}
        for planned in filter(None, map(parse_nodeid, nodeids)):
            by_arch.setdefault(planned.arch or next(iter(self.run.archs)), []).append(planned)
        for arch, entries in by_arch.items():
            names = list(dict.fromkeys(entry.case.operator for entry in entries))
            used = {entry.kernel for entry in entries}
            contracts = [operator(name) for name in names]
            described = {
                kernel.name: {"operator": name, "promise": kernel.promise, "module": kernel.module, "about": kernel.about}
                for name in names
                for kernel in kernels(name, self.run.selection.kernels)
                if kernel.name in used
            }
            from conformance.formats import FORMATS

            cases = [(self._with_tiers(entry), entry.kernel) for entry in entries]
            line = run_line(
                identity(arch), cases, described,
                operators=names, sizes=self.run.settings(arch).sizes, data=self.run.selection.data, workers=workers,
                tiers=sorted({tier for case, _ in cases for tier in case.tiers}),
                policies={c.name: dict(c.policies) for c in contracts},
                tolerances={c.name: {f.name: f.published for f in FORMATS.values()} for c in contracts},
                budget={c.name: c.budget for c in contracts},
            )
            self.recorders[arch] = Recorder(self.directory / f"{arch}.jsonl", line)
        self._started = time.monotonic()

    def _with_tiers(self, entry: Planned) -> Any:
        if not hasattr(self, "_tiers"):
            self._tiers = {case.id: case for of in self.run.selection.matrices() for case in self.run.selection.cases_of(of)}
        return self._tiers.get(entry.case.id, entry.case)

    def record(self, report: Any) -> None:
        """Write the result that travelled with a report, and the progress line when it is time."""
        result = getattr(report, "conformance", None)
        planned = parse_nodeid(report.nodeid)
        if planned is None or not self.recorders:
            return
        arch = planned.arch or next(iter(self.run.archs))
        if result is None:  # the suite itself failed on this item: not the kernel's fault, and no pass either
            result = self._blank(planned, "error", kind="suite", message=f"the suite failed: {report.longreprtext[-2000:]}")
        self.recorders[arch].add(result)
        if time.monotonic() - self._last_line >= _PROGRESS_SECONDS:
            self._progress()

    def crashed(self, planned: Planned, report: Any, stack: Path) -> None:
        """Turn xdist's crash report into a result; after too many, stop starting cases of that kernel."""
        state, sentence, text = read_crash(stack, self.run.case_timeout)
        message = f"{planned.case.id} on {planned.kernel}: {sentence}"
        result = self._blank(planned, state, kind=state, message=message, trace=text or None)
        report.conformance = result
        report.when = "call"
        report.longrepr = f"{message}\n{text}\nRun it again: {result['rerun']}"
        self._crashes[planned.kernel] += 1
        if self._crashes[planned.kernel] == _QUARANTINE and self.scheduler is not None:
            self._quarantine(planned.kernel)

    def _quarantine(self, kernel: str) -> None:
        def unwanted(nodeid: str) -> bool:
            other = parse_nodeid(nodeid)
            return other is not None and other.kernel == kernel

        for nodeid in self.scheduler.drop(unwanted):
            planned = parse_nodeid(nodeid)
            assert planned is not None
            message = f"{kernel} ended its worker {_QUARANTINE} times; its remaining cases were not started"
            arch = planned.arch or next(iter(self.run.archs))
            self.recorders[arch].add(self._blank(planned, "not-run", message=message))

    def _blank(self, planned: Planned, state: str, **more: Any) -> dict[str, Any]:
        arch = planned.arch or next(iter(self.run.archs))
        known = {k.name: k for k in kernels(planned.case.operator, self.run.selection.kernels)}
        case = self._with_tiers(planned)
        return blank_result(case, known[planned.kernel], self.run.settings(arch), state, **more).record()

    def _progress(self) -> None:
        self._last_line = now = time.monotonic()
        if self.terminal is None:
            return
        done = sum(r.done for r in self.recorders.values())
        planned = sum(r.planned for r in self.recorders.values())
        bad = sum(r.states[s] for r in self.recorders.values() for s in ("fail", "error", "crash", "timeout"))
        left = (now - self._started) / max(1, done) * (planned - done)
        rest = f" | about {left:.0f} s left" if done >= min(50, planned // 10) else ""
        kernels_done = ", ".join(
            f"{name} {sum(states.values())}/{r.run['planned'].get(name, 0)}"
            for r in self.recorders.values() for name, states in r.by_kernel.items()
        )
        self.terminal.ensure_newline()
        self.terminal.write_line(
            f"{100 * done // max(1, planned):3d} %  {done}/{planned} done, {bad} failed | {kernels_done}{rest}"
        )

    def finish(self, failed: bool) -> bool:
        """Close the records and write the pages. True when the run as a whole must fail."""
        wrong = False
        for recorder in self.recorders.values():
            recorder.close(failed)
            wrong = wrong or bool(recorder.problems())
            try:
                put = importlib.import_module("reports").write_report(recorder.path, self.directory)
            except Exception as error:
                print(f"no page was written ({type(error).__name__}: {error}); the records are whole, "
                      f"'python -m conformance report {recorder.path}' tries again", file=sys.stderr)
                wrong = True
            else:
                self.pages += put
        return wrong

    def summary(self, terminal: Any) -> None:
        """Counts per kernel and state, what was not run and why, and where the pages are."""
        for arch, recorder in self.recorders.items():
            terminal.section(f"conformance on {arch}: {recorder.run['device']}")
            terminal.write_line(
                f"{', '.join(f'{tier} {count}' for tier, count in sorted(recorder.run['tier_counts'].items()))} cases; "
                f"{recorder.run['sizes']} sizes; {recorder.run['data']} data"
            )
            for name, states in recorder.by_kernel.items():
                counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
                terminal.write_line(f"  {name}: {recorder.run['planned'].get(name, 0)} planned: {counts or 'nothing done'}")
            for (kernel, reason), count in sorted(recorder.reasons.items()):
                terminal.write_line(f"  not run: {count} of {kernel}: {reason}")
            for problem in recorder.problems():
                terminal.write_line(f"  PROBLEM: {problem}")
            terminal.write_line(f"  records: {recorder.path}")
        for page in self.pages:
            terminal.write_line(f"  report: {page}")
