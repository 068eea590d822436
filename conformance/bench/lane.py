"""The lane of one process: times what its judge has just found right, and makes the record of it."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from conformance.bench.ceilings import Ceilings
from conformance.bench.clock import Clock, ClockFailed, WallClock, WrongWhenTimed
from conformance.bench.cupti import device_clock, event_clock
from conformance.bench.flush import Flush
from conformance.bench.measure import Measured, TooSlow, measure
from conformance.bench.protocol import Protocol, protocol_of
from conformance.bench.record import NOT_TIMED, TIMED
from conformance.bench.roofline import Roof, figures
from conformance.bench.rotation import Draw, Rotation, drawn, other_draw
from conformance.bench.watch import Watch, watch_of
from conformance.case import Case
from conformance.judging.comparison import Subject
from conformance.kernel import Kernel
from conformance.launching.torch_settings import torch_settings_kept
from conformance.operator import Cost, Shared
from conformance.registry import matrix, operator
from conformance.result import Result, Settings

Timing = dict[str, Any]


class Lane:
    """Times kernels on one device. ``ours``: processes of this run on that device."""

    def __init__(self, settings: Settings, device: torch.device, ours: int = 1, clock: Clock | None = None,
                 protocol: Protocol | None = None) -> None:
        self.settings, self.device = settings, device
        self.protocol = protocol or protocol_of(device.type)
        self._clock, self._ours = clock, ours
        self._shared = Shared()
        self._other: tuple[str, Draw] | None = None

    @functools.cached_property
    def clock(self) -> Clock:
        """The best clock that works here."""
        if self._clock is not None:
            return self._clock
        return WallClock(self.flush) if self.device.type == "cpu" else device_clock(self.flush)

    @functools.cached_property
    def flush(self) -> Flush:
        return Flush(self.device, self.protocol.flush_bytes, self.protocol.flush)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        return Ceilings(self.device, self.clock, self.protocol)

    @functools.cached_property
    def watch(self) -> Watch:
        if self.device.type == "cpu":
            return Watch("a CPU is not watched")
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        if torch.version.hip is not None or uuid is None:
            return Watch("only NVIDIA cards are watched")
        return watch_of(f"GPU-{uuid}", self._ours)

    def time(self, case: Case, kernel: Kernel, subject: Subject, result: Result) -> tuple[Result, Timing]:
        """The result, which is a failure now if the kernel was wrong while it was timed, and the timing's record."""
        try:
            with torch.no_grad(), torch_settings_kept():
                return result, self._timed(case, kernel, subject)
        except WrongWhenTimed as wrong:
            message = f"{case.id} on {kernel.name}: right when it was judged, wrong when it was timed: {wrong}"
            return replace(result, state="fail", kind="timed", level=None, message=message), _not_timed(message)
        except torch.OutOfMemoryError as error:
            self.forget()
            return result, _not_timed(f"out of memory for two draws in two places: {str(error).splitlines()[0]}")
        except TooSlow as slow:
            return result, _not_timed(str(slow))
        except ClockFailed as error:
            return result, _not_timed(f"no clock gave times: {error}")
        except Exception as error:
            message = f"{case.id} on {kernel.name}: raised {type(error).__name__} while it was timed: {error}"
            trace = "".join(traceback.format_exception(error, limit=-12))
            return (replace(result, state="error", kind="exception", message=message, trace=trace),
                    _not_timed(message.splitlines()[0]))

    def measured(self, rotation: Rotation) -> tuple[Measured, Clock]:
        """The measurement, by CUDA events where the profiler's records of it cannot be used."""
        try:
            return measure(rotation, self.clock, self.protocol, self.watch), self.clock
        except ClockFailed as error:
            if self.device.type == "cpu":
                raise
            clock = self._events(error)
            return measure(rotation, clock, self.protocol, self.watch), clock

    def rotation(self, case: Case, kernel: Kernel, subject: Subject, config: str | None = None) -> Rotation:
        """Both draws of a case for a kernel, which has not been run on them."""
        subject.call.set_poison(0)
        return Rotation(kernel, (Draw(subject.joint), self._second(case)), self.device, config)

    def roof(self, cost: Cost) -> Roof:
        """The ceilings for a call with this cost."""
        try:
            copy, product = self.ceilings.copy(), self.ceilings.product(cost.arithmetic)
        except ClockFailed as error:
            if self.device.type == "cpu":
                raise
            self.ceilings = Ceilings(self.device, self._events(error), self.protocol)
            copy, product = self.ceilings.copy(), self.ceilings.product(cost.arithmetic)
        return Roof(copy.best, copy.at(cost.bytes), product if isinstance(product, float) else None)

    def _events(self, error: ClockFailed) -> Clock:
        """The clock to fall back to."""
        return event_clock(self.flush, error)

    def forget(self) -> None:
        """Give the other draw's memory back."""
        self._other = None
        self._shared.clear()

    def _timed(self, case: Case, kernel: Kernel, subject: Subject) -> Timing:
        rotation = self.rotation(case, kernel, subject)
        cost = operator(case.operator).cost(subject.call)
        rotation.judge()
        measured, clock = self.measured(rotation)
        return {
            "state": TIMED, "reason": "", "kind": clock.kind, "clock": clock.name, "clock_note": clock.note,
            "watched": self.watch.name, "watch_note": self.watch.note, "exchanged": rotation.exchangeable,
            "threads": torch.get_num_threads(),
            **_seconds(measured, self.protocol), **self._roofline(measured.seconds, cost),
        }

    def _roofline(self, seconds: float, cost: Cost) -> dict[str, Any]:
        roof = self.roof(cost)
        product = self.ceilings.product(cost.arithmetic)
        return {
            "bytes": cost.bytes, "flops": cost.flops, "arithmetic": cost.arithmetic,
            "ceilings": {**asdict(roof), "copy_way": self.ceilings.copy().way,
                         "product_note": product if isinstance(product, str) else ""},
            "figures": asdict(figures(seconds, cost, roof)),
        }

    def _second(self, case: Case) -> Draw:
        """The other draw of the case; kept until another case comes, as is what its group shares."""
        if self._other is None or self._other[0] != case.id:
            self._other = None
            self._shared.enter(matrix(case.operator).group_of(case))
            self._other = case.id, drawn(operator(case.operator), other_draw(case), self.settings.sizes, self.device,
                                         self._shared)
        return self._other[1]


def _seconds(measured: Measured, protocol: Protocol) -> Mapping[str, Any]:
    fewer = measured.repeats < protocol.repeats
    return {
        "seconds": measured.seconds, "spread": measured.spread, "repeats": measured.repeats,
        "runs": [[trial.seconds for trial in run] for run in measured.runs],
        "marks": [[list(trial.marks) for trial in run] for run in measured.runs],
        "remarks": [*measured.marks, *([f"{measured.repeats} repeats instead of {protocol.repeats}: slow"] * fewer)],
    }


def _not_timed(reason: str) -> Timing:
    return {"state": NOT_TIMED, "reason": reason}
