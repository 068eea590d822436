"""Kernels that make their times look better than they are: each must be caught, and no honest one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import right, sample, subject
from test_bench_rotation import PROTOCOL, counting, rotation
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conformance.bench.clock import Clock, ClockFailed, Step, WallClock, WrongWhenTimed
from conformance.bench.lane import Lane
from conformance.bench.measure import Measured, TooSlow, measure
from conformance.bench.novelty import shifted, widest
from conformance.bench.protocol import Protocol
from conformance.bench.watch import Watch
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.result import Result, Settings

Act = Callable[[Tensor, Tensor], Tensor]  # of x and the right result, what is returned


class Work:
    """Stands for time: a kernel does work when it computes, and hardly any when it remembers."""

    def __init__(self) -> None:
        self.done = 0

    def kernel(self, key: Callable[[Tensor], Any], unknown: Act | None = None) -> Kernel:
        """Remembers results by a key of its input x; ``unknown``: what it makes of values first seen when timed."""
        known: dict[Any, Tensor] = {}
        calls: list[int] = []

        def remembering(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):  # type: ignore[no-untyped-def]
            calls.append(1)
            self.done += 1
            if (at := key(x)) not in known:
                result = right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype)
                if unknown is not None and len(calls) > 2:
                    out.copy_(unknown(x, result))
                    return
                self.done += 50
                known[at] = result
            out.copy_(known[at])

        return subject(remembering)


class WorkClock(Clock):
    """Tells the work done within a call."""

    name, kind = "work", "cpu"

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def times(self, steps: list[Step]) -> list[float]:  # type: ignore[override]
        found = []
        for step in steps:
            step.before()
            before = self._work.done
            result = step.call()
            found.append((self._work.done - before) / 1000)
            step.after(result)
        return found


A_FEW = (21, 22, 23)  # of three calls in a row at least one is on known values
LONGER = replace(PROTOCOL, repeats=24)


def timed(kernel: Kernel, clock: Clock, protocol: Protocol = PROTOCOL) -> Measured:
    found = rotation(kernel)
    found.judge()
    return measure(found, clock, protocol, Watch(""))


def wall() -> WallClock:
    return WallClock(lambda: None)


# ---- what remembers -------------------------------------------------------------------------------------------------


SLOWER = r"never seen take 51\.0 times as long as others \(0\.051 s and 0\.001 s\)"
_kept: dict[int, Tensor] = {}  # so that no other tensor gets their addresses
STALE = r"on values that it was not timed on \(x shifted by \d+ columns\)"


def weighed(x: Tensor) -> int:
    """Depends on every element and where it stands."""
    words = x.view(torch.int32).flatten().long()
    return int((words * torch.arange(1, 2 * len(words), 2)).sum())


@pytest.mark.parametrize(("key", "caught"), [
    (lambda x: tuple(x.nan_to_num(7.0)[::3, :4].flatten().tolist()), SLOWER),
    (weighed, SLOWER),
    (lambda x: (_kept.setdefault(id(x), x).data_ptr(), x._version), SLOWER),
    (lambda x: int(x.view(torch.int32).long().sum()), STALE),
    (lambda x: (x.data_ptr(), x._version), f"differ from the judged result|{SLOWER}"),  # memory is given out again
], ids=["some elements", "all elements", "tensor and version", "a sum", "address and version"])
def test_a_kernel_that_remembers(key: Callable[[Tensor], Any], caught: str) -> None:
    work = Work()
    with pytest.raises(WrongWhenTimed, match=caught):
        timed(work.kernel(key), WorkClock(work), LONGER)


@pytest.mark.parametrize("unknown", [lambda x, result: result * 0, lambda x, result: result.roll(1, 0)])
def test_a_kernel_that_only_knows_what_it_was_judged_on(unknown: Act) -> None:
    work = Work()
    with pytest.raises(WrongWhenTimed, match=STALE):
        timed(work.kernel(weighed, unknown), WorkClock(work), LONGER)


def test_a_kernel_that_counts_its_calls_is_not_safe_at_the_end() -> None:
    """Were new values to come at the end only, it would do all of the work there. When it does so in the run that is to
    confirm a suspicion, that run counts: the figure is doubtful, and its spread makes every ratio noise."""
    work = Work()
    known: dict[int, Tensor] = {}

    def counting_down(n: int, x: Tensor, result: Tensor) -> Tensor:
        key = weighed(x)
        work.done += 51 if n > 150 or key not in known else 1
        return known.setdefault(key, result.clone())

    found = timed(counting(counting_down), WorkClock(work), LONGER)
    assert len(found.runs) == LONGER.runs + 1
    (mark,) = found.marks
    assert mark == "calls on values that were never seen took longer in the first runs, and not in another one"
    assert found.spread > 10


def test_an_honest_kernel_takes_as_long_on_new_values() -> None:
    work = Work()

    def honest(n: int, x: Tensor, result: Tensor) -> Tensor:
        work.done += 50 + n % 3  # noise
        return result

    assert timed(counting(honest), WorkClock(work)).seconds == pytest.approx(0.051, rel=0.02)


def test_only_numbers_are_shifted_and_rows_stay_together() -> None:
    ids, mask = torch.arange(64, dtype=torch.int32).view(4, 16), torch.ones(4, 16, dtype=torch.uint8)
    scales, rows = torch.rand(4, 2), torch.rand(4, 8)
    assert widest({"ids": ids, "mask": mask, "scales": scales, "rows": rows}) == "rows"
    assert widest({"ids": ids, "mask": mask, "one": torch.rand(9, 1)}) is None
    assert torch.equal(shifted(rows, 3).view(torch.float32), torch.cat([rows[:, -3:], rows[:, :-3]], dim=1))
    eight = rows.to(torch.float8_e4m3fn)
    assert torch.equal(shifted(eight, 1)[:, 1:], eight.view(torch.uint8)[:, :-1])


# ---- what works at another time, or blinds the comparison -----------------------------------------------------------


def test_work_that_is_left_for_later_is_missing() -> None:
    threads: list[threading.Thread] = []

    def later(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):  # type: ignore[no-untyped-def]
        def work() -> None:
            if len(threads) > 2:
                time.sleep(0.05)
            out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        if len(threads) <= 2:  # it is judged
            threads[-1].join()

    with pytest.raises(WrongWhenTimed, match="elements differ from the judged result"):
        timed(subject(later), wall())
    for thread in threads:
        thread.join()


class Blind(TorchFunctionMode):
    """Lets every comparison find that all is equal."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("ne", "__ne__", "not_equal"):
            return torch.zeros_like(result)
        return True if function is torch.equal else result


@pytest.fixture
def modes_left() -> Iterator[None]:
    depth = len(torch.overrides._get_current_function_mode_stack())
    yield
    while len(torch.overrides._get_current_function_mode_stack()) > depth:
        torch.overrides._pop_mode()


def test_a_mode_of_torch_does_not_blind_the_comparison(modes_left: None) -> None:
    def blinding(n: int, x: Tensor, result: Tensor) -> Tensor:
        if n <= 8:
            return result
        Blind().__enter__()
        return result * 0

    with pytest.raises(WrongWhenTimed, match="elements differ from the judged result"):
        timed(counting(blinding), wall())


def test_a_kernel_may_not_write_to_its_inputs() -> None:
    def tidying(n: int, x: Tensor, result: Tensor) -> Tensor:
        if n >= 9:
            x.nan_to_num_(0.0)  # rows that no slot refers to hold NaN; nothing depends on them
        return result

    with pytest.raises(WrongWhenTimed, match=r"after the timed calls \d+ elements of the input x are others"):
        timed(counting(tidying), wall())


def test_pythons_clocks_may_be_changed_and_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter", "time", "monotonic"):
        monkeypatch.setattr(time, name, getattr(time, name))  # to be put back

    def stopping(n: int, x: Tensor, result: Tensor) -> Tensor:
        for name in ("perf_counter", "time", "monotonic"):
            setattr(time, name, lambda: 7.0)
        return result

    assert timed(counting(stopping), wall()).seconds > 0


def test_what_is_right_at_most_calls_and_lazy_at_one_is_caught() -> None:
    with pytest.raises(WrongWhenTimed, match=r"timed call \d+: 1 of 1280 elements differ"):
        def one_element(n: int, x: Tensor, result: Tensor) -> Tensor:
            if n in A_FEW:
                result.view(-1)[7] += 1
            return result

        timed(counting(one_element), wall())


# ---- what takes too long --------------------------------------------------------------------------------------------


class Slow(Clock):
    """Every call takes three seconds."""

    name, kind = "slow", "cpu"

    def times(self, steps: list[Step]) -> list[float]:  # type: ignore[override]
        for step in steps:
            step.before()
            step.after(step.call())
        return [3.0] * len(steps)


def test_what_would_take_minutes_is_not_timed() -> None:
    with pytest.raises(TooSlow, match="one call takes 3 s: the 38 calls that a figure needs take more than 60 s"):
        timed(counting(lambda n, x, result: result), Slow())
    assert PROTOCOL.too_slow(1.5) is None


class Still(Slow):
    """No call takes any time."""

    def times(self, steps: list[Step]) -> list[float]:  # type: ignore[override]
        return [0.0 for _ in super().times(steps)]


def test_a_clock_that_tells_no_time_gives_no_figure() -> None:
    with pytest.raises(ClockFailed, match="slow told no time for 4 calls"):
        timed(counting(lambda n, x, result: result), Still())


def test_cheats_are_told_by_the_right_case() -> None:
    """The sample has rows that no slot refers to, without which a test above would prove nothing."""
    x = rotation(counting(lambda n, x, result: result)).draws[0].tensors["x"]
    assert x.isnan().any()
    assert sample().get("routing") == "padding"


# ---- what the lane makes of it --------------------------------------------------------------------------------------


def lane_result(kernel: Kernel, clock: Clock) -> tuple[Result, dict[str, Any]]:
    judge, case = Judge(Settings()), sample()
    lane = Lane(Settings(), judge.device, clock=clock, protocol=PROTOCOL)
    result = judge.run(case, kernel)
    assert result.state == "pass", result.message
    return lane.time(case, kernel, judge.ready(case), result)


def test_what_is_too_slow_has_passed_and_no_time() -> None:
    result, found = lane_result(counting(lambda n, x, result: result), Slow())
    assert (result.state, found["state"]) == ("pass", "not-timed")
    assert found["reason"].startswith("one call takes 3 s: ")


def test_a_cheat_has_failed_and_no_time() -> None:
    result, found = lane_result(counting(lambda n, x, result: result if n < 20 else result * 0), wall())
    assert (result.state, result.kind, result.level, found["state"]) == ("fail", "timed", None, "not-timed")
    assert "right when it was judged, wrong when it was timed: timed call" in result.message


def test_a_kernel_that_ends_the_process_when_timed_is_not_caught_here() -> None:
    """SystemExit is the run's to deal with, as in judging."""
    def ending(n: int, x: Tensor, result: Tensor) -> Tensor:
        if n >= 20:
            raise SystemExit(3)
        return result

    with pytest.raises(SystemExit):
        lane_result(counting(ending), wall())
