"""Mutants that leave, remember or damage memory, vary from call to call, or fail at one point of the matrix only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.mutants import mutant
from kernels.mutants import stores
from kernels.mutants.gemm_2stage.family import OPERATORS, only, sources, wrong
from kernels.mutants.stores import Store

_ONE = ("bf16",)
_RIGHT = sources("torch", "right", {})


def _stored(name: str, fault: str, what: str, diagnosis: str, store: Callable[[], Store], on: str = "12c",
            dtypes: Sequence[str] = _ONE) -> None:
    """A mutant that does something else with the right result; ``store`` makes one for each operator."""
    for letter in on:
        source = _RIGHT[OPERATORS[letter]]
        mutant(source.operator, name, stores.then(source.function, name, __name__, store()), fault=fault, wrong=what,
               twin="torch_control", diagnosis=tuple(diagnosis.split()), shown_on=only(dtypes), **source.options)


def _plain(store: Callable[[Tensor, Tensor], Any]) -> Callable[[], Store]:
    return lambda: lambda out, result, given: store(out, result)


def _rows(keep: Callable[[Tensor], Tensor], zero: bool = False) -> Callable[[], Store]:
    return _plain(lambda out, result: stores.written_where(out, result, rows=keep(out), zero=zero))


def _columns(keep: Callable[[Tensor], Tensor], zero: bool = False) -> Callable[[], Store]:
    return _plain(lambda out, result: stores.written_where(out, result, columns=keep(out), zero=zero))


# ---- STALE, TAIL --------------------------------------------------------------------------------------------------


wrong("not_zeroed", "STALE", "Stage 2 does not start from zeros.", "stale-added unwritten", "2c", "per_expert",
      ("rows = a2.view(-1, a2.shape[-1])\n    out.zero_()", "rows = a2.view(-1, a2.shape[-1])"), dtypes=_ONE)
wrong("rows_not_zeroed", "STALE", "Rows of slots without an expert are not written.", "unwritten", "1", "per_expert",
      ("tokens, topk = local.shape\n    out.zero_()", "tokens, topk = local.shape"), dtypes=_ONE)
wrong("minus_zero_rows", "NONFINITE", "Rows of slots without an expert are -0.", "zero-sign", "12", "per_expert",
      ("tokens, topk = local.shape\n    out.zero_()", "tokens, topk = local.shape\n    out.fill_(-0.0)"),
      ("rows = a2.view(-1, a2.shape[-1])\n    out.zero_()", "rows = a2.view(-1, a2.shape[-1])\n    out.fill_(-0.0)"),
      dtypes=("bf16", "int8", "fp4"))
_stored("added", "STALE", "The result is added to what stood in the output.", "stale-added",
        _plain(lambda out, result: out.copy_(out.float() + result.float())))
_stored("last_row_unwritten", "STALE", "The last row is not written.", "unwritten",
        _rows(lambda out: stores.before_last(len(out), 1, out.device)))
_stored("last_columns_unwritten", "TAIL", "The last 8 columns are not written.", "unwritten",
        _columns(lambda out: stores.before_last(out.shape[1], 8, out.device)), on="12")
_stored("columns_beyond_64", "TAIL", "Columns beyond the last whole 64 are left at zero.", "zeroed",
        _columns(lambda out: stores.whole_tiles(out.shape[1], 64, out.device), zero=True), on="12")
_stored("rows_beyond_16", "TAIL", "Rows beyond the last whole 16 are left at zero.", "zeroed",
        _rows(lambda out: stores.whole_tiles(len(out), 16, out.device), zero=True), on="12")
_stored("last_64_columns", "TAIL", "The last 64 columns are zero.", "zeroed",
        _columns(lambda out: stores.before_last(out.shape[1], 64, out.device), zero=True))
_stored("rows_upper_half", "LAYOUT", "A size is given in elements, not bytes: rows of the upper half are 0.", "zeroed",
        _rows(lambda out: stores.before_last(len(out), len(out) // 2, out.device), zero=True), on="12")
_stored("columns_upper_half", "CONFIG", "The grid's stride is twice the tile: the upper half of the columns is not "
        "written.", "unwritten", _columns(lambda out: stores.before_last(out.shape[1], out.shape[1] // 2, out.device)),
        on="12")
_stored("zeros", "STALE", "Nothing is computed: all zeros.", "zeroed",
        _plain(lambda out, result: out.zero_()))
_stored("overrun", "TAIL", "Two elements after the output are written.", "overrun", _plain(stores.overrun))


# ---- SCALE, NONFINITE, MAP: whole results -------------------------------------------------------------------------


_stored("doubled", "SCALE", "The result is doubled, as FNUZ bytes taken for OCP are.", "constant-factor",
        _plain(lambda out, result: out.copy_(result * 2)))
_stored("halved", "SCALE", "The result is halved, as OCP bytes taken for FNUZ are.",
        "constant-factor mean fp8-encoding fp8-encoding-rows",
        _plain(lambda out, result: out.copy_(result / 2)), on="12")


def _row(change: Callable[[Tensor], Any]) -> Callable[[], Store]:
    """One row in the middle is something else."""
    def store(out: Tensor, result: Tensor) -> None:
        out.copy_(result)
        if len(out):
            change(out[len(out) // 2])

    return _plain(store)


_stored("nan_row", "NONFINITE", "One row is NaN.", "one-tile", _row(lambda row: row.fill_(torch.nan)))
_stored("garbage_row", "RACE", "One row holds numbers of another origin.", "one-tile",
        _row(lambda row: row.copy_((row.abs().max() * 3 + 1) * torch.linspace(-1, 1, len(row), device=row.device))),
        on="12")
_stored("row_shift", "MAP", "Each row is written in the place of the next.", "rows-shifted",
        _plain(lambda out, result: out.copy_(result.roll(1, 0))), on="12")


# ---- STATE, RACE, CONFIG ------------------------------------------------------------------------------------------


def _remembered() -> Store:
    memory = stores.Remembered()
    return lambda out, result, given: memory(out, result, given["topk_ids"].data_ptr())


def _sorted_in_place(out: Tensor, result: Tensor, given: dict[str, Any]) -> None:
    out.copy_(result)
    given["topk_ids"].copy_(given["topk_ids"].sort(dim=1).values)


def _sometimes(number: int | None) -> Callable[[], Store]:
    def make() -> Store:
        once = stores.Sometimes(number)
        return lambda out, result, given: once(out, result)

    return make


def _when(condition: Callable[[dict[str, Any]], bool], rows: Any = -1, columns: Any = -1) -> Callable[[], Store]:
    return lambda: lambda out, result, given: (
        stores.bumped(out, result, rows, columns) if condition(given) else out.copy_(result))


_stored("result_remembered", "STATE", "The result is remembered by the address of the routes.",
        "remembered-result history", _remembered)
_stored("sorts_in_place", "STATE", "The expert ids are sorted in place.", "input-changed", lambda: _sorted_in_place)
_stored("second_call", "STATE", "Every other call gets its last element wrong.", "not-repeatable last-element history",
        _sometimes(2), on="12")
_stored("race_element", "RACE", "An element that varies is wrong in some calls.", "not-repeatable one-element history",
        _sometimes(None), on="12")
_stored("config_topk_9", "CONFIG", "With 9 slots the last element is wrong.", "last-element",
        _when(lambda given: given["topk_ids"].shape[1] == 9), on="12")
_stored("config_block_48", "CONFIG", "With blocks of 48 rows one tile is wrong.", "one-tile",
        _when(lambda given: given["block"] == 48, slice(0, 8), slice(16, 32)), on="12",
        dtypes=("fp8", "bf16", "int8", "int4"))
_stored("config_fp16", "CONFIG", "fp16 with more than 128 tokens: the last element is wrong.", "last-element",
        _when(lambda given: len(given["topk_ids"]) > 128), dtypes=("fp16", "int4"), on="12")
