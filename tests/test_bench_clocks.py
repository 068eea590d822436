"""What measures: protocol, clocks, ceilings, roofline, watch and turns, on known figures."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.bench.ceilings import Ceilings, Copy
from conformance.bench.clock import Clock, ClockFailed, EventClock, Step, WallClock, WrongWhenTimed
from conformance.bench.cupti import CuptiClock, Event, between_fences, device_clock
from conformance.bench.flush import Flush
from conformance.bench.measure import Measured, Trial
from conformance.bench.protocol import CPU, DEVICE, FLUSHES, Protocol, protocol_of
from conformance.bench.roofline import Roof, figures
from conformance.bench.turns import Turns
from conformance.bench.watch import NvmlWatch, Watch, watch_of
from conformance.operator import Cost

MIB = 1 << 20


def steps(order: list[str], count: int = 1) -> list[Step]:
    return [Step(lambda: order.append("before"), lambda: order.append("call"), lambda _: order.append("after"))] * count


# ---- protocol -------------------------------------------------------------------------------------------------------


def test_the_declared_protocol() -> None:
    assert (DEVICE.warmup, DEVICE.repeats, DEVICE.trials, DEVICE.runs) == (10, 50, 3, 2)
    assert protocol_of("cuda") is DEVICE
    assert protocol_of("cpu") is CPU
    assert DEVICE.record()["figure"] == "median of the trials' means"
    assert DEVICE.record()["repeats"] == 50
    assert (DEVICE.record()["flush"], CPU.record()["flush"]) == ("write+read", "write+read")
    assert DEVICE.record()["flushing"] == FLUSHES["write+read"]
    assert {flush: replace(DEVICE, flush=flush).record()["flushing"] for flush in FLUSHES} == FLUSHES


@pytest.mark.parametrize(("seconds", "repeats", "warmup"), [(0.0, 50, 10), (1e-5, 50, 10), (0.125, 32, 10), (1.0, 4, 3),
                                                            (60.0, 3, 2)])
def test_slow_calls_are_repeated_less(seconds: float, repeats: int, warmup: int) -> None:
    protocol = Protocol(10, 50, 3, 2, flush_bytes=0, longest=12.0)
    assert (protocol.repeats_of(seconds), protocol.warmup_of(seconds)) == (repeats, warmup)


def test_figure_and_spread_of_known_trials() -> None:
    runs = ((Trial(1.0), Trial(1.1, ("throttled: power cap",)), Trial(0.9)), (Trial(1.0), Trial(1.2), Trial(1.0)))
    found = Measured(runs, 50)
    assert found.seconds == 1.0
    assert found.spread == pytest.approx(0.3)
    assert found.marks == ("throttled: power cap",)


# ---- clocks ---------------------------------------------------------------------------------------------------------


def test_the_wall_clock_measures_the_call_alone() -> None:
    order: list[str] = []
    ticks = iter([10.0, 10.5, 20.0, 20.25])

    def now() -> float:
        order.append("tick")
        return next(ticks)

    clock = WallClock(lambda: order.append("flush"), now)
    assert clock.times(steps(order, 2)) == [0.5, 0.25]
    assert order == ["before", "flush", "tick", "call", "tick", "after"] * 2
    assert (clock.name, clock.kind) == ("wall", "cpu")


def fenced(*calls: list[tuple[int, int]]) -> list[Event]:
    """The records of calls that ran for these intervals (after the fence), with other work between the calls."""
    found, at = [], 0
    for intervals in calls:
        found += [Event("poison", at, at + 5), Event("fence", at + 10, at + 20)]
        found += [Event("kernel", at + 20 + start, at + 20 + stop) for start, stop in intervals]
        found += [Event("fence", at + 900, at + 901), Event("check", at + 905, at + 950)]
        at += 1000
    return found


def test_device_time_is_what_ran_between_the_fences() -> None:
    events = fenced([(0, 100)], [(0, 40), (60, 100)], [(0, 50), (25, 75), (30, 40)])
    assert between_fences(reversed(events), {"fence"}, 3) == pytest.approx([100e-9, 80e-9, 75e-9])


@pytest.mark.parametrize(("events", "calls", "reason"), [
    ([], 1, "0 fences were recorded of 2"),
    (fenced([(0, 10)])[:-2], 1, "1 fences were recorded of 2"),
    (fenced([(0, 10)], []), 2, "nothing was recorded for 1 of 2 calls"),
    ([*fenced([(0, 10)]), Event("fence", 400, 401)], 1, "3 fences were recorded of 2"),
])
def test_records_that_do_not_fit_are_no_times(events: list[Event], calls: int, reason: str) -> None:
    with pytest.raises(ClockFailed, match=reason):
        between_fences(events, {"fence"}, calls)


class Card:
    """Stands for a device and torch's profiler of it: what "ran" is recorded in order, a microsecond each."""

    device = "cpu"

    def __init__(self) -> None:
        self.ran: list[tuple[str, int, int]] = []  # name, nanoseconds, stream
        self.sees = True

    def run(self, name: str, nanoseconds: int = 1000, stream: int = 7) -> Callable[[], None]:
        return lambda: self.ran.append((name, nanoseconds, stream))

    def __call__(self) -> None:
        """The flush."""
        self.run("fill<float>", 60_000)()
        self.run("sum<float>", 50_000)()

    def mark(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(fill_=lambda _: self.run("fill<complex>")())

    def profile(self, activities: list[Any]) -> Any:
        card = self

        class Profiler:
            def __enter__(self) -> Any:
                card.ran.clear()
                return self

            def __exit__(self, *_: object) -> None:
                self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: card.records()))

        return Profiler()

    def records(self) -> list[Any]:
        at, found = 0, [self.record("cudaLaunchKernel", 0, 5, torch.autograd.DeviceType.CPU)]
        for name, took, stream in self.ran if self.sees else []:
            found.append(self.record(name, at, took, torch.autograd.DeviceType.CUDA, stream))
            at += took + 50
        return [*found, self.record("Context Sync", 0, at, torch.autograd.DeviceType.CUDA)]

    @staticmethod
    def record(name: str, start: int, took: int, where: Any, stream: int = 0) -> Any:
        return SimpleNamespace(name=lambda: name, start_ns=lambda: start, duration_ns=lambda: took,
                               device_resource_id=lambda: stream, device_type=lambda: where,
                               is_user_annotation=lambda: False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr("torch.profiler.profile", made.profile)
    monkeypatch.setattr(torch, "empty", made.mark)
    return made


def test_the_profilers_clock_counts_what_a_call_ran(card: Card) -> None:
    clock = CuptiClock(card)

    def call() -> None:
        card.run("gather", 3000)()
        card.run("sum", 2000)()

    other = Step(card.run("poison", 9000), card.run("fused", 4000), lambda _: card.run("compare", 9000)())
    assert clock.times([Step(card.run("poison", 9000), call, lambda _: None), other]) == pytest.approx([5e-6, 4e-6])
    assert (clock.name, clock.kind, clock.note) == ("cupti", "device", "")


def test_a_kernel_that_fills_the_fences_type_has_no_time(card: Card) -> None:
    clock = CuptiClock(card)
    with pytest.raises(ClockFailed, match="3 fences were recorded of 2"):
        clock.times([Step(lambda: None, card.run("fill<complex>"), lambda _: None)])


def test_what_a_call_does_on_another_stream_is_within_it_or_wrong(card: Card) -> None:
    clock = CuptiClock(card)

    def forked() -> None:
        card.run("main", 3000)()
        card.run("side", 2000, stream=9)()

    assert clock.times([Step(lambda: None, forked, lambda _: None)] * 2) == pytest.approx([5e-6, 5e-6])
    late = Step(lambda: None, card.run("main"), lambda _: card.run("side", 2000, stream=9)())
    with pytest.raises(WrongWhenTimed, match=r"side ran on a stream of its own \(number 9\) before call 2 of 2"):
        clock.times([late, late])
    early = Step(card.run("side", 2000, stream=9), card.run("main"), lambda _: None)
    with pytest.raises(WrongWhenTimed, match="before call 1 of 1, outside the time"):
        clock.times([early])


def test_what_runs_on_beyond_its_call_is_outside_as_well() -> None:
    events = [Event("fence", 0, 1), Event("main", 2, 5), Event("side", 3, 4000, stream=9), Event("fence", 6, 7)]
    with pytest.raises(WrongWhenTimed, match="beyond call 1 of 1"):
        between_fences(events, {"fence"}, 1)
    within = [Event("fence", 0, 1), Event("main", 2, 5), Event("side", 3, 6, stream=9), Event("fence", 6, 7)]
    assert between_fences(within, {"fence"}, 1) == pytest.approx([4e-9])


def test_a_call_may_not_leave_another_stream_current() -> None:
    events = [Event("fence", 0, 1), Event("main", 2, 50), Event("fence", 3, 4, stream=9)]
    with pytest.raises(WrongWhenTimed, match="left another stream current"):
        between_fences(events, {"fence"}, 1)


def test_the_flush_writes_then_reads_and_its_fills_are_no_fences() -> None:
    seen: list[str] = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    both, alone = (Flush(torch.device("cpu"), 1 << 12, flush) for flush in ("write+read", "write"))
    with Watching():
        both()
        alone()
    assert seen == ["fill_", "sum", "fill_"]
    assert both.nbytes == 1 << 12
    assert both._written.dtype != torch.complex128 and both._written.data_ptr() != both._read.data_ptr()


def test_both_buffers_are_twice_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.bench.flush.last_cache", lambda _: 3 << 12)
    found = Flush(torch.device("cpu"), 1 << 12)
    assert found._read is not None
    assert found._written.nbytes == found._read.nbytes == 6 << 12


def test_without_records_cuda_events_are_the_fallback_and_say_so(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.sees = False
    clock = device_clock(card)
    assert isinstance(clock, EventClock)
    assert clock.note == "not cupti: the profiler recorded nothing where two fences ran"


def test_cuda_events_are_around_the_call_alone(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(took for _, took, _ in card.ran)

        def elapsed_time(self, stop: Any) -> float:
            return (stop.at - self.at) / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    clock = EventClock(card, "why")
    step = Step(card.run("poison", 9000), card.run("kernel", 4000), lambda _: card.run("compare", 9000)())
    assert clock.times([step, step]) == pytest.approx([4e-6, 4e-6])


# ---- ceilings and figures -------------------------------------------------------------------------------------------


def test_the_rate_of_a_copy_of_a_size() -> None:
    copy = Copy({1 * MIB: 100.0, 4 * MIB: 300.0, 16 * MIB: 200.0}, "copy", least=4 * MIB)
    assert copy.best == 300.0
    assert [copy.at(size * MIB) for size in (0, 1, 2, 4, 8, 16, 99)] == [100, 100, 200, 300, 250, 200, 200]
    assert Copy({1: 400.0, 8: 100.0}, "copy", least=4).best == 100.0
    assert Copy({1: 400.0, 2: 100.0}, "copy", least=4).best == 100.0


class Counted(Clock):
    """Every call takes half a second."""

    name, kind = "counted", "cpu"

    def times(self, steps: list[Step]) -> list[float]:  # type: ignore[override]
        for step in steps:
            step.after(step.call())
        return [0.5] * len(steps)


def test_ceilings_are_measured_by_the_lanes_clock() -> None:
    found = Ceilings(torch.device("cpu"), Counted(), Protocol(1, 2, 1, 1, 0, 1.0))
    assert found.copy().best == 2 * 64 * MIB / 0.5
    assert found.product("fp32") == 2 * 512**3 / 0.5
    assert found.product("bf16") == 2 * 512**3 / 0.5
    assert found.product("fp3") == "no product of fp3 is known"


def test_figures_of_a_known_time() -> None:
    roof = Roof(copy=100.0, copy_at_size=80.0, product=1000.0)
    memory = figures(2.0, Cost(flops=100, bytes=100), roof)
    assert (memory.bandwidth, memory.rate, memory.intensity, memory.bound) == (50.0, 50.0, 1.0, "memory")
    assert (memory.of_copy, memory.of_copy_at_size, memory.of_product, memory.of_roof) == (0.5, 0.625, 0.05, 0.5)
    arithmetic = figures(4.0, Cost(flops=2000, bytes=100), roof)
    assert (arithmetic.bound, arithmetic.of_roof, arithmetic.of_product) == ("arithmetic", 0.5, 0.5)
    unknown = figures(2.0, Cost(flops=2000, bytes=100), Roof(100.0, 100.0, None))
    assert (unknown.bound, unknown.of_product, unknown.of_roof) == ("memory", None, 0.5)


# ---- watch and turns ------------------------------------------------------------------------------------------------


def test_a_throttled_or_shared_card_is_marked() -> None:
    assert NvmlWatch(lambda: 0x1 | 0x2, lambda: 2, ours=2).marks() == frozenset()
    assert NvmlWatch(lambda: 0x4 | 0x20, lambda: 1, ours=2).marks() == {
        "throttled: power cap", "throttled: software thermal slowdown"}
    assert NvmlWatch(lambda: 0, lambda: 3, ours=2).marks() == {
        "shared: 3 processes are on the card, this run has 2"}


def test_without_the_library_nothing_is_watched_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.bench.watch._LIBRARY", "libno-such.so")
    found = watch_of("GPU-0", 1)
    assert type(found) is Watch
    assert "libno-such.so" in found.note
    assert found.marks() == frozenset()


_NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)7; return uuid[4] == 'a' ? 0 : 6; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = 0x41; return device == (void *)7 ? 0 : 2; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos) {
    *count = 5; return infos ? 2 : ANSWER; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler to make a library of NVML's interface with")
@pytest.mark.parametrize(("answer", "marks", "note"), [
    (7, {"throttled: hardware thermal slowdown", "shared: 5 processes are on the card, this run has 3"}, ""),
    (3, {"throttled: hardware thermal slowdown"}, "other processes cannot be seen: answered with error 3"),
])
def test_the_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, marks: set[str], note: str
                              ) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(_NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DANSWER={answer}", "-o", library, source], check=True)
    monkeypatch.setattr("conformance.bench.watch._LIBRARY", str(library))
    found = watch_of("GPU-a0", ours=3)
    assert (found.name, found.marks(), found.note) == ("nvml", marks, note)
    assert "answered with error 6" in watch_of("GPU-b0", ours=3).note


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    yield Turns("card", tmp_path)


def test_judging_is_shared_and_timing_is_alone(turns: Turns) -> None:
    timed, judged_later = threading.Event(), threading.Event()

    def time_it() -> None:
        with turns.timing():
            timed.set()
            judged_later.wait(5)

    with turns.judging(), turns.judging():  # two at once do not wait for one another
        waiting = threading.Thread(target=time_it)
        waiting.start()
        assert not timed.wait(0.2)
    assert timed.wait(5)
    entered = threading.Event()

    def judge_it() -> None:
        with turns.judging():
            entered.set()

    other = threading.Thread(target=judge_it)
    other.start()
    assert not entered.wait(0.2)
    judged_later.set()
    assert entered.wait(5)
    waiting.join(5)
    other.join(5)
