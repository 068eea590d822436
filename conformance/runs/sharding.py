"""``--shard I/N``: which part of the plan one machine of several does.

Whole groups (cases that share data) go to one shard, the dearest first, each to the shard that has least so far. A few
*identity* items per operator run in every shard, so that the machines' agreement can be checked when shards are joined.
Everything follows from the plan and from recorded costs alone: every machine computes the same split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from conformance.case import Case
from conformance.errors import ConformanceError

IDENTITY = 2  # cases per operator and architecture that every shard repeats, on all their kernels
# Without records an item costs this much, and its memory's traffic at a modest bandwidth. Only ratios matter.
_ITEM_SECONDS, _BYTES_PER_SECOND = 0.02, 4e9
_FORM = re.compile(r"([1-9]\d{0,4})/([1-9]\d{0,4})")


@dataclass(frozen=True)
class Shard:
    """Number ``index`` (from 1) of ``count``."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, slots=True)
class Item:
    """What splitting needs to know of one planned item."""

    nodeid: str
    case: Case
    kernel: str
    arch: str
    group: str


@dataclass(frozen=True)
class Split:
    """``home``: the shard (from 1) of each item. ``identity``: indices of the items that every shard runs.
    ``seconds``: the estimated cost of each shard, identity items left out."""

    home: tuple[int, ...]
    identity: frozenset[int]
    seconds: tuple[float, ...]


def parse_shard(text: str | None) -> Shard | None:
    """``"I/N"`` as a shard. Raises ConformanceError unless 1 <= I <= N."""
    if text is None:
        return None
    found = _FORM.fullmatch(text.strip())
    shard = Shard(int(found[1]), int(found[2])) if found else None
    if shard is None or shard.index > shard.count:
        raise ConformanceError(f"--shard {text}: give I/N with 1 <= I <= N <= 99999, as in --shard 1/4")
    return shard


def split(items: Sequence[Item], costs: Sequence[float], count: int) -> Split:
    """Divide items among ``count`` shards; ``costs`` in seconds, one per item."""
    members: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        members.setdefault(item.group, []).append(index)
    weights = {group: sum(costs[index] for index in indices) for group, indices in members.items()}
    loads = [0.0] * count
    home = [0] * len(items)
    for group in sorted(members, key=lambda group: (-weights[group], group)):
        lightest = min(range(count), key=lambda shard: (loads[shard], shard))
        loads[lightest] += weights[group]
        for index in members[group]:
            home[index] = lightest + 1
    return Split(tuple(home), _identity(items), tuple(round(load, 3) for load in loads))


def _identity(items: Sequence[Item]) -> frozenset[int]:
    """The items that every shard repeats: plain cases of the smoke tier where there are some, spread by digest."""
    cases: dict[tuple[str, str], dict[str, Case]] = {}
    for item in items:
        cases.setdefault((item.arch, item.case.operator), {})[item.case.id] = item.case
    chosen = {
        (arch, case.id)
        for (arch, _), found in cases.items()
        for case in sorted(found.values(), key=_rank)[:IDENTITY]
    }
    return frozenset(index for index, item in enumerate(items) if (item.arch, item.case.id) in chosen)


def _rank(case: Case) -> tuple[bool, bool, str]:
    # An edge family may need a device that is not here, and exact data hide differences in rounding.
    return bool(case.family), "smoke" not in case.tiers, hashlib.sha256(case.id.encode()).hexdigest()


def estimate(nbytes: int) -> float:
    """Seconds that an item is taken for while nothing was recorded, from the peak memory of its case."""
    return _ITEM_SECONDS + nbytes / _BYTES_PER_SECOND


def recorded_costs(
    seconds: Mapping[str, float], keys: Sequence[str], kernels: Sequence[str], guesses: Sequence[float]
) -> list[float]:
    """The cost of each item: as recorded, or the median of its kernel's, or the guess where that has none."""
    by_kernel: dict[str, list[float]] = {}
    for name, kernel in zip(keys, kernels, strict=True):
        if name in seconds:
            by_kernel.setdefault(kernel, []).append(seconds[name])
    typical = {kernel: median(found) for kernel, found in by_kernel.items()}
    return [seconds.get(name, typical.get(kernel, guess))
            for name, kernel, guess in zip(keys, kernels, guesses, strict=True)]
