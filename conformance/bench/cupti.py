"""Kernel-only device time: the profiler's records of what ran on the device, fenced off call by call.

Right before a call, behind the flush, and right after it a fence runs: a fill of one number of a type that no kernel
under test fills, so that its name tells it apart. What ran between two fences belongs to the call; its time is the
union of the intervals, so that gaps do not count and kernels side by side count once. What ran on another stream must
be within a call altogether: work that is started early, while the cache is still being flushed, or left for later would
be in no call's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from conformance.bench.clock import Clock, ClockFailed, EventClock, Step, WrongWhenTimed
from conformance.bench.flush import Flush

_WAITS = ("Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event")  # records of waiting, not of work
_NS = 1e-9
_SLACK = 1000  # ns that the records of two streams may disagree by


@dataclass(frozen=True)
class Event:
    """One thing that ran on the device, on which stream; times in nanoseconds."""

    name: str
    start: int
    stop: int
    stream: int = 0


def between_fences(events: Iterable[Event], fences: Set[str], calls: int) -> list[float]:
    """Seconds of each call. Raises ClockFailed when there are not two fences for each call, or nothing between; and
    WrongWhenTimed when something ran on another stream than the fences and not within one call."""
    ordered = sorted(events, key=lambda one: one.start)
    marks = [event for event in ordered if event.name in fences]
    if len(marks) != 2 * calls:
        raise ClockFailed(f"{len(marks)} fences were recorded of {2 * calls}")
    found: list[list[Event]] = [[]]  # before the first fence, within the first call, between it and the second, ...
    for event in ordered:
        if event.name in fences:
            found.append([])
        else:
            found[-1].append(event)
    own = {mark.stream for mark in marks}
    if len(own) > 1:
        raise WrongWhenTimed("a call left another stream current than the one it was called on")
    for number, inside in enumerate(found):
        within = number % 2 == 1
        for event in inside:
            if event.stream not in own and not (within and event.stop <= marks[number].start + _SLACK):
                side = "beyond" if within else "before"
                raise WrongWhenTimed(
                    f"{event.name} ran on a stream of its own (number {event.stream}) {side} call {number // 2 + 1} of "
                    f"{calls}, outside the time of any call; let it wait for the current stream, and that for it")
    seconds = [_union(inside) * _NS for inside in found[1::2]]
    if not all(seconds):
        raise ClockFailed(f"nothing was recorded for {seconds.count(0.0)} of {calls} calls")
    return seconds


def _union(events: Sequence[Event]) -> int:
    """Nanoseconds in which at least one of the events, sorted by their start, ran."""
    total = until = 0
    for event in events:
        total += max(0, event.stop - max(event.start, until))
        until = max(until, event.stop)
    return total


class CuptiClock(Clock):
    """Through torch's profiler. Raises ClockFailed where it records nothing of the device."""

    name = "cupti" if torch.version.hip is None else "roctracer"

    def __init__(self, flush: Flush) -> None:
        super().__init__()
        self._flush = flush
        self._mark = torch.empty(1, dtype=torch.complex128, device=flush.device)
        events = self._recorded([])
        self._fences = frozenset(event.name for event in events)
        if len(events) != 2:
            names = ", ".join(sorted(event.name for event in events)) or "nothing"
            raise ClockFailed(f"the profiler recorded {names} where two fences ran")

    def times(self, steps: Sequence[Step]) -> list[float]:
        return between_fences(self._recorded(steps), self._fences, len(steps))

    def _recorded(self, steps: Sequence[Step]) -> list[Event]:
        """What ran on the device while the steps were made; two fences alone where there are none."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for step in steps:
                step.before()
                self._flush()
                self._mark.fill_(1)
                result = step.call()
                self._mark.fill_(1)
                step.after(result)
            if not steps:
                self._mark.fill_(1)
                self._mark.fill_(1)
            torch.cuda.synchronize()
        # The raw records: torch's own list of events, which `acc_events` would make, costs more time than the calls.
        return [_event(one) for one in profiler.profiler.kineto_results.events() if _is_work(one)]


def _is_work(record: Any) -> bool:
    on_host = record.device_type() == torch.autograd.DeviceType.CPU
    return not (on_host or record.is_user_annotation() or record.name().startswith(_WAITS))


def _event(record: Any) -> Event:
    start = record.start_ns()
    return Event(record.name(), start, start + record.duration_ns(), record.device_resource_id())


def device_clock(flush: Flush) -> Clock:
    """The profiler's clock, or CUDA events with the reason why it is not."""
    try:
        return CuptiClock(flush)
    except (ClockFailed, RuntimeError, AssertionError, AttributeError) as error:  # what torch's profiler raises
        return event_clock(flush, error)


def event_clock(flush: Flush, reason: Exception) -> EventClock:
    """The fallback, which says what it stands for."""
    return EventClock(flush, f"not {CuptiClock.name}: {reason}")
