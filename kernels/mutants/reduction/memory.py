"""Mutants that leave, remember or damage memory, vary from call to call, fail at one point of the matrix, crash, or
never end."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants import Shown, mutant
from kernels.mutants import stores
from kernels.mutants.family import TWIN
from kernels.mutants.reduction.family import FAMILY, only
from kernels.mutants.stores import Store

_SOURCE = FAMILY.torch_source("right")
_FOREVER = 3600.0


def _stored(name: str, fault: str, what: str, diagnosis: str, store: Store, shown_on: Shown | None = None) -> None:
    """A mutant that does something else with the right result."""
    mutant(FAMILY.operator, name, stores.then(_SOURCE.function, name, __name__, store), fault=fault, wrong=what,
           twin=TWIN, diagnosis=tuple(diagnosis.split()), shown_on=shown_on or only("bf16"), **_SOURCE.options)


def _plain(store: Callable[[Tensor, Tensor], Any]) -> Store:
    return lambda out, result, given: store(out, result)


def _when(condition: Callable[[dict[str, Any]], bool], otherwise: Callable[[Tensor, Tensor], Any]) -> Store:
    """Right but where ``condition`` holds for the arguments."""
    return lambda out, result, given: otherwise(out, result) if condition(given) else out.copy_(result)


def _empty(given: dict[str, Any], result: Tensor) -> Tensor:
    """Mask [T] of tokens that a valid_mask leaves without a slot."""
    mask = given["valid_mask"]
    return result.new_zeros(len(result), dtype=torch.bool) if mask is None else (mask == 0).all(dim=1)


_stored("last_row_unwritten", "STALE", "The last token is not written.", "unwritten",
        _plain(lambda out, result: stores.written_where(out, result, stores.before_last(len(out), 1, out.device))))
_stored("empty_unwritten", "EMPTY", "A token with only masked slots is not written.", "unwritten",
        lambda out, result, given: stores.written_where(out, result, rows=~_empty(given, result)))
_stored("added", "STALE", "The result is added to what stood in the output.", "stale-added",
        _plain(lambda out, result: out.copy_(out.float() + result.float())))
_stored("columns_beyond_128", "TAIL", "Columns beyond the last whole 128 are left at zero.", "zeroed",
        _plain(lambda out, result: stores.written_where(
            out, result, columns=stores.whole_tiles(out.shape[1], 128, out.device), zero=True)))
_stored("columns_beyond_4", "TAIL", "Columns beyond the last whole 4 are not written.", "unwritten",
        _plain(lambda out, result: stores.written_where(
            out, result, columns=stores.whole_tiles(out.shape[1], 4, out.device))))
_stored("rows_beyond_32", "TAIL", "Tokens beyond the last whole 32 are left at zero.", "zeroed",
        _plain(lambda out, result: stores.written_where(
            out, result, rows=stores.whole_tiles(len(out), 32, out.device), zero=True)))
_stored("zeros", "STALE", "Nothing is computed: all zeros.", "zeroed", _plain(lambda out, result: out.zero_()))
_stored("row_shift", "MAP", "Each row is written in the place of the next.", "rows-shifted",
        _plain(lambda out, result: out.copy_(result.roll(1, 0))))
_stored("doubled", "SCALE", "The result is doubled.", "constant-factor", _plain(lambda out, r: out.copy_(r * 2)))
_stored("overrun", "TAIL", "Two elements after the output are written.", "overrun", _plain(stores.overrun))


def _zeroes_masked_rows(out: Tensor, result: Tensor, given: dict[str, Any]) -> None:
    """Clearing what is masked gives the right sum, of arguments that are not left alone."""
    out.copy_(result)
    if given["valid_mask"] is not None:
        given["part"][given["valid_mask"] == 0] = 0


def _remembered() -> Store:
    memory = stores.Remembered()
    return lambda out, result, given: memory(out, result, given["part"].data_ptr(), given["valid_mask"] is None,
                                             given["topk_ids"] is None)


def _sometimes(number: int | None) -> Store:
    once = stores.Sometimes(number)
    return lambda out, result, given: once(out, result)


_stored("clears_rows", "STATE", "Masked rows of part are cleared in place.", "input-changed", _zeroes_masked_rows)
_stored("result_remembered", "STATE", "The result is remembered by the address of part.",
        "remembered-result history", _remembered())
_stored("second_call", "STATE", "Every other call gets its last element wrong.", "not-repeatable last-element history",
        _sometimes(2))
_stored("race_element", "RACE", "An element that varies is wrong in some calls.", "not-repeatable one-element history",
        _sometimes(None))
_stored("config_k_127", "CONFIG", "With 127 slots the last element is wrong.", "last-element",
        _when(lambda given: given["part"].shape[1] == 127, stores.bumped))


# ---- CONFIG: what ends the process, or does not end ---------------------------------------------------------------


def _one_point(**point: str) -> Shown:
    """``shown_on`` of a mutant whose failure costs a process: the few cases on which it fails are enough."""
    return lambda params: point.items() <= params.items()


def _segfault(out: Tensor, result: Tensor) -> None:
    """Write to the first page of memory, which is nobody's."""
    ctypes.memset(16, 0, 1)


_stored("crash_tail", "TAIL", "With 257 columns an address is wrong, and the process dies.", "crash",
        _when(lambda given: given["part"].shape[2] == 257, _segfault),
        shown_on=_one_point(hidden="257", **{"in": "fp16"}))
_stored("endless", "EMPTY", "A batch with only masked slots is never done.", "timeout",
        _when(lambda given: not bool(given["valid_mask"].any()), lambda out, result: time.sleep(_FOREVER)),
        shown_on=_one_point(mask="valid", routing="none", tokens="5", **{"in": "fp16"}))
