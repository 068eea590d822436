"""Where each token's slots point: upstream's expert-parallel routing, and patterns that it never draws.

All functions return positions as int32 [tokens, topk] with -1 for a padding slot, and the number of rows of x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.data.generate import integers, mix
from conformance.errors import unknown_name

SPARSE_ROWS = 70001
_CHUNK = 1 << 24


def expert_parallel(
    send: int, topk: int, experts: int, ranks: int, seed: int, device: torch.device, most: int | None = None
) -> Tensor:
    """Local expert ids int64 [T, topk] of rank 0, -1 elsewhere; tokens without a local expert are dropped.

    Uniform top-k: every one of ``send * ranks`` global tokens takes the ``topk`` experts with the largest of
    ``experts`` hashed scores (distinct by construction, so there are no ties). ``most`` caps T.
    """
    local = experts // ranks
    total = send * ranks
    kept: list[Tensor] = []
    for start in range(0, total, max(1, _CHUNK // experts)):
        stop = min(total, start + max(1, _CHUNK // experts))
        token = torch.arange(start, stop, dtype=torch.int64, device=device)[:, None]
        expert = torch.arange(experts, dtype=torch.int64, device=device)
        scores = (mix((token * experts + expert) & 0xFFFFFFFF, seed) << 16) | expert
        ids = torch.topk(scores, topk, dim=1, sorted=True).values & 0xFFFF
        ids = torch.where(ids < local, ids, -1)
        kept.append(ids[(ids >= 0).any(dim=1)])
        if most is not None and sum(len(part) for part in kept) >= most:
            break
    result = torch.cat(kept) if kept else torch.empty((0, topk), dtype=torch.int64, device=device)
    return result if most is None else result[:most]


def expanded_positions(ids: Tensor) -> Tensor:
    """int32 positions of each (token, slot) in the layout grouped by expert; within an expert by token."""
    flat = ids.reshape(-1)
    order = torch.argsort(torch.where(flat < 0, 1 << 40, flat), stable=True)
    valid = int((flat >= 0).sum())
    positions = torch.full_like(flat, -1)
    positions[order[:valid]] = torch.arange(valid, dtype=flat.dtype, device=flat.device)
    return positions.reshape(ids.shape).to(torch.int32)


def _permuted(count: int, seed: int, device: torch.device) -> Tensor:
    """A permutation of 1..count: no slot points at row 0, nor at the last of ``count + 2`` rows."""
    keys = (mix(torch.arange(count, dtype=torch.int64, device=device), seed) << 24) + torch.arange(count, device=device)
    return torch.argsort(keys) + 1


def _shuffled(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    return _permuted(tokens * topk, seed, device).reshape(tokens, topk)


def _with_padding(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    drop = integers((tokens, topk), 0, 4, seed + 1, device) == 0
    return _shuffled(tokens, topk, seed, device).masked_fill_(drop, -1)


def _some_empty(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    position = _with_padding(tokens, topk, seed, device)
    position[::3] = -1
    return position


def _none(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    return torch.full((tokens, topk), -1, dtype=torch.int64, device=device)


def _single(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    slot = torch.arange(topk, device=device)[None, :]
    token = torch.arange(tokens, device=device)[:, None]
    return _shuffled(tokens, topk, seed, device).masked_fill_(slot != token % topk, -1)


def _ragged(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    slot = torch.arange(topk, device=device)[None, :]
    token = torch.arange(tokens, device=device)[:, None]
    return _shuffled(tokens, topk, seed, device).masked_fill_(slot >= token % (topk + 1), -1)


def _duplicates(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    position = integers((tokens, topk), 1, max(2, tokens * topk // 4), seed, device)
    position[:, -1] = position[:, 0]  # [3, ..., 3]: the same row twice in one token
    if topk > 2:
        position[::2, 1] = -1  # [3, -1, 3]
    return position


def _same(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    """All slots of a token point at one row."""
    return _permuted(tokens * topk, seed, device)[:tokens, None].repeat(1, topk)


def _complete(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    """Every row of x is referenced, the first and the last too."""
    return _shuffled(tokens, topk, seed, device) - 1


def _sparse(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    """Few tokens far apart in many rows: positions beyond 2**16, in no order."""
    step = max(1, SPARSE_ROWS // (tokens * topk + 1))
    return _with_padding(tokens, topk, seed, device) * step


def _reverse(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    return torch.arange(tokens * topk, 0, -1, device=device).reshape(tokens, topk)


def _identity(tokens: int, topk: int, seed: int, device: torch.device) -> Tensor:
    return torch.arange(tokens * topk, device=device).reshape(tokens, topk) + 1


_NONZERO = {torch.uint8: (1, 2, 128, 255), torch.int32: (1, 2, 256, 1 << 16, -1, -(1 << 31))}


def as_mask(valid: Tensor, dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """A mask of ``dtype`` (uint8, int32): 0 where ``valid`` is False; elsewhere 1 ("one"), or any of some values that
    are as true as 1 ("any"). Raises ConformanceError for another ``kind``."""
    if kind not in ("one", "any"):
        raise unknown_name("values of a mask", kind, ("one", "any"))
    if kind == "one":
        return valid.to(dtype)
    known = torch.tensor(_NONZERO[dtype], dtype=dtype, device=valid.device)
    return torch.where(valid, known[integers(tuple(valid.shape), 0, len(known), seed, valid.device)], 0)


PATTERNS: dict[str, Callable[[int, int, int, torch.device], Tensor]] = {
    "shuffled": _shuffled,
    "padding": _with_padding,
    "some_empty": _some_empty,
    "none": _none,
    "no_rows": _none,
    "single": _single,
    "ragged": _ragged,
    "duplicates": _duplicates,
    "reverse": _reverse,
    "complete": _complete,
    "same": _same,
    "sparse": _sparse,
    "identity": _identity,
}


def pattern(name: str, tokens: int, topk: int, seed: int, device: torch.device) -> tuple[Tensor, int]:
    """(positions int32 [tokens, topk], rows of x) of a named pattern. But for "complete", row 0 and the last row are
    never referenced, so that a kernel which reads -1 as row 0 or as the last row meets poison."""
    if name not in PATTERNS:
        raise unknown_name("routing pattern", name, PATTERNS)
    positions = PATTERNS[name](tokens, topk, seed, device)
    if name == "no_rows":
        rows = 0
    elif name == "sparse":
        positions, rows = positions.clamp(min=-1), SPARSE_ROWS
    elif name == "complete":
        rows = tokens * topk
    elif name == "duplicates":
        rows = max(3, tokens * topk // 4 + 1)  # fewer rows than slots
    else:
        rows = tokens * topk + 2
    return positions.to(torch.int32), rows
