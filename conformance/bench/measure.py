"""Timing one kernel on one case by the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from conformance.bench.clock import Clock
from conformance.bench.novelty import check_novelty
from conformance.bench.protocol import Protocol
from conformance.bench.rotation import Rotation
from conformance.bench.watch import Watch


@dataclass(frozen=True)
class Trial:
    """seconds: mean of its calls; marks: what happened to the device meanwhile that makes the figure doubtful."""

    seconds: float
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The trials of each run, and how many calls each trial had."""

    runs: tuple[tuple[Trial, ...], ...]
    repeats: int

    @property
    def means(self) -> list[float]:
        return [trial.seconds for run in self.runs for trial in run]

    @property
    def seconds(self) -> float:
        """The figure: median of the trials' means."""
        return median(self.means)

    @property
    def spread(self) -> float:
        """How far the trials of all runs lie apart, relative to the figure: a difference within it is noise."""
        return (max(self.means) - min(self.means)) / self.seconds

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mark for run in self.runs for trial in run for mark in trial.marks))


class TooSlow(Exception):
    """A kernel that is not timed, with the reason."""


def measure(rotation: Rotation, clock: Clock, protocol: Protocol, watch: Watch) -> Measured:
    """Make all runs; the draws of ``rotation`` have been judged.

    Raises WrongWhenTimed for a wrong result of a timed call, TooSlow, ClockFailed, and whatever the kernel raises.
    """
    runs: list[tuple[Trial, ...]] = []
    repeats = protocol.repeats
    for _ in range(protocol.runs):
        rotation.settle()
        one = min(clock.times(rotation.steps(len(rotation.places), _nobody)))
        if not runs and (reason := protocol.too_slow(one)):
            raise TooSlow(reason)
        repeats = repeats if runs else protocol.repeats_of(one)
        for step in rotation.steps(protocol.warmup_of(one), _nobody):
            step.before()
            step.after(step.call())
        trials = []
        for number in range(protocol.trials):
            if number:
                rotation.exchange()
            trials.append(_trial(rotation, clock, repeats, watch))
        runs.append(tuple(trials))
    check_novelty(rotation, clock)
    rotation.places.clear()
    return Measured(tuple(runs), repeats)


def _trial(rotation: Rotation, clock: Clock, repeats: int, watch: Watch) -> Trial:
    marks: set[str] = set()
    looks = {repeats // 2, repeats - 1}

    def look(number: int) -> None:
        if number in looks:
            marks.update(watch.marks())

    mean = fmean(clock.times(rotation.steps(repeats, look)))
    rotation.settled()
    return Trial(mean, tuple(sorted(marks)))


def _nobody(_: int) -> None:
    pass
