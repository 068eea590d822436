"""What a run shows in the terminal: a progress line now and then, and at its end the counts that matter."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from conformance.result import NOT_LOOKED_FOR
from conformance.runs.bench_recorder import BenchRecorder
from conformance.runs.recorder import Recorder
from conformance.session.pages import Made

LISTED = 20  # failures that are shown in full; the page has all
_FIRST, _LONGEST = 5.0, 60.0  # seconds between progress lines, growing with the run
_CAUSES = 5  # lines for causes of failures; all are in the report
_BAD = ("fail", "error", "crash", "timeout")


class Display:
    """Writes to pytest's terminal reporter; silent without one (``-p no:terminal``)."""

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self.terminal: Any = None
        self._recorders = recorders
        self._started = self._last = time.monotonic()
        self._begun = threading.Event()

    def start(self) -> None:
        """The first case is about to run: time left is reckoned from here."""
        self._started = self._last = time.monotonic()

    def watch(self, so_far: Callable[[], tuple[int, int]]) -> None:
        """Until the first result write now and then how far compiling ahead has come."""

        def tell() -> None:
            started = time.monotonic()
            while not self._begun.wait(_pause(time.monotonic() - started)):
                done, total = so_far()
                if total:
                    passed = time.monotonic() - started
                    self.note(f"compiling ahead: {done}/{total} steps, {passed:.0f} s; no result yet")

        threading.Thread(target=tell, daemon=True).start()

    def note(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.ensure_newline()
            self.terminal.write_line(text)

    def progress(self) -> None:
        """Write the progress line if it is time: every 5 s at first, then after each twelfth of the time gone."""
        self._begun.set()
        now = time.monotonic()
        if now - self._last < _pause(now - self._started):
            return
        self._last = now
        recorders = self._recorders.values()
        done, planned = sum(r.done for r in recorders), sum(r.planned for r in recorders)
        bad = sum(r.states[state] for r in recorders for state in _BAD)
        of, out_of = Counter[str](), Counter[str]()  # per kernel, over all architectures
        for recorder in recorders:
            out_of.update(recorder.run["planned"])
            of.update({name: sum(states.values()) for name, states in recorder.by_kernel.items()})
        kernels = ", ".join(f"{name} {of[name]}/{out_of[name]}" for name in out_of)
        own = done - sum(r.carried for r in recorders)  # those of an earlier run took no time
        left = (now - self._started) / max(1, own) * (planned - done)
        rest = f" | about {left:.0f} s left" if own >= max(10, min(50, planned / 10)) else ""
        self.note(f"{100 * done // max(1, planned):3d} %  {done}/{planned} done, {bad} failed | {kernels}{rest}")

    def summary(self, made: Made, timings: Mapping[str, BenchRecorder]) -> None:
        """Counts per kernel and state, what was not run and why, causes of failures, what they have in common, what was
        timed, and the pages."""
        self._begun.set()
        if self.terminal is None:
            return
        write = self.terminal.write_line
        for arch, recorder in self._recorders.items():
            run = recorder.run
            self.terminal.section(f"conformance on {arch}: {run['device']}")
            tiers = ", ".join(f"{tier} {count}" for tier, count in sorted(run["tier_counts"].items()))
            write(f"{tiers} cases; {run['sizes']} sizes; {run['data']} data")
            for name in recorder.by_kernel:
                counts = ", ".join(recorder.counts_of(name))
                write(f"  {name}: {run['planned'].get(name, 0)} planned: {counts or 'nothing done'}")
            if not run.get("here", True):
                write(f"  nothing was executed: {arch} is not here")
            for (kernel, reason), count in sorted(recorder.reasons.items()):
                if count:
                    write(f"  not run: {count} of {kernel}: {reason}")
            for (kernel, cause), count in recorder.causes.most_common(_CAUSES):
                if count and cause != NOT_LOOKED_FOR:
                    write(f"  diagnosed: {count} of {kernel}: {cause}")
            for (kernel, cause), count in recorder.causes.items():
                if count and cause == NOT_LOOKED_FOR:
                    write(f"  not diagnosed: {count} more of {kernel}: run one by itself to have its cause looked for")
            for sentence in _first_of_each(made.common.get(arch, ())):
                write(f"  in common: {sentence}")
            for problem in recorder.problems():
                write(f"  PROBLEM: {problem}")
            write(f"  records: {recorder.path}")
            if arch in timings:
                write(f"  timings: {timings[arch].path}: {timings[arch].counts}")
        for page in made.pages:
            write(f"  report: {page}")


def _first_of_each(sentences: Sequence[str]) -> list[str]:
    """The first two sentences about each kernel, which is the first word of them; not of more kernels than causes."""
    seen: dict[str, list[str]] = {}
    for sentence in sentences:
        seen.setdefault(sentence.partition(",")[0], []).append(sentence)
    return [sentence for said in list(seen.values())[:_CAUSES] for sentence in said[:2]]


def _pause(passed: float) -> float:
    """Seconds between lines, after so many have passed."""
    return min(_LONGEST, max(_FIRST, passed / 12))


def category_of(report: Any) -> str:
    """What pytest counts a case as: its outcome, or that it was not executed, which is no pass."""
    lane = report.conformance.get("lane", "")
    return "not executed" if report.passed and lane not in ("", "execute") else str(report.outcome)


def keep_one_of_many(terminal: Any, report: Any) -> None:
    """Of cases that did not fail pytest only needs their number: it keeps the report of the first for all of them,
    unless its summary is to list them or their times."""
    if terminal is None or not report.passed or not hasattr(report, "conformance"):
        return
    category, option = category_of(report), terminal.config.option
    kept = terminal.stats.get(category)
    if kept and kept[-1] is report and not option.durations and not set(terminal.reportchars) & set("pPA"):
        kept[-1] = terminal.__dict__.setdefault(f"_conformance {category}", report)


@contextlib.contextmanager
def few_listed(terminal: Any, limit: int = LISTED) -> Iterator[None]:
    """Let pytest list ``limit`` failed cases at most, taking turns over kernels and kinds of failure; its counts and
    its exit code stay those of all. ``-vv`` lists all."""
    failed = terminal.stats.get("failed", [])
    cases = [report for report in failed if hasattr(report, "conformance")]
    if len(cases) <= limit or terminal.verbosity > 1:
        yield
        return
    seen: Counter[tuple[Any, Any]] = Counter()
    turns: list[tuple[int, int]] = []
    for place, report in enumerate(cases):
        alike = report.conformance.get("kernel"), report.conformance.get("kind")
        turns.append((seen[alike], place))
        seen[alike] += 1
    shown = {id(cases[place]) for _, place in sorted(turns)[:limit]}
    terminal.stats["failed"] = [r for r in failed if id(r) in shown or not hasattr(r, "conformance")]
    try:
        yield
    finally:
        terminal.stats["failed"] = failed
        terminal.write_line(f"... {limit} of {len(cases)} failed cases are listed; the report and -vv list all")
