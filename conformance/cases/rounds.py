"""Which cases each mutant is run on, in three rounds.

The first: few that differ most; right kernels get all but the large ones, of gigabytes. The second: all others but the
large ones, for those that are alive. The third: the large ones, for those that are alive still and for their twins. A
run without rounds gives every mutant all the cases that it is shown on.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from conformance.case import Case
from conformance.kernel import Kernel
from conformance.mutants import is_control, is_mutant, is_shown
from conformance.registry import matrix

VARIABLE = "CONFORMANCE_ZOO_ROUND"  # how pytest's processes are told
CASE_SECONDS = 30.0  # what an endless kernel costs; right ones compile within it
FEW = 24  # from one case of each edge family, as a rule; they kill nine mutants in ten


@dataclass(frozen=True)
class Round:
    """few: cases of each mutant in the first round. survivors: "operator/name" of the mutants, in the third round of
    their twins too, that this round is for; None in the first round. large: whether it is the third."""

    few: int = FEW
    survivors: tuple[str, ...] | None = None
    large: bool = False

    def text(self) -> str:
        return json.dumps([self.few, self.survivors, self.large])

    def takes(self, kernel: Kernel, cases: Sequence[Case]) -> frozenset[str]:
        """Ids of the cases that a mutant or control is run on in this round, of those that it is shown on."""
        first = self.survivors is None
        if not first and f"{kernel.operator}/{kernel.name}" not in (self.survivors or ()):
            return frozenset()
        if self.large:
            return frozenset(case.id for case in cases if is_large(case))
        ids = [case.id for case in in_turn([case for case in cases if not is_large(case)])]
        if is_control(kernel):
            return frozenset(ids)
        return frozenset(ids[: self.few] if first else ids[self.few :])


def is_large(case: Case) -> bool:
    """Whether a case is for one kind of device because of its size. Others of these are for a way to launch."""
    return bool(matrix(case.operator).devices(case)) and "launch" not in case.params


@functools.cache
def this_round() -> Round | None:
    """The round that this process belongs to, None where it belongs to none."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    few, survivors, large = json.loads(text)
    return Round(few, None if survivors is None else tuple(survivors), large)


def cases_on(kernel: Kernel, cases: Sequence[Case]) -> frozenset[str] | None:
    """Ids of the cases that are planned for a kernel; None for all, as of every kernel that is no mutant or twin."""
    if not is_mutant(kernel) and not is_control(kernel):
        return None
    shown = [case for case in cases if is_shown(kernel, case.params)]
    now = this_round()
    return frozenset(case.id for case in shown) if now is None else now.takes(kernel, shown)


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """The cases of all edge families, and those of none, in turn: of each first the smaller half, which cost less and
    show as much, from far apart. Families for one kind of device come last."""
    families: dict[tuple[bool, str], list[Case]] = {}
    for case in cases:
        families.setdefault((bool(matrix(case.operator).devices(case)), case.family or ""), []).append(case)
    general = [_halves(found) for (special, _), found in families.items() if not special]
    special = [case for (special, _), found in families.items() if special for case in found]
    rounds = range(max(map(len, general), default=0))
    return [*(found[place] for place in rounds for found in general if place < len(found)), *special]


def _halves(cases: Sequence[Case]) -> list[Case]:
    by_size = sorted(cases, key=_size)
    middle = (len(cases) + 1) // 2
    return [*_spread(by_size[:middle]), *_spread(by_size[middle:])]


def _size(case: Case) -> int:
    """The product of all numbers among the parameters: good enough to tell small cases from large ones."""
    return prod(max(1, int(value)) for value in case.params.values() if value.isdecimal())


def _spread(cases: Sequence[Case]) -> Iterator[Case]:
    """First the first one, then the middle, then the quarters, and so on."""
    if not cases:
        return
    seen: set[int] = set()
    bits = max(1, (len(cases) - 1).bit_length())
    for number in range(1 << bits):
        place = int(format(number, f"0{bits}b")[::-1], 2) * len(cases) >> bits
        if place not in seen:
            seen.add(place)
            yield cases[place]
