"""Faults in what is done with a right result: parts left unwritten, damaged, remembered, or wrong by chance.

A store is called with the output, the right result and the kernel's arguments, and leaves something wrong.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Store = Callable[[Tensor, Tensor, dict[str, Any]], Any]  # what it returns is not used


def then(function: Callable[..., Any], name: str, module: str, store: Store) -> Callable[..., None]:
    """A kernel that fills ``out`` through ``store``, with the signature of ``function``, which fills it rightly."""

    @functools.wraps(function)
    def stored(*, out: Tensor, **given: Any) -> None:
        result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        function(**given, out=result)
        store(out, result, given)

    stored.__name__ = stored.__qualname__ = name
    stored.__module__ = module
    return stored


def raw(tensor: Tensor) -> Tensor:
    """The bytes, one row of bytes per row: 8-bit floats have few operations of their own."""
    return tensor.contiguous().view(torch.uint8)


def written_where(out: Tensor, result: Tensor, rows: Tensor | None = None, columns: Tensor | None = None,
                  zero: bool = False) -> None:
    """Write where the masks of rows and of columns hold; elsewhere leave what stood there, or zeros."""
    mask = torch.ones(result.shape, dtype=torch.bool, device=result.device)
    mask = mask if rows is None else mask & rows[:, None]
    mask = mask if columns is None else mask & columns
    before = torch.zeros_like(result) if zero else out
    wide = mask.repeat_interleave(result.element_size(), dim=1)
    out.copy_(torch.where(wide, raw(result), raw(before)).view(result.dtype))


def whole_tiles(extent: int, tile: int, device: torch.device) -> Tensor:
    """Mask of the whole tiles of an axis; an axis shorter than one tile is whole."""
    whole = extent // tile * tile if extent >= tile else extent
    return torch.arange(extent, device=device) < whole


def before_last(extent: int, count: int, device: torch.device) -> Tensor:
    """Mask of all but the last ``count`` places of an axis."""
    return torch.arange(extent, device=device) < extent - count


def overrun(out: Tensor, result: Tensor) -> None:
    """Write rightly, and two elements after the output as well."""
    out.copy_(result)
    size = out.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage())
    end = (out.storage_offset() + out.numel()) * size
    if out.is_contiguous() and result.numel():
        storage[end : end + 2 * size] = 0


def bumped(out: Tensor, result: Tensor, rows: Any = -1, columns: Any = -1) -> None:
    """Write, then make one place wrong by half of its value or by 1."""
    out.copy_(result)
    if result.numel():
        value = result.float()[rows, columns]
        largest = torch.finfo(out.dtype).max
        out[rows, columns] = (value + value.abs().clamp(min=1.0) * 0.5).clamp(-largest, largest).to(out.dtype)


class Sometimes:
    """Every ``number``-th call, or with ``number`` None half of the calls by chance, gets one element wrong."""

    def __init__(self, number: int | None) -> None:
        self.number, self.calls, self.chance = number, 0, random.Random(5)

    def __call__(self, out: Tensor, result: Tensor) -> None:
        self.calls += 1
        if self.number is not None:
            (bumped(out, result) if self.calls % self.number == 0 else out.copy_(result))
        elif result.numel() and self.chance.random() < 0.5:
            bumped(out, result, self.chance.randrange(len(result)), self.chance.randrange(result.shape[1]))
        else:
            out.copy_(result)


class Remembered:
    """The result of the first call at these addresses is given again; one set of addresses is remembered."""

    def __init__(self) -> None:
        self.memory: dict[Any, Tensor] = {}

    def __call__(self, out: Tensor, result: Tensor, *key: Any) -> None:
        whole = (*key, result.shape, result.dtype)
        if whole not in self.memory:
            self.memory.clear()
            self.memory[whole] = result.clone()
        out.copy_(self.memory[whole])
