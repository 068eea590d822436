"""Covering subsets of a matrix, and the t-way coverage that a set of cases really reaches.

A t-way combination is a choice of t parameters with a value each; a set covers it when some case holds it.
Only combinations that some case of the whole matrix holds are counted (constraints make others impossible).
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.disk_cache import cache_dir, keep, kept

Params = Mapping[str, str]
Combination = tuple[tuple[str, str], ...]
_MANY = 100  # cases


def combinations_of(params: Params, strength: int) -> set[Combination]:
    """All ``strength``-way combinations that one case holds."""
    return set(itertools.combinations(params.items(), strength))


def coverage(subset: Sequence[Params], whole: Sequence[Params], strength: int) -> tuple[int, int]:
    """(covered, possible) t-way combinations of ``whole`` that ``subset`` holds."""
    possible = set().union(*(combinations_of(p, strength) for p in whole)) if whole else set()
    covered = set().union(*(combinations_of(p, strength) for p in subset)) if subset else set()
    return len(covered & possible), len(possible)


class _Bits(dict[Any, int]):
    """A bit for each combination, in order of first use: sets of them are numbers, and quickly compared."""

    def __missing__(self, combination: Any) -> int:
        value = self[combination] = 1 << len(self)
        return value

    def mask(self, combinations: Iterable[Any]) -> int:
        return functools.reduce(operator.or_, map(self.__getitem__, combinations), 0)


def covering_subset(cases: Sequence[Params], size: int, spread: Sequence[str] = ()) -> list[int]:
    """Indices of ``size`` cases that cover pairs, then triples, of their values, in matrix order; see `_chosen`.

    What was chosen from many is kept on disk: to choose again takes each process a second for all matrices.
    """
    if size >= len(cases) or size <= 0:
        return list(range(len(cases))) if size > 0 else []
    if len(cases) < _MANY:
        return _chosen(cases, size, spread)
    question = json.dumps([[list(params.items()) for params in cases], size, list(spread), _this_module()])
    note = cache_dir() / "covering" / hashlib.sha256(question.encode()).hexdigest()[:32]
    if (known := _kept(note, size, len(cases))) is not None:
        return known
    found = _chosen(cases, size, spread)
    keep(note, json.dumps(found))
    return found


def _kept(note: Path, size: int, count: int) -> list[int] | None:
    """The indices that a note holds; None unless they are ``size`` different ones of ``count``, ascending: anybody may
    have written to a folder that is shared, and a run of fewer cases would pass."""
    try:
        found = json.loads(kept(note) or "")
        right = len(found) == size and all(type(index) is int for index in found) and sorted({*found}) == found
        return found if right and found[0] >= 0 and found[-1] < count else None
    except (ValueError, TypeError, RecursionError):
        return None


@functools.cache
def _this_module() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _chosen(cases: Sequence[Params], size: int, spread: Sequence[str]) -> list[int]:
    """``size`` of more cases, chosen greedily.

    Each step takes the case that adds the most uncovered pairs (while any is left), then triples; ties go to the
    case whose parameter values were used least so far, then to the earliest: deterministic, no random draw. Each
    combination of values of the parameters ``spread`` counts like one more pair. A case's gain only ever shrinks,
    so a heap of stale gains needs to re-measure its top alone (lazy greedy).
    """
    codes: dict[Any, int] = {}
    points = [[codes.setdefault(item, len(codes)) for item in params.items()] for params in cases]
    extra = [tuple(params.get(key) for key in spread) for params in cases]
    bit = _Bits()
    pairs = [bit.mask(itertools.chain(itertools.combinations(point, 2), [more]))
             for point, more in zip(points, extra, strict=True)]
    bit = _Bits()
    triples = [bit.mask(itertools.combinations(point, 3)) for point in points]
    open_pairs, open_triples = -1, -1  # bits of those that no chosen case has
    used = [0] * len(codes)

    def gain(index: int) -> tuple[int, int, int, int]:
        fresh = (pairs[index] & open_pairs).bit_count(), (triples[index] & open_triples).bit_count()
        return -fresh[0], -fresh[1], sum([used[code] for code in points[index]]), index

    heap = [gain(index) for index in range(len(cases))]
    heapq.heapify(heap)
    chosen: list[int] = []
    while len(chosen) < size:
        index = heap[0][3]
        current = gain(index)
        if current != heap[0]:
            heapq.heapreplace(heap, current)
            continue
        heapq.heappop(heap)
        chosen.append(index)
        open_pairs &= ~pairs[index]
        open_triples &= ~triples[index]
        for code in points[index]:
            used[code] += 1
    return sorted(chosen)
