"""Kernel-only device time: the profiler's records of what ran on the device, fenced off call by call.

The flush before a call and a small kernel after it are fences: fills of a type that no kernel under test fills, so that
their names tell them apart. What ran between two fences belongs to the call; its time is the union of the intervals,
so that gaps do not count and kernels side by side count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Clock, ClockFailed, EventClock, Step

_WAITS = ("Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event")  # records of waiting, not of work
_NS = 1e-9


@dataclass(frozen=True)
class Event:
    """One thing that ran on the device; times in nanoseconds."""

    name: str
    start: int
    stop: int


def between_fences(events: Iterable[Event], fences: Set[str], calls: int) -> list[float]:
    """Seconds of each call. Raises ClockFailed when there are not two fences for each call, or nothing between."""
    found: list[list[Event]] = []
    for event in sorted(events, key=lambda one: one.start):
        if event.name in fences:
            found.append([])
        elif found:
            found[-1].append(event)
    if len(found) != 2 * calls:
        raise ClockFailed(f"{len(found)} fences were recorded of {2 * calls}")
    seconds = [_union(inside) * _NS for inside in found[::2]]
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

    def __init__(self, buffer: Tensor) -> None:
        """``buffer``: complex128, larger than the last cache."""
        super().__init__()
        self._buffer = buffer
        self._mark = torch.empty(1, dtype=buffer.dtype, device=buffer.device)
        events = self._recorded([])
        self._fences = frozenset(event.name for event in events)
        if len(events) != 2:
            names = ", ".join(sorted(event.name for event in events)) or "nothing"
            raise ClockFailed(f"the profiler recorded {names} where two fences ran")

    def times(self, steps: Sequence[Step]) -> list[float]:
        return between_fences(self._recorded(steps), self._fences, len(steps))

    def _recorded(self, steps: Sequence[Step]) -> list[Event]:
        """What ran on the device while the steps were made; the two fences alone where there are none."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for step in steps:
                step.before()
                self._buffer.fill_(1)
                result = step.call()
                self._mark.fill_(1)
                step.after(result)
            if not steps:
                self._buffer.fill_(1)
                self._mark.fill_(1)
            torch.cuda.synchronize()
        # The raw records: torch's own list of events costs more time than the calls do.
        return [_event(one) for one in profiler.profiler.kineto_results.events() if _is_work(one)]


def _is_work(record: Any) -> bool:
    on_host = record.device_type() == torch.autograd.DeviceType.CPU
    return not (on_host or record.is_user_annotation() or record.name().startswith(_WAITS))


def _event(record: Any) -> Event:
    return Event(record.name(), record.start_ns(), record.start_ns() + record.duration_ns())


def flush_buffer(device: torch.device, flush_bytes: int) -> Tensor:
    """A buffer of at least ``flush_bytes`` and of twice the second-level cache."""
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return torch.empty(max(flush_bytes, 2 * cache) // 16, dtype=torch.complex128, device=device)


def device_clock(device: torch.device, flush_bytes: int) -> Clock:
    """The profiler's clock, or CUDA events with the reason why it is not."""
    buffer = flush_buffer(device, flush_bytes)
    try:
        return CuptiClock(buffer)
    except (ClockFailed, RuntimeError, AssertionError, AttributeError) as error:  # what torch's profiler raises
        return event_clock(buffer, error)


def event_clock(buffer: Tensor, reason: Exception) -> EventClock:
    """The fallback, which says what it stands for."""
    return EventClock(buffer, f"not {CuptiClock.name}: {reason}")
