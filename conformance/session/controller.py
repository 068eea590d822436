"""The controlling process: records results as they come, names crashes, stops what crashes often, writes the pages."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.bench.protocol import protocol_of
from conformance.bench.record import TIMING
from conformance.cases.plan import Planned, parse_nodeid
from conformance.environment import ABSENT
from conformance.errors import ConformanceError
from conformance.expectations.held import hold
from conformance.kernel import Kernel
from conformance.registry import ROOT, kernels
from conformance.registry import arch as table_of
from conformance.result import Result, blank_result
from conformance.runs.bench_recorder import BenchRecorder, path_beside
from conformance.runs.earlier import key
from conformance.runs.portion import Division, Portion
from conformance.runs.recorder import Recorder
from conformance.session.isolation import Death
from conformance.session.opening import Opening
from conformance.session.pages import Made, make_pages, remove_pages
from conformance.session.progress import Display
from conformance.session.run import Run

QUARANTINE = 10  # points of one kernel after which its remaining cases are not started any more
POINTS = {"crash": 1, "timeout": 3}  # a hang costs a whole time limit, a crash a few seconds


class Controller:
    """One per run. ``directory`` is where records and pages go; None = reports/, or reports/rerun for single cases."""

    def __init__(self, run: Run, directory: Path | None, portion: Portion | None = None) -> None:
        self.run = run
        self.portion = portion or Portion()
        self.opening = Opening(run, self.portion)
        self.directory = directory or ROOT / "reports" / ("rerun" if run.selection.cases else "")
        self.recorders: dict[str, Recorder] = {}
        self.timings: dict[str, BenchRecorder] = {}
        self.display = Display(self.recorders)
        self.scheduler: Any = None
        self.made = Made()
        self._points: Counter[str] = Counter()

    def check_directory(self) -> None:
        """Raises ConformanceError when no records could be written at the end of the work."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            raise ConformanceError(
                f"--report-dir: cannot write to {self.directory}: {error.strerror}; name another directory"
            ) from None

    def start(self, nodeids: Sequence[str], workers: int, division: Division | None = None) -> None:
        """Open one record file per architecture, once it is known what will run.

        Raises ConformanceError when a run that is to be resumed differs from this one, or a file cannot be written.
        """
        division = division or Division()
        lines = self.opening.lines(nodeids, workers, division)
        carried = self.opening.by_arch(division.recorded)
        for arch, line in lines.items():
            earlier, timed = self.portion.earlier.get(arch), self.portion.timings.get(arch)
            names = [key(entry.case.id, entry.kernel) for entry in carried.get(arch, ())]
            results = [earlier.lines[name] for name in names] if earlier else []
            recorder = self.recorders[arch] = Recorder(self.directory / f"{arch}.jsonl", line, results)
            if self.run.selection.bench and self.run.archs[arch] != ABSENT:
                self.timings[arch] = self._timings(
                    arch, recorder, [timed.lines[name] for name in names] if timed else [])
            for problem in self.opening.problems(arch, earlier):
                recorder.note(problem)
        remove_pages(self.directory, [recorder.path for recorder in self.recorders.values()],
                     [timings.path for timings in self.timings.values()])
        self.display.start()
        for remark in filter(None, map(self.run.selection.lacking, self.run.selection.matrices())):
            self.display.note(remark)

    def _timings(self, arch: str, recorder: Recorder, carried: Sequence[bytes]) -> BenchRecorder:
        chosen = self.run.selection
        roles = {kernel.name: kernel.role for of in chosen.matrices() for kernel in kernels(of.operator, chosen.kernels)
                 if kernel.name in recorder.run["planned"]}
        return BenchRecorder(path_beside(recorder.path), recorder.run, protocol_of(self.run.archs[arch]).record(),
                             roles, carried)

    def record(self, report: Any) -> None:
        """Write the result that travelled with a report, and the progress line when it is time."""
        planned = parse_nodeid(report.nodeid)
        if planned is None or not self.recorders:
            return
        result = getattr(report, "conformance", None)
        if result is None:  # another plugin skipped the item or failed on it: not the kernel's fault, and no pass
            if report.skipped:
                why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
                result = self._blank(planned, "not-run", message=str(why)).record()
            else:
                what = f"{planned.case.id} on {planned.kernel}: failed outside the suite"
                message = f"{what}: {report.longreprtext[-2000:]}"
                result = self._blank(planned, "error", kind="suite", message=message).record()
        arch, timing = self.opening.arch_of(planned), result.pop(TIMING, None)
        self.recorders[arch].add(result)
        if arch in self.timings:
            self.timings[arch].add(result, timing)
        report.conformance = {key: result[key] for key in ("kernel", "kind", "lane")}  # pytest keeps every report
        self.display.progress()

    def crashed(self, planned: Planned, report: Any, death: Death) -> None:
        """Turn xdist's crash report into a result."""
        what = f"{planned.case.id} on {planned.kernel}: "
        message = what + death.sentence.removeprefix(what)
        blank = self._blank(planned, death.state, kind=death.state, message=message, trace=death.stack or None)
        arch = self.opening.arch_of(planned)
        result = hold(blank, self._kernel(planned), table_of(arch), self.run.rules(arch))
        report.conformance = result.record() | {"worker": death.worker}
        report.when = "call"
        report.location = _location(report.nodeid)
        if result.state == "expected":
            report.outcome, report.longrepr = "passed", None
            return
        report.longrepr = "\n".join(filter(None, (result.message, death.stack, f"Run it again: {result.rerun}")))
        self._points[planned.kernel] += POINTS[death.state]

    def worker_lost(self, death: Death) -> None:
        """A worker ended between cases, as when a kernel's ``prepare`` crashes: no case is to blame, but the run is
        not sound."""
        text = f"worker {death.worker}, in {death.label or 'no case'}: {death.sentence}"
        self.display.note("\n".join(filter(None, (text, death.stack))))
        for recorder in self.recorders.values():
            recorder.note(text)

    def quarantined(self, kernel: str) -> list[pytest.TestReport]:
        """Once a kernel has crashed too often: "not-run" reports of all its cases that no worker has begun."""
        if self._points[kernel] < QUARANTINE or self.scheduler is None:
            return []

        def unwanted(nodeid: str) -> bool:
            planned = parse_nodeid(nodeid)
            return planned is not None and planned.kernel == kernel

        reason = f"{kernel} crashed or hung too often; its remaining cases were not started"
        return [self._not_started(nodeid, reason) for nodeid in self.scheduler.drop(unwanted)]

    def _not_started(self, nodeid: str, reason: str) -> pytest.TestReport:
        planned = parse_nodeid(nodeid)
        assert planned is not None
        location = _location(nodeid)
        report = pytest.TestReport(nodeid, location, {}, "skipped", (location[0], 0, reason), "call")
        report.conformance = self._blank(planned, "not-run", message=reason).record()  # type: ignore[attr-defined]
        return report

    def _kernel(self, planned: Planned) -> Kernel:
        return next(k for k in kernels(planned.case.operator, self.run.selection.kernels) if k.name == planned.kernel)

    def _blank(self, planned: Planned, state: str, **more: Any) -> Result:
        settings = self.run.settings(self.opening.arch_of(planned))
        return blank_result(self.opening.with_tiers(planned), self._kernel(planned), settings, state, **more)

    @property
    def carried(self) -> bool:
        """Whether results of an earlier run are among these."""
        return any(recorder.carried for recorder in self.recorders.values())

    def finish(self, failed: bool) -> bool:
        """Close the records and write the pages. True when the run as a whole must fail."""
        wrong = self.carried and any(recorder.failing for recorder in self.recorders.values())
        for arch, timings in self.timings.items():
            timings.close()
            for problem in timings.problems():
                self.recorders[arch].note(problem)
        for recorder in self.recorders.values():
            recorder.close(failed or wrong)
            problems = recorder.problems()
            wrong = wrong or bool(problems)
        if not self.recorders:  # the run ended before it was known what would run
            return wrong
        self.made = make_pages(self.directory, [recorder.path for recorder in self.recorders.values()],
                               [timings.path for timings in self.timings.values()])
        return wrong or self.made.failed


def _location(nodeid: str) -> tuple[str, int | None, str]:
    """Where pytest says that an item is: file, line (none), name."""
    file, _, name = nodeid.partition("::")
    return file, None, name
