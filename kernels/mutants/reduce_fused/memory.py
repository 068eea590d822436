"""Mutants that leave, remember or damage memory, that vary from call to call, or fail for one shape only."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.mutants.reduce_fused import steps
from kernels.mutants.reduce_fused.steps import E4M3, Work, wrong

_wrong = partial(wrong, __name__)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes, one row of bytes per row: e4m3 has few operations of its own."""
    return tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint8)


# ---- STALE, EMPTY, TAIL: what is written -------------------------------------------------------------------------


def _only(keep: Callable[[Work], tuple[Tensor | None, Tensor | None]], left: str = "as it was") -> Any:
    """Store rows and columns for which the masks hold; leave the others as they were, or at zero."""

    def store(w: Work, result: Tensor) -> None:
        rows, columns = keep(w)
        written = torch.ones(result.shape, dtype=torch.bool, device=result.device)
        written = written if rows is None else written & rows[:, None]
        written = written if columns is None else written & columns
        before = torch.zeros_like(result) if left == "zero" else w.out
        mask = written.repeat_interleave(result.element_size(), dim=1)
        w.out.copy_(torch.where(mask, _raw(result), _raw(before)).view(result.dtype))

    return store


def _up_to(extent: int, tile: int, device: torch.device) -> Tensor:
    """Mask of the whole tiles of an axis; an axis shorter than one tile is whole."""
    whole = extent // tile * tile if extent >= tile else extent
    return torch.arange(extent, device=device) < whole


def _added(w: Work, result: Tensor) -> None:
    w.out.copy_(steps.narrow(w, result.float() + w.out.float()))


def _nan_if_empty(w: Work, total: Tensor) -> Tensor:
    count = w.valid.sum(dim=1, keepdim=True)
    return steps.rescale(w, total).masked_fill(count == 0, float("nan"))


def _divides(w: Work) -> None:
    w.x.shape[1] // w.positions.shape[0]


_wrong("stale_last_row", "STALE", "The last token is not written.", "unwritten",
       store=_only(lambda w: (torch.arange(len(w.out), device=w.x.device) < len(w.out) - 1, None)))
_wrong("stale_last_columns", "STALE", "The last 8 columns are not written.", "unwritten",
       store=_only(lambda w: (None, torch.arange(w.x.shape[1], device=w.x.device) < w.x.shape[1] - 8)))
_wrong("stale_added", "STALE", "The result is added to what stood in the output.", "stale-added", store=_added)
_wrong("empty_unwritten", "EMPTY", "A token with only padding slots is not written.", "unwritten",
       store=_only(lambda w: (~w.empty[:, 0], None)))
_wrong("empty_nan", "EMPTY", "A token with only padding slots is NaN, as 0 / 0 is.", "nan-for-empty",
       rescale=_nan_if_empty)
_wrong("empty_divides", "EMPTY", "No tokens: division by zero.", "exception", begin=_divides)
_wrong("tail_columns", "TAIL", "Columns beyond the last whole 1024 are left at zero.", "zeroed",
       store=_only(lambda w: (None, _up_to(w.x.shape[1], 1024, w.x.device)), "zero"))
_wrong("tail_tokens", "TAIL", "Tokens beyond the last whole 32 are left at zero.", "zeroed",
       store=_only(lambda w: (_up_to(len(w.out), 32, w.x.device), None), "zero"))
_wrong("tail_token_unwritten", "TAIL", "Tokens beyond the last whole 16 are not written.", "unwritten",
       store=_only(lambda w: (_up_to(len(w.out), 16, w.x.device), None)))


def _overruns(w: Work, result: Tensor) -> None:
    w.out.copy_(result)
    size = w.out.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=w.out.device).set_(w.out.untyped_storage())
    end = (w.out.storage_offset() + w.out.numel()) * size
    if w.out.is_contiguous() and result.numel():
        storage[end : end + 2 * size] = 0


def _sorts(w: Work) -> None:
    """Sort each token's slots in place, weights with them: the sum is right, the arguments are not left alone."""
    order = w.positions.argsort(dim=1)
    w.positions.copy_(w.positions.gather(1, order))
    if w.weights is not None:
        w.weights.copy_(w.weights.gather(1, order))


_wrong("tail_overrun", "TAIL", "Two elements after the output are written.", "overrun", store=_overruns)
_wrong("state_sorts_in_place", "STATE", "The slots are sorted in place.", "input-changed", begin=_sorts)


# ---- STALE, STATE: what is remembered ----------------------------------------------------------------------------


def _remembered(name: str) -> Callable[[Work], None]:
    """One argument as it was when this address was first seen; one address is remembered."""
    memory: dict[Any, Tensor] = {}

    def begin(w: Work) -> None:
        value = getattr(w, name)
        if value is None:
            return
        key = value.data_ptr(), value.shape, w.x.shape, value.dtype
        if key not in memory:
            memory.clear()
            memory[key] = value.clone()
        setattr(w, name, memory[key])

    return begin


def _result_remembered() -> Callable[[Work, Tensor], None]:
    memory: dict[Any, Tensor] = {}

    def store(w: Work, result: Tensor) -> None:
        key = w.x.data_ptr(), w.positions.data_ptr(), result.shape, result.dtype, w.weights is None, w.x_sf is None
        if key not in memory:
            memory.clear()
            memory[key] = result
        w.out.copy_(memory[key])

    return store


def _bumped(w: Work, result: Tensor, rows: Any = -1, columns: Any = -1) -> None:
    """Store, then make one place wrong by half of its value or 1."""
    w.out.copy_(result)
    if result.numel():
        value = result.float()[rows, columns]
        w.out[rows, columns] = steps.narrow(w, value + value.abs().clamp(min=1.0) * 0.5)


def _every(number: int) -> Callable[[Work, Tensor], None]:
    calls = [0]

    def store(w: Work, result: Tensor) -> None:
        calls[0] += 1
        (_bumped if calls[0] % number == 0 else steps.store)(w, result)

    return store


_wrong("stale_result", "STALE", "The result is remembered by the arguments' addresses.", "remembered-result history",
       store=_result_remembered())
_wrong("stale_routing", "STALE", "The positions are remembered by their address.",
       "remembered-token_topk_to_pos history", begin=_remembered("positions"))
_wrong("state_rows", "STATE", "x is remembered by its address.", "remembered-x remembered-result history",
       begin=_remembered("x"))
_wrong("state_second_call", "STATE", "Every other call gets its last element wrong.",
       "not-repeatable last-element history", store=_every(2))


# ---- RACE --------------------------------------------------------------------------------------------------------


_chance = random.Random(5)


def _any_order(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
    order = list(range(rows.shape[1]))
    _chance.shuffle(order)
    w.valid = w.valid[:, order]
    return steps.combine(w, rows[:, order], None if scale is None else scale[:, order])


def _sometimes(w: Work, result: Tensor) -> None:
    if result.numel() and _chance.random() < 0.5:
        _bumped(w, result, _chance.randrange(len(result)), _chance.randrange(result.shape[1]))
    else:
        steps.store(w, result)


_wrong("race_order", "RACE", "Slots are added in another order on each call, undeclared.", "not-repeatable",
       combine=_any_order)
_wrong("race_element", "RACE", "An element that varies is wrong in some calls.", "not-repeatable one-element history",
       store=_sometimes)


# ---- CONFIG ------------------------------------------------------------------------------------------------------


def _when(condition: Callable[[Work], bool], rows: Any = -1, columns: Any = -1) -> Callable[[Work, Tensor], None]:
    return lambda w, result: _bumped(w, result, rows, columns) if condition(w) else steps.store(w, result)


_wrong("config_topk_9", "CONFIG", "With 9 slots the last element is wrong.", "last-element",
       store=_when(lambda w: w.positions.shape[1] == 9))
_wrong("config_hidden_7168", "CONFIG", "With 7168 columns one tile of 256 is wrong.", "one-tile",
       store=_when(lambda w: w.x.shape[1] == 7168, slice(None), slice(1024, 1280)))
_wrong("config_fp16_e4m3", "CONFIG", "From fp16 to e4m3 the first token is wrong.", "one-tile",
       store=_when(lambda w: w.x.dtype == torch.float16 and w.out.dtype == E4M3, 0, slice(None)))
_wrong("config_forced", "CONFIG", "One of two configurations gets the last element wrong.", "one-config",
       store=_when(lambda w: w.config == "tile:128"), configs=("tile:64", "tile:128"))
