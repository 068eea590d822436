"""What one pytest process knows about its run: the selection, the architectures, and the judge of each."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from conformance.admission import Admission
from conformance.ahead import Ahead
from conformance.bench.record import why_not
from conformance.bench.turns import Turns, turns_at
from conformance.case import Case
from conformance.environment import ABSENT, visible_gpus
from conformance.expectations.held import hold
from conformance.expectations.rule import Expectation
from conformance.isolation import CrashLog
from conformance.kernel import Kernel
from conformance.options import Selection
from conformance.registry import arch as table
from conformance.registry import operator
from conformance.result import Result, Settings, blank_result
from conformance.runs.sharding import Item, estimate
from conformance.zoo.mutants import twin_of
from conformance.zoo.rounds import this_round

if TYPE_CHECKING:
    from conformance.bench.lane import Lane
    from conformance.judge import Judge
    from conformance.lanes.take import Lanes


T = TypeVar("T")
_DIAGNOSED = 2  # failures of each mutant, in each process
_LANES = 3  # time limits of a case: that of route() and supports(), of lowering, and of assembling


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
    _judges: dict[str, Judge] = field(default_factory=dict)
    _lanes: dict[str, Lanes] = field(default_factory=dict)
    _timers: dict[str, Lane] = field(default_factory=dict)
    _admission: Admission | None = None

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

        A case that runs out of device memory is tried again with room for twice its estimate.
        """
        arch = arch or next(iter(self.archs))
        if self.archs[arch] == ABSENT:
            lanes = self._lanes_of(arch)
            # lowering and assembling have limits of their own; this one is for route() and supports()
            limit = _LANES * self.case_timeout
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
                self.crash_log.give_up(f"{found.message} (the GPU context is lost; later cases run in a fresh worker)")
            judge.forget()
        return found, timing

    def rules(self, arch: str) -> tuple[Expectation, ...]:
        """The rules of expectation on an architecture: its table's, and those of ``--expectations``."""
        return (*table(arch).rules, *self.selection.expectations)

    def _executed(self, case: Case, kernel: Kernel, arch: str) -> Result:
        judge = self._judge(arch)
        for attempt in (1, 2):
            self._admit(judge, case, attempt)
            with self._judging(arch):
                result = self._timed(functools.partial(self._judged, judge, case, kernel), case, kernel, judge.settings)
            if not (result.state == "error" and "out of memory" in result.message):
                break
        if judge.lost:
            self.crash_log.give_up(f"{result.message} (the GPU context is lost; later cases run in a fresh worker)")
        return result

    def _judged(self, judge: Judge, case: Case, kernel: Kernel) -> Result:
        result = judge.run(case, kernel)
        twin = twin_of(kernel)
        if twin is None:
            return result
        from conformance.zoo.applied import noted

        return noted(result, judge, case, kernel, twin)

    def _timed(self, act: Callable[[], Result], case: Case, kernel: Kernel, settings: Settings,
               seconds: float | None = None) -> Result:
        """The act's result; whatever else a kernel raises (SystemExit, its ``supports``) is this case's error."""
        from conformance.restore import process_kept

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
        if self._admission is not None:
            self._admission.release()

    def prepare(self, work: Iterable[tuple[Case, Kernel, str | None]]) -> None:
        """Compile ahead. Each worker starts at another place of the list, so that together they compile in
        parallel; a kernel's ``prepare`` skips what another worker is already compiling.

        What goes wrong here goes wrong again in the case that needs it, and is reported there. A worker that
        replaces another one compiles nothing ahead: that may be what ended the other.
        """
        index, count = self.worker
        if index >= count:
            return
        todo: dict[tuple[str, ...], tuple[Kernel, Case, str]] = {}
        absent: dict[str, list[tuple[Case, Kernel]]] = {}
        for case, kernel, named in work:
            arch = named or next(iter(self.archs))
            device = self.archs[arch]
            if device == ABSENT:
                absent.setdefault(arch, []).append((case, kernel))
            if kernel.prepare is None or device not in kernel.devices:
                continue
            signature = (kernel.name, device, *(case.get(key) for key in ("in", "out", "weights", "xsf", "hidden")))
            todo.setdefault(signature, (kernel, case, device))
        entries = list(todo.values())
        self.ahead.expect(len(entries))
        for kernel, case, device in _rotated(entries, index * len(entries) // count):
            with self._judging(next(name for name, here in self.archs.items() if here == device)):
                self._prepare(kernel, case, device)
            self.ahead.step()
        steps: list[Callable[[], None]] = []
        for arch, pairs in absent.items():
            ahead = functools.partial(self._lanes_of(arch).ahead, pairs)
            steps += self.crash_log.call(f"routes for {arch}", _LANES * self.case_timeout, ahead)
        self.ahead.expect(len(steps))
        for step in _rotated(steps, index * len(steps) // count):
            step()
            self.ahead.step()

    def _prepare(self, kernel: Kernel, case: Case, device: str) -> None:
        from conformance.restore import process_kept

        def prepared() -> None:
            assert kernel.prepare is not None
            with process_kept():
                if not (kernel.requires and kernel.requires(device)):
                    kernel.prepare(case.params, device)

        try:
            self.crash_log.call(f"prepare of {kernel.name} for {case.id}", self.case_timeout, prepared)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self.in_worker:
                raise

    def _judge(self, arch: str) -> Judge:
        from conformance.diagnosis.diagnose import Allowance  # brings torch: the controller starts its workers before
        from conformance.judge import Judge

        if arch not in self._judges:
            allowance = Allowance(_DIAGNOSED) if this_round() else None
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
    def _judging(self, arch: str) -> Iterator[None]:
        """Where cases are timed: at no time when a process has the device to itself."""
        with self._turns(arch).judging() if self.selection.bench else contextlib.nullcontext():
            yield

    def _lanes_of(self, arch: str) -> Lanes:
        from conformance.lanes.take import Lanes

        if arch not in self._lanes:
            self._lanes[arch] = Lanes(self.settings(arch), table(arch), self.case_timeout)
        return self._lanes[arch]

    def _admit(self, judge: Judge, case: Case, attempt: int) -> None:
        """Wait for device memory when the group changes, or when the last attempt ran out of it."""
        if judge.settings.device != "cuda" or self.shared_dir is None:
            return
        if self._admission is None:
            self._admission = Admission(self.shared_dir / f"memory-{'-'.join(visible_gpus())}.json")
        if attempt > 1 or not judge.holds(case):
            judge.forget()
            if timer := self._timers.get(judge.settings.arch):
                timer.forget()
            more = attempt * (2 if self.selection.bench else 1)  # timing takes a second draw and a copy of both
            self._admission.acquire(operator(case.operator).memory(case, judge.settings.sizes) * more)


def _error(error: BaseException, case: Case, kernel: Kernel, settings: Settings) -> Result:
    """The result for an exception that the judge let through: the kernel's when its module is in the traceback."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    kind = "exception" if kernel.module in modules else "suite"
    where = "" if kind == "exception" else "in the suite itself, "
    text = "".join(traceback.format_exception_only(error)).strip()
    return blank_result(
        case, kernel, settings, "error", kind=kind, message=f"{case.id} on {kernel.name}: {where}raised {text}",
        trace="".join(traceback.format_exception(error, limit=-6)),
    )


def _rotated(entries: Sequence[T], start: int) -> Sequence[T]:
    return [*entries[start:], *entries[:start]]
