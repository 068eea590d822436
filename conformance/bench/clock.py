"""Clocks: seconds of single calls, each behind a flush of the cache. Every clock says what kind of time it tells."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DEVICE, CPU = "device", "cpu"  # kinds of time; figures of one kind are never compared with those of the other


class ClockFailed(Exception):
    """A clock that gave no times that can be trusted, with the reason."""


class WrongWhenTimed(Exception):
    """A kernel that was right when it was judged did something wrong when it was timed."""


@dataclass(frozen=True)
class Step:
    """One timed call: ``before`` and ``after`` (given the call's result) are outside the measured time."""

    before: Callable[[], None]
    call: Callable[[], Any]
    after: Callable[[Any], None]


class Clock(ABC):
    """Common to all clocks. name: what tells the time; kind: DEVICE or CPU; note: why it is no better clock."""

    name = ""
    kind = DEVICE

    def __init__(self, note: str = "") -> None:
        self.note = note

    @abstractmethod
    def times(self, steps: Sequence[Step]) -> list[float]:
        """Seconds of each step's call. Raises ClockFailed, WrongWhenTimed, and whatever a step raises."""


class WallClock(Clock):
    """Wall time of calls on the CPU, which is called CPU time everywhere."""

    name, kind = "wall", CPU

    def __init__(self, flush: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> None:
        """``now`` is taken here, once: what a kernel puts in the place of Python's clocks later tells no time."""
        super().__init__()
        self._flush = flush
        self._now = now

    def times(self, steps: Sequence[Step]) -> list[float]:
        found = []
        for step in steps:
            step.before()
            self._flush()
            start = self._now()
            result = step.call()
            found.append(self._now() - start)
            step.after(result)
        return found


class EventClock(Clock):
    """CUDA events around each call: device time, with the gaps between a call's kernels."""

    name = "cuda-events"

    def __init__(self, flush: Callable[[], None], note: str) -> None:
        super().__init__(note)
        self._flush = flush

    def times(self, steps: Sequence[Step]) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in steps]
        for step, (start, stop) in zip(steps, pairs, strict=True):
            step.before()
            self._flush()
            start.record()
            result = step.call()
            stop.record()
            step.after(result)
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]
