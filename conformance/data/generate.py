"""Counter-based data: the same bits for the same case on every device, whatever ran before.

Values are windows into a pool of random numbers that numpy's Philox and exact arithmetic make once; a row of a
tensor is the window that starts at an offset hashed from (seed, row). Building a tensor is then one gather at
memory speed, and a failure on a GPU can be repeated on a laptop. Integers come from a 32-bit mixing function.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

POOL = 1 << 20
WINDOW = 1 << 14
_MASK = 0xFFFFFFFF


def mix(counter: Tensor, seed: int) -> Tensor:
    """32 well-mixed bits for each int64 counter below 2**32 (murmur3's finaliser, twice, keyed by ``seed``)."""
    state = counter
    for key in (seed & _MASK, (seed >> 32) & _MASK):
        state = (state ^ key) & _MASK
        state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
        state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
        state = state ^ (state >> 16)
    return state


def integers(shape: tuple[int, ...], low: int, high: int, seed: int, device: torch.device) -> Tensor:
    """int64 in [low, high), one per element of ``shape``."""
    count = int(np.prod(shape, dtype=np.int64))
    counter = torch.arange(count, dtype=torch.int64, device=device)
    return (mix(counter, seed) % (high - low) + low).reshape(shape)


def uniform(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """fp32 multiples of 2**-24 in [0, 1): 24-bit mantissas, exact on every device."""
    count = int(np.prod(shape, dtype=np.int64))
    counter = torch.arange(count, dtype=torch.int64, device=device)
    return ((mix(counter, seed) >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def normal(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """fp32, nearly normal with variance 1: four uniforms added in a fixed order (Irwin-Hall), centred and scaled."""
    total = uniform(shape, seed, device)
    for k in range(1, 4):
        total += uniform(shape, seed + 1000003 * k, device)
    return (total - 2.0) * 1.734375


@functools.cache
def _base_pool(kind: str) -> np.ndarray:
    """POOL + WINDOW fp32 values: 'real' = near-normal times 2**[-4, 3]; 'exact' = integers in [-8, 8]."""
    draw = np.random.Generator(np.random.Philox(key=0x5EED)).integers
    count = POOL + WINDOW
    if kind == "exact":
        return draw(-8, 9, count).astype(np.float32)
    halves = draw(0, 1 << 16, (4, count), dtype=np.uint32).sum(axis=0, dtype=np.uint32).astype(np.float32)
    values = (halves - np.float32(2**17)) * np.float32(2.0**-16 * 1.734375)
    return np.ldexp(values, draw(-4, 4, count)).astype(np.float32)


@functools.lru_cache(maxsize=4)
def _pool(kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(_base_pool(kind)).to(device=device).to(dtype)


def fill_rows(target: Tensor, kind: str, seed: int, first: int = 0) -> Tensor:
    """Fill ``target`` [rows, width <= WINDOW] with the windows of rows ``first``, ``first`` + 1, ...; return it.

    Distinct rows below POOL start at distinct offsets (an odd multiplier permutes a power-of-two ring).
    """
    index = torch.arange(first, first + len(target), dtype=torch.int64, device=target.device)
    windows, offsets = _windows(target, kind, seed, index)
    if target.is_contiguous():
        torch.index_select(windows, 0, offsets, out=target)
    else:
        target.copy_(windows[offsets])
    return target


def fill_some_rows(target: Tensor, kind: str, seed: int, rows: Tensor) -> None:
    """Fill the rows int64 [n] of ``target`` as ``fill_rows`` would, and leave the others as they are."""
    windows, offsets = _windows(target, kind, seed, rows)
    target[rows] = windows[offsets]


def _windows(target: Tensor, kind: str, seed: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """All windows [POOL, width] over the pool of the target's dtype, and those of the rows [n]."""
    width = target.shape[1]
    if width > WINDOW:
        raise ValueError(f"fill_rows: width {width} exceeds the window of {WINDOW}")
    pool = _pool(kind, target.dtype, target.device)
    return pool.as_strided((POOL, width), (1, 1)), (rows * (0x9E3779B1 | 1) + seed) & (POOL - 1)
