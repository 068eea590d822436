"""Timing one kernel on one case by the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

from conformance.bench.clock import Clock, ClockFailed, Step, WrongWhenTimed
from conformance.bench.novelty import CALLS, Novelty
from conformance.bench.protocol import Protocol
from conformance.bench.rotation import Rotation
from conformance.bench.watch import Watch

_ONCE = "calls on values that were never seen took longer in the first runs, and not in another one"


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
    one, repeats = 0.0, protocol.repeats
    novelty = Novelty(rotation, CALLS * protocol.trials * protocol.runs)
    for number in range(protocol.runs):
        rotation.settle()
        if number == 0:
            one = min(clock.times(rotation.steps(len(rotation.places), _nobody)))
            if reason := protocol.too_slow(one):
                raise TooSlow(reason)
            repeats = protocol.repeats_of(one)
        for step in rotation.steps(protocol.warmup_of(one), _nobody):
            step.before()
            step.after(step.call())
        runs.append(_run(rotation, novelty, clock, repeats, protocol.trials, watch))
    novelty.check()
    if novelty.slower() is not None:  # by what it does, or by chance: the same once more, which counts as well
        novelty = Novelty(rotation, CALLS * protocol.trials)
        again = _run(rotation, novelty, clock, repeats, protocol.trials, watch)
        novelty.check()
        if reason := novelty.slower():
            raise WrongWhenTimed(reason)
        runs.append(tuple(replace(trial, marks=(*trial.marks, _ONCE)) for trial in again))
    rotation.places.clear()
    return Measured(tuple(runs), repeats)


def _run(rotation: Rotation, novelty: Novelty, clock: Clock, repeats: int, trials: int, watch: Watch
         ) -> tuple[Trial, ...]:
    """All trials, which are given to the clock at once: to start and stop a profiler takes longer than a trial."""
    marks: list[set[str]] = [set() for _ in range(trials)]
    steps: list[Step] = []
    new: list[list[bool]] = []
    for found in marks:
        own = rotation.steps(repeats, _looking(watch, found, {repeats // 2, repeats - 1}))
        if steps:
            own[0] = replace(own[0], before=_both(rotation.turn, own[0].before))
        own, are_new = novelty.strewn(own)
        steps += own
        new.append(are_new)
    times = iter(clock.times(steps))
    rotation.settled()
    means = [fmean(novelty.told([next(times) for _ in are_new], are_new)) for are_new in new]
    if not all(mean > 0 for mean in means):
        raise ClockFailed(f"{clock.name} told no time for {repeats} calls")
    return tuple(Trial(mean, tuple(sorted(found))) for mean, found in zip(means, marks, strict=True))


def _looking(watch: Watch, found: set[str], numbers: set[int]) -> Callable[[int], None]:
    def look(number: int) -> None:
        if number in numbers:
            found.update(watch.marks())

    return look


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        first()
        second()

    return act


def _nobody(_: int) -> None:
    pass
