"""Kernels that are right when judged and wrong when timed: each must be caught, and no right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import CPU, NAME, contract, right, sample, subject
from torch import Tensor

from conformance.bench.clock import Clock, Step, WrongWhenTimed
from conformance.bench.compare import far
from conformance.bench.measure import Measured, measure
from conformance.bench.novelty import CALLS
from conformance.bench.protocol import Protocol
from conformance.bench.rotation import Rotation, drawn, other_draw
from conformance.bench.watch import Watch
from conformance.case import Case
from conformance.kernel import Kernel
from conformance.operator import Reference, Shared

PROTOCOL = Protocol(warmup=2, repeats=4, trials=3, runs=2, flush_bytes=0, longest=60.0)
# two of them judged first, two of them that tell how many repeats there can be
ALL_CALLS = 2 + 2 + PROTOCOL.runs * (PROTOCOL.warmup + PROTOCOL.trials * (PROTOCOL.repeats + CALLS))
A_FEW = (13, 14, 15)  # of three calls in a row at least one is on known values


class Steady(Clock):
    """Makes every call and says that the n-th took n milliseconds."""

    name, kind = "steady", "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def times(self, steps: list[Step]) -> list[float]:  # type: ignore[override]
        found = []
        for step in steps:
            step.before()
            step.after(step.call())
            self.calls += 1
            found.append(self.calls / 1000)
        return found


class Marking(Watch):
    """Marks every look."""

    def __init__(self) -> None:
        super().__init__("")
        self.looks = 0

    def marks(self) -> frozenset[str]:
        self.looks += 1
        return frozenset({"throttled: power cap"}) if self.looks == 1 else frozenset()


def rotation(kernel: Kernel, case: Case | None = None) -> Rotation:
    case = case or sample()
    draws = [drawn(contract(), one, "reduced", CPU, Shared()) for one in (case, other_draw(case))]
    return Rotation(kernel, draws, CPU)


def timed(kernel: Kernel, case: Case | None = None) -> Measured:
    found = rotation(kernel, case)
    found.judge()
    return measure(found, Steady(), PROTOCOL, Watch(""))


def counting(act: Callable[[int, Tensor, Tensor], Tensor | None], **options: Any) -> Kernel:
    """A kernel whose n-th call returns what ``act`` makes of (n, x, right result), or writes nothing for None."""
    calls = []

    def counted(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):  # type: ignore[no-untyped-def]
        calls.append(1)
        result = act(len(calls), x, right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
        if result is not None:
            out.copy_(result)

    return subject(counted, **options)


def test_a_right_kernel_is_timed() -> None:
    calls: list[int] = []
    found = timed(counting(lambda n, _, result: calls.append(n) or result))
    assert len(calls) == ALL_CALLS
    assert found.repeats == PROTOCOL.repeats
    assert [len(run) for run in found.runs] == [PROTOCOL.trials] * PROTOCOL.runs
    # the two draws are called once each, then come the trials, whose calls are told to take longer and longer, the
    # first of 3 to 8 ms, among which are two on new values
    assert 0.0045 <= found.means[0] <= 0.0065
    assert [round(one - found.means[0], 3) // 0.006 for one in found.means] == pytest.approx([0, 1, 2, 3, 4, 5], abs=1)


def test_a_kernel_that_returns_its_result_is_timed() -> None:
    def returned(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out_dtype):  # type: ignore[no-untyped-def]
        return right(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype)

    assert timed(subject(returned)).seconds > 0


@pytest.mark.parametrize("first_wrong", [3, 5, 8, 20, ALL_CALLS - CALLS])
def test_wrong_from_some_call_on(first_wrong: int) -> None:
    kernel = counting(lambda n, _, result: result if n < first_wrong else result * 1.5)
    with pytest.raises(WrongWhenTimed, match="elements differ from the judged result"):
        timed(kernel)


def test_a_kernel_that_stops_writing_is_caught_by_poison() -> None:
    with pytest.raises(WrongWhenTimed, match="of 1280 elements differ"):
        timed(counting(lambda n, _, result: result if n <= 9 else None))


def test_one_wrong_call_among_many_is_enough() -> None:
    with pytest.raises(WrongWhenTimed, match="differ from the judged result"):
        timed(counting(lambda n, _, result: result * 0 if n in A_FEW else result))


def test_a_kernel_that_remembers_by_address_is_caught_when_the_draws_change_places() -> None:
    known: dict[int, Tensor] = {}

    def remembered(n: int, x: Tensor, result: Tensor) -> Tensor:
        return known.setdefault(x.data_ptr(), result.clone())

    with pytest.raises(WrongWhenTimed, match="differ from the judged result"):
        timed(counting(remembered))


def test_wrong_on_the_other_draw() -> None:
    with pytest.raises(WrongWhenTimed, match="before the timed calls: "):
        timed(counting(lambda n, _, result: result if n == 1 else result * 2))


def test_an_overrun_is_caught() -> None:
    def over(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):  # type: ignore[no-untyped-def]
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)

    with pytest.raises(WrongWhenTimed, match="bytes changed after the output"):
        timed(subject(over))


def test_a_kernel_that_does_not_repeat_its_bits_is_held_to_the_reference() -> None:
    def wobbling(n: int, x: Tensor, result: Tensor) -> Tensor:
        return torch.nextafter(result, result + (1.0 if n % 2 else -1.0))

    with pytest.raises(WrongWhenTimed):
        timed(counting(wobbling))
    assert timed(counting(wobbling, repeatable=False)).seconds > 0
    with pytest.raises(WrongWhenTimed, match=r"timed call \d+: \d+ of 1280 elements (are far from|exceed)"):
        timed(counting(lambda n, _, result: result * 1.5 if n in A_FEW else result, repeatable=False))
    with pytest.raises(WrongWhenTimed, match="exceed the error budget"):
        timed(counting(lambda n, _, result: result if n <= 9 else result * 1.0005, repeatable=False))


def test_the_draws_differ_and_change_places() -> None:
    found = rotation(counting(lambda n, _, result: result))
    found.judge()
    found.settle()
    assert found.exchangeable
    first, second = (place.arguments["x"].clone() for place in found.places)
    addresses = [place.arguments["x"].data_ptr() for place in found.places]
    assert not torch.equal(first, second)
    found.exchange()
    assert [place.arguments["x"].data_ptr() for place in found.places] == addresses
    assert torch.equal(found.places[0].arguments["x"].nan_to_num(7.0), second.nan_to_num(7.0))
    assert torch.equal(found.places[1].arguments["x"].nan_to_num(7.0), first.nan_to_num(7.0))


def test_draws_of_upstreams_routing_have_the_same_shapes() -> None:
    case = Case(NAME, {"send": "4001", "topk": "6", "experts": "72", "ranks": "8", "hidden": "256", "weights": "yes",
                       "in": "bf16", "out": "bf16", "xsf": "yes"})
    assert rotation(counting(lambda n, _, result: result), case).exchangeable


def test_marks_are_those_of_their_trial() -> None:
    found = rotation(counting(lambda n, _, result: result))
    found.judge()
    watch = Marking()
    done = measure(found, Steady(), PROTOCOL, watch)
    assert [[trial.marks for trial in run] for run in done.runs] == [[("throttled: power cap",), (), ()], [(), (), ()]]
    assert watch.looks == 2 * PROTOCOL.trials * PROTOCOL.runs


@pytest.mark.parametrize(("golden", "result", "count"), [
    (1.0, 1.003, 0), (1.0, 1.02, 1), (1.0, math.nan, 1), (1.0, math.inf, 1), (0.0, 0.002, 0), (0.0, 0.004, 1),
    (math.inf, math.nan, 0), (60000.0, math.inf, 0), (math.nan, 1.0, 0), (-math.inf, -math.inf, 0),
])
def test_what_no_order_of_a_sum_can_give(golden: float, result: float, count: int) -> None:
    """fp16: three tolerances of 1e-3 (1 + size)."""
    reference = Reference(torch.tensor([golden, 2.0], dtype=torch.float16), lambda: iter(()))
    assert int(far(torch.tensor([result, 2.0], dtype=torch.float16), reference)) == count


def test_ids_that_differ_and_are_not_left_open() -> None:
    reference = Reference(torch.tensor([1, 2, 3, 4]), open=torch.tensor([False, False, False, True]))
    assert int(far(torch.tensor([1, 5, 3, 9]), reference)) == 1
