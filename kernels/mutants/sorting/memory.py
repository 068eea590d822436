"""Mutants that leave, remember or damage memory, vary from call to call, or fail at one point of the matrix only."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants import Shown, mutant
from kernels.mutants.family import TWIN
from kernels.mutants.sorting.family import FAMILY, having, wrong

_SOURCE = FAMILY.torch_source("right")
_LISTS = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids")
_CHANCE = random.Random(7)
_VARIES = "not-repeatable one-element last-element history"
_ZERO = "moe_buf.zero_()"
Outs = dict[str, Tensor]
Store = Callable[[Outs, Outs, dict[str, Any]], Any]


def _stored(name: str, fault: str, what: str, diagnosis: str, store: Store, shown_on: Shown | None = None) -> None:
    """A mutant that does something else with the right outputs: ``store(outs, right, arguments)``."""

    @functools.wraps(_SOURCE.function)
    def stored(**given: Any) -> None:
        outs = {key: given.pop(key) for key in (*_LISTS, "moe_buf")}
        right = {key: torch.empty(one.shape, dtype=one.dtype, device=one.device) for key, one in outs.items()}
        _SOURCE.function(**given, **right)
        store(outs, right, given)

    stored.__name__ = stored.__qualname__ = name
    stored.__module__ = __name__
    mutant(FAMILY.operator, name, stored, fault=fault, wrong=what, twin=TWIN, diagnosis=tuple(diagnosis.split()),
           shown_on=shown_on, **_SOURCE.options)


def _copied(outs: Outs, right: Outs) -> None:
    for name, one in outs.items():
        one.copy_(right[name])


def _part(name: str, kept: Callable[[Tensor, Outs, dict[str, Any]], Tensor]) -> Store:
    """Of one output only the elements of a mask are written, given their numbers, the right outputs and arguments."""

    def store(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
        one = outs[name]
        number = torch.arange(one.numel(), device=one.device).view(one.shape)
        right[name] = torch.where(kept(number, right, given), right[name], one)
        _copied(outs, right)

    return store


# ---- STALE, TAIL: what is not written -----------------------------------------------------------------------------


wrong("buffer_left", "STALE", "The buffer is not zeroed.", "unwritten", (_ZERO, "pass"))
wrong("buffer_last_row", "STALE", "The last row of the buffer is not zeroed.", "unwritten",
      (_ZERO, "moe_buf[:-1].zero_()"))
wrong("buffer_minus_0", "NONFINITE", "The buffer is filled with -0.", "buffer-minus-0", (_ZERO, "moe_buf.fill_(-0.0)"))
wrong("buffer_contiguous", "LAYOUT", "The buffer's rows are taken to follow one another.", "overrun",
      (_ZERO, "moe_buf.as_strided((moe_buf.numel(),), (1,)).zero_()"), shown_on=having(layout="strided_all"))
_stored("buffer_vectors", "TAIL", "The buffer is zeroed by 8 elements, a rest is left.", "unwritten",
        _part("moe_buf", lambda number, right, given: number < number.numel() // 8 * 8))
_stored("tail_unwritten", "STALE", "Ids past the valid rows are not written.", "unwritten",
        _part("sorted_token_ids", lambda number, right, given: number < right["num_valid_ids"][0]))
_stored("padding_unwritten", "STALE", "Padding in partial blocks is not written.", "unwritten",
        _part("sorted_token_ids", lambda number, right, given: (number >= right["num_valid_ids"][0])
              | (right["sorted_token_ids"] != right["sorted_token_ids"][-1])))
_stored("list_unpadded", "OVERFLOW", "The list has no room for padding: rows from T k on are not written.", "unwritten",
        _part("sorted_token_ids", lambda number, right, given: number < given["topk_ids"].numel()))
_stored("last_id", "TAIL", "The last id is not written.", "last-element unwritten",
        _part("sorted_token_ids", lambda number, right, given: number < number.numel() - 1))
_stored("first_owner", "STALE", "The first block's expert is not written.", "unwritten",
        _part("sorted_expert_ids", lambda number, right, given: number > 0))
_stored("tokens_unwritten", "STALE", "The number of tokens is not written.", "unwritten",
        _part("num_valid_ids", lambda number, right, given: number < 1))
_stored("lists_zero", "STALE", "The lists stay zero.", "zeroed", lambda outs, right, given: _copied(
    outs, {name: one * 0 for name, one in right.items()}))


def _overrun(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
    """One id after the list's end is written as well."""
    _copied(outs, right)
    ids = outs["sorted_token_ids"]
    ids.as_strided((len(ids) + 1,), (1,))[len(ids) :] = 0


_stored("overrun", "TAIL", "One id after the end of the list is written.", "overrun", _overrun)


# ---- STATE, RACE, CONFIG ------------------------------------------------------------------------------------------


def _clamped_in_place(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
    _copied(outs, right)
    given["topk_ids"].clamp_(min=0)


def _remembered() -> Store:
    memory: dict[Any, Outs] = {}

    def store(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
        key = (given["topk_ids"].data_ptr(), given["experts"], given["block"], given["expert_mask"] is None,
               *((one.shape, one.dtype) for one in outs.values()))
        if key not in memory:
            memory.clear()
            memory[key] = right
        _copied(outs, memory[key])

    return store


def _sometimes(now: Callable[[int], bool]) -> Store:
    """In some calls, by their number, an id that varies is wrong."""
    calls, chance = 0, random.Random(5)

    def store(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        _copied(outs, right)
        ids = outs["sorted_token_ids"]
        if len(ids) and now(calls):
            ids[chance.randrange(len(ids))] += 1

    return store


def _counting() -> Store:
    """Counters that are cleared before the first call only."""
    calls = 0

    def store(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
        nonlocal calls
        right["num_valid_ids"][0] += calls * given["block"]
        calls += 1
        _copied(outs, right)

    return store


def _at(condition: Callable[[dict[str, Any]], bool], name: str) -> Store:
    """The last element of one output is wrong at one point of the matrix."""

    def store(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
        _copied(outs, right)
        if condition(given):
            outs[name][-1:] += 1

    return store


_stored("clamps_in_place", "STATE", "Ids are clamped in place.", "input-changed", _clamped_in_place,
        having(ids="holes all_holes wild"))
_stored("result_remembered", "STATE", "The result is remembered by the address of the routes.",
        "remembered-result history", _remembered(), having(launch="redraw"))
_stored("second_call", "STATE", "Every other call gets an id wrong.", _VARIES,
        _sometimes(lambda number: number % 2 == 0))
_stored("race_id", "RACE", "An id that varies is wrong in some calls.", _VARIES,
        _sometimes(lambda number: _CHANCE.random() < 0.5))
_stored("count_left", "STATE", "A counter is not cleared between calls.", "not-repeatable one-element history",
        _counting())
_stored("tokens_2048", "CONFIG", "Above 2048 tokens, where another path begins, the last id is wrong.", "last-element",
        _at(lambda given: len(given["topk_ids"]) > 2048, "sorted_token_ids"))
_stored("experts_513", "CONFIG", "At 513 experts, where a counter no longer fits, the last id is wrong.",
        "last-element", _at(lambda given: given["experts"] == 513, "sorted_token_ids"))
_stored("slots_127", "CONFIG", "At 127 slots the number of tokens is wrong.", "last-element",
        _at(lambda given: given["topk_ids"].shape[1] == 127, "num_valid_ids"))


def _segfault(outs: Outs, right: Outs, given: dict[str, Any]) -> None:
    """Write to the first page of memory, which is nobody's: counter -1 of an unchecked id."""
    ctypes.memset(16, 0, 1)


_stored("crash_invalid", "SENTINEL", "A negative id addresses memory before the counters, and the process dies.",
        "crash", _segfault, having(ids="all_holes", mask="none", tokens="5", topk="8"))
