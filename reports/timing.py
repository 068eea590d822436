"""Times of two runs, per kernel: medians with their spread, and the ratio case by case.

The times are those of whole cases, judging included, on machines that may have been busy: a hint at what became slower,
no benchmark. Hence the spread, and a word only where three quarters of the cases agree on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from reports.records import Result

NOTICED = 1.1  # a median ratio closer to 1 than this is no change
FEWEST = 4  # cases below which nothing is said


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one kernel over the cases that both runs executed; ``ratio`` is second / first, case by case."""

    kernel: str
    cases: int
    first: Spread
    second: Spread
    ratio: Spread

    @property
    def word(self) -> str:
        """"slower", "faster", or "no clear change"."""
        if self.cases >= FEWEST and self.ratio.low > 1 and self.ratio.median >= NOTICED:
            return "slower"
        if self.cases >= FEWEST and self.ratio.high < 1 and self.ratio.median <= 1 / NOTICED:
            return "faster"
        return "no clear change"


def timings(pairs: Iterable[tuple[Result, Result]]) -> tuple[Timing, ...]:
    """One entry per kernel that both runs executed, in order of appearance."""
    found: dict[str, list[tuple[float, float]]] = {}
    for first, second in pairs:
        if _timed(first) and _timed(second):
            assert first.seconds is not None and second.seconds is not None
            found.setdefault(first.kernel, []).append((first.seconds, second.seconds))
    return tuple(
        Timing(kernel, len(times), _spread([a for a, _ in times]), _spread([b for _, b in times]),
               _spread([b / a for a, b in times]))
        for kernel, times in found.items()
    )


def _timed(result: Result) -> bool:
    """Whether the time is that of a case which ran to its end: a timeout's says only what the limit was."""
    seconds = result.seconds
    whole = result.state in ("pass", "expected", "fail") and result.lane in ("", "execute")
    return whole and seconds is not None and math.isfinite(seconds) and seconds > 0


def _spread(values: list[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)
