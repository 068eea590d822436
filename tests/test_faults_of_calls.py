"""What a kernel may do to a call that is no wrong number: raise what ends a process elsewhere, raise what says nothing,
free or resize memory that it was given or has returned. Each is the kernel's failure, in words, and costs no more."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import CPU, right, sample, subject
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance import NotSupported
from conformance.errors import spelled_out, text_of, trace_of
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.launching.guards import Storages, memory_lost
from conformance.operator import Output
from conformance.result import Result, Settings
from conformance.verdicts.verdict import check_form

MODES = ("plain", "redraw", "repeat")
every_mode = pytest.mark.parametrize("mode", MODES)


def judged(judge: Judge, kernel: Kernel, mode: str) -> Result:
    """The result of one case, after which the same judge finds a right kernel right."""
    case = sample(launch=mode, routing="shuffled")
    found = judge.run(case, kernel)
    assert judge.run(case, filling(lambda x, out: None)).state == "pass"
    return found


def filling(also: Callable[[Tensor, Tensor], None]) -> Kernel:
    """A kernel that is right, and then does something to x or out."""

    def filler(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))
        also(x, out)

    return subject(filler)


# ---- exceptions -----------------------------------------------------------------------------------------------------


class Silent(Exception):
    """Says nothing."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Nothing(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Ends(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@every_mode
@pytest.mark.parametrize(("error", "words"), [
    (SystemExit(4), "raised SystemExit: 4"), (SystemExit(), "raised SystemExit"),
    (KeyboardInterrupt(), "raised KeyboardInterrupt"), (GeneratorExit(), "raised GeneratorExit"),
    (StopIteration("early"), "raised StopIteration: early"), (BaseException("odd"), "raised BaseException: odd"),
    (Silent(), "raised Silent"), (Silent("  \n"), "raised Silent"),
    (Unspeakable("x"), "raised Unspeakable: (without a text: its __str__ raised RuntimeError)"),
    (Nothing("x"), "raised Nothing: (without a text: its __str__ raised TypeError)"),
    (Ends("x"), "raised Ends: (without a text: its __str__ raised SystemExit)"),
], ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")
def test_whatever_a_kernel_raises_is_its_own_failure(error: BaseException, words: str, mode: str) -> None:
    def raises(x: Tensor, out: Tensor) -> None:
        raise error

    found = judged(Judge(Settings()), filling(raises), mode)
    assert (found.state, found.kind, found.level) == ("error", "exception", None)
    assert found.message == f"{found.case} on filler: {words}"
    assert found.trace is not None
    assert "test_faults_of_calls.py" in found.trace
    assert type(error).__name__ in found.trace


def test_a_refusal_without_a_reason_says_so() -> None:
    def raises(x: Tensor, out: Tensor) -> None:
        raise NotSupported

    found = judged(Judge(Settings()), filling(raises), "plain")
    assert (found.state, found.message) == ("not-run", "not supported by filler: it does not say why")


def test_ctrl_c_still_ends_the_run() -> None:
    """It arrives between two statements of the kernel; none of them raised it."""
    def interrupted(x: Tensor, out: Tensor) -> None:
        _thread.interrupt_main()
        for _ in range(10**7):
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Judge(Settings()).run(sample(), filling(interrupted))
    finally:
        signal.signal(signal.SIGINT, before)


def test_words_for_exceptions() -> None:
    assert text_of(ValueError(" two\nlines ")) == "two\nlines"
    assert spelled_out(ValueError("why")) == "ValueError: why"
    assert spelled_out(KeyError()) == "KeyError"
    assert "Ends" in trace_of(Ends(), 3)


# ---- memory ---------------------------------------------------------------------------------------------------------

RESIZED: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "frees the output": ("behind out", lambda x, out: out.untyped_storage().resize_(0)),
    "shrinks the output": ("behind out", lambda x, out: out.untyped_storage().resize_(16)),
    "grows the output": ("behind out", lambda x, out: out.resize_(999, 256)),
    "frees an input": ("behind x", lambda x, out: x.untyped_storage().resize_(0)),
    "grows an input": ("behind x", lambda x, out: x.resize_(999, 256)),
}


@every_mode
@pytest.mark.parametrize("what", RESIZED)
def test_memory_that_was_given_must_stay(what: str, mode: str) -> None:
    words, act = RESIZED[what]
    found = judged(Judge(Settings()), filling(act), mode)
    assert (found.state, found.kind) == ("fail", "guard")
    assert "resized the storage" in found.message
    assert words in found.message


def test_an_output_that_is_pointed_elsewhere_was_not_written() -> None:
    def elsewhere(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
        out.set_(torch.zeros(out.shape))

    found = judged(Judge(Settings()), subject(elsewhere), "plain")
    assert found.state == "fail"
    assert "not written" in found.message


@every_mode
def test_a_result_whose_memory_was_freed(mode: str) -> None:
    def frees(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype):  # type: ignore[no-untyped-def]
        found = right(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype)
        found.untyped_storage().resize_(0)
        return found

    found = judged(Judge(Settings()), subject(frees), mode)
    assert (found.state, found.kind) == ("fail", "form")
    assert "its storage has 0 bytes and its elements need 5120: it was freed" in found.message


def test_a_result_that_is_freed_by_the_next_call() -> None:
    earlier: list[Tensor] = []

    def frees_later(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype):  # type: ignore[no-untyped-def]
        for one in earlier:
            one.untyped_storage().resize_(0)
        earlier.append(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype))
        return earlier[-1]

    found = judged(Judge(Settings()), subject(frees_later), "redraw")
    assert (found.state, found.kind) == ("fail", "guard")
    assert "a result returned earlier was overwritten" in found.message


def test_storages_notice_size_and_place() -> None:
    tensors = {"one": torch.zeros(8), "two": torch.zeros(8)}
    storages = Storages.of(tensors)
    assert storages.changed() is None
    tensors["one"].add_(1.0)
    assert storages.changed() is None
    tensors["two"].untyped_storage().resize_(64)
    assert storages.changed() == "resized the storage behind two from 32 to 64 bytes"


def test_memory_of_views_counts_to_their_last_element() -> None:
    whole = torch.zeros(10)
    views = {"all": whole, "tail": whole[4:], "column": whole.view(5, 2)[:, 1], "head": whole[:2],
             "expanded": whole[:1].expand(99), "empty": whole[10:]}
    assert [memory_lost(view) for view in views.values()] == [None] * 6
    whole.untyped_storage().resize_(8)
    lost = [name for name, view in views.items() if memory_lost(view)]
    assert lost == ["all", "tail", "column"]
    assert check_form(whole, Output((10,), torch.float32), CPU) == (
        "its storage has 8 bytes and its elements need 40: it was freed")
