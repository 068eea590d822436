"""What one pytest process knows about its run: the selection, the architectures, and the judge of each."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.bench.record import why_not
from conformance.bench.turns import Turns, turns_at
from conformance.case import Case
from conformance.cases.applies import why_not_meant
from conformance.cases.options import Selection
from conformance.cases.rounds import this_round
from conformance.devices.admitted import Gate, out_of_memory
from conformance.environment import ABSENT, visible_gpus
from conformance.errors import spelled_out, trace_of
from conformance.expectations.held import hold
from conformance.expectations.rule import Expectation
from conformance.kernel import Kernel
from conformance.mutants import twin_of
from conformance.registry import arch as table
from conformance.registry import operator
from conformance.result import Result, Settings, blank_result
from conformance.runs.sharding import Item, estimate
from conformance.session.ahead import Ahead
from conformance.session.isolation import CrashLog

if TYPE_CHECKING:
    from conformance.bench.lane import Lane
    from conformance.judging.judge import Judge
    from conformance.lanes.take import Lanes


LANES = 3  # time limits of a case: that of route() and supports(), of lowering, and of assembling
_DIAGNOSED = 4  # failures of each mutant, in all processes together


@dataclass
class Run:
    """State of one process (worker, or the only one)."""

    selection: Selection
    archs: dict[str, str]
    case_timeout: float
    crash_log: CrashLog
    shared_dir: Path | None = None
    worker: tuple[int, int] = (0, 1)
    vacuity: str = "smoke"
    gpus: int = 0  # that the workers share
    memory_limit: int | None = None
    _judges: dict[str, Judge] = field(default_factory=dict)
    _lanes: dict[str, Lanes] = field(default_factory=dict)
    _timers: dict[str, Lane] = field(default_factory=dict)
    _gates: dict[str, Gate] = field(default_factory=dict)

    @functools.cached_property
    def ahead(self) -> Ahead:
        return Ahead(self.shared_dir, self.worker[0])

    @property
    def in_worker(self) -> bool:
        return self.shared_dir is not None

    def settings(self, arch: str) -> Settings:
        device = self.archs[arch]
        sizes = self.selection.sizes or ("reduced" if device == "cpu" else "official")
        return Settings(device=device, sizes=sizes, arch=arch)

    def estimate(self, item: Item) -> float:
        """Seconds that an item is taken for while nothing was recorded of it."""
        return estimate(operator(item.case.operator).memory(item.case, self.settings(item.arch).sizes))

    def judge_case(self, case: Case, kernel: Kernel, arch: str | None) -> Result:
        """Judge one case within its time limit, after memory for its group was granted.

        A case that runs out of device memory is tried again while no other process of the run holds any.
        """
        arch = arch or next(iter(self.archs))
        if self.archs[arch] == ABSENT:
            lanes = self.lanes_of(arch)
            # lowering and assembling have limits of their own; this one is for route() and supports()
            limit = LANES * self.case_timeout
            result = self._timed(functools.partial(lanes.run, case, kernel), case, kernel, lanes.settings, limit)
        else:
            result = self._executed(case, kernel, arch)
        return hold(result, kernel, table(arch), self.rules(arch))

    def time_case(self, case: Case, kernel: Kernel, arch: str | None, result: Result
                  ) -> tuple[Result, dict[str, Any] | None]:
        """Time a case that was just judged, alone on its device. The result is another one when the kernel was wrong
        meanwhile; the timing is None where it is not to be timed."""
        arch = arch or next(iter(self.archs))
        if not self.selection.bench or why_not(result.record()) is not None:
            return result, None
        judge, timer = self._judge(arch), self._timer(arch)
        timing: dict[str, Any] | None = None

        def timed() -> Result:
            nonlocal timing
            found, timing = timer.time(case, kernel, judge.ready(case), result)
            return found

        with self._turns(arch).timing():
            found = self._timed(timed, case, kernel, judge.settings)
        if found.state != "pass":
            if judge.lost_context(found):
                self.crash_log.give_up(found.message)
            judge.forget()
        return found, timing

    def rules(self, arch: str) -> tuple[Expectation, ...]:
        """The rules of expectation on an architecture: its table's, and those of ``--expectations``."""
        return (*table(arch).rules, *self.selection.expectations)

    def _executed(self, case: Case, kernel: Kernel, arch: str) -> Result:
        judge, gate = self._judge(arch), self._gate(arch)
        meant = why_not_meant(case, table(arch), judge.settings.device) is None  # else nothing will be made for it
        for attempt in (1, 2):
            if meant and not judge.lost and (attempt > 1 or not judge.holds(case)):
                judge.forget()
                if timer := self._timers.get(arch):
                    timer.forget()
                times = 2 if self.selection.bench else 1  # timing takes a second draw and a copy of both
                if refused := gate.enter(case, times, alone=attempt > 1):
                    return blank_result(case, kernel, judge.settings, "not-run", kind="memory", message=str(refused))
            with self.judging(arch):
                result = self._timed(functools.partial(self._judged, judge, case, kernel), case, kernel, judge.settings)
            if not out_of_memory(result):
                break
            result = gate.explained(result) if attempt > 1 else result
        if judge.lost:
            self.crash_log.give_up(result.message)
            return result
        return gate.told(result, case)

    def _judged(self, judge: Judge, case: Case, kernel: Kernel) -> Result:
        import torch

        if judge.settings.device == "cpu" and judge.settings.sizes == "reduced":
            # Threads win nothing on tensors so small, and on a busy machine each of thousands of steps waits for the
            # one that is not running: with two, three to six times as long in all. `process_kept` puts them back.
            torch.set_num_threads(1)
        result = judge.run(case, kernel)
        twin = twin_of(kernel)
        if twin is None:
            return result
        from conformance.zoo.applied import noted

        return noted(result, judge, case, kernel, twin)

    def _timed(self, act: Callable[[], Result], case: Case, kernel: Kernel, settings: Settings,
               seconds: float | None = None) -> Result:
        """The act's result; whatever else a kernel raises (SystemExit, its ``supports``) is this case's error."""
        from conformance.launching.restore import process_kept

        def judged() -> Result:
            with process_kept():
                return act()

        try:
            limit = self.case_timeout if seconds is None else seconds
            return self.crash_log.call(f"{case.id} on {kernel.name}", limit, judged)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self.in_worker:
                raise  # Ctrl-C; in a worker it would have ended the process
            if settings.arch in self._judges:
                self._judges[settings.arch].forget()
            return _error(error, case, kernel, settings)

    def close(self) -> None:
        """Give memory back: a finished worker's process lives on until the whole run ends."""
        for judge in self._judges.values():
            judge.forget()
        for timer in self._timers.values():
            timer.forget()
        for gate in self._gates.values():
            gate.release()

    def _judge(self, arch: str) -> Judge:
        from conformance.diagnosis.diagnose import Allowance  # brings torch: the controller starts its workers before
        from conformance.judging.judge import Judge

        if arch not in self._judges:
            allowance = Allowance(-(-_DIAGNOSED // self.worker[1])) if this_round() else None
            self._judges[arch] = Judge(self.settings(arch), self.vacuity, allowance)
        return self._judges[arch]

    def _timer(self, arch: str) -> Lane:
        from conformance.bench.lane import Lane

        if arch not in self._timers:
            on_card = -(-self.worker[1] // max(1, self.gpus)) + 1  # and the controller
            self._timers[arch] = Lane(self.settings(arch), self._judge(arch).device, on_card)
        return self._timers[arch]

    def _turns(self, arch: str) -> Turns:
        device = self.archs[arch]
        return turns_at("cpu" if device == "cpu" else f"{device}-{','.join(visible_gpus()[:1])}")

    @contextlib.contextmanager
    def judging(self, arch: str) -> Iterator[None]:
        """Where cases are timed: at no time when a process has the device to itself."""
        with self._turns(arch).judging() if self.selection.bench else contextlib.nullcontext():
            yield

    def lanes_of(self, arch: str) -> Lanes:
        from conformance.lanes.take import Lanes

        if arch not in self._lanes:
            self._lanes[arch] = Lanes(self.settings(arch), table(arch), self.case_timeout)
        return self._lanes[arch]

    def _gate(self, arch: str) -> Gate:
        if arch not in self._gates:
            self._gates[arch] = Gate(self.settings(arch), self.shared_dir, self.memory_limit, self.worker[1])
        return self._gates[arch]


def _error(error: BaseException, case: Case, kernel: Kernel, settings: Settings) -> Result:
    """The result for an exception that the judge let through: the kernel's when its module is in its traceback, or in
    that of its cause."""
    modules = [frame.f_globals.get("__name__") for one in (error, error.__cause__) if one is not None
               for frame, _ in traceback.walk_tb(one.__traceback__)]
    kind = "exception" if {*kernel.modules} & {*modules} else "suite"
    where = "" if kind == "exception" else "in the suite itself, "
    message = f"{case.id} on {kernel.name}: {where}raised {spelled_out(error)}"
    return blank_result(case, kernel, settings, "error", kind=kind, message=message, trace=trace_of(error, 6))

