"""Covering subsets of a matrix, and the t-way coverage that a set of cases really reaches.

A t-way combination is a choice of t parameters with a value each; a set covers it when some case holds it.
Only combinations that some case of the whole matrix holds are counted (constraints make others impossible).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Params = Mapping[str, str]
Combination = tuple[tuple[str, str], ...]


def combinations_of(params: Params, strength: int) -> set[Combination]:
    """All ``strength``-way combinations that one case holds."""
    return set(itertools.combinations(params.items(), strength))


def coverage(subset: Sequence[Params], whole: Sequence[Params], strength: int) -> tuple[int, int]:
    """(covered, possible) t-way combinations of ``whole`` that ``subset`` holds."""
    possible = set().union(*(combinations_of(p, strength) for p in whole)) if whole else set()
    covered = set().union(*(combinations_of(p, strength) for p in subset)) if subset else set()
    return len(covered & possible), len(possible)


def covering_subset(cases: Sequence[Params], size: int) -> list[int]:
    """Indices of ``size`` cases chosen greedily so that pairs, then triples, are covered; in matrix order.

    Each step takes the case that adds the most uncovered pairs (while any is left), then triples; ties go to the
    case whose parameter values were used least so far, then to the earliest: deterministic, no random draw.
    """
    pairs = [combinations_of(params, 2) for params in cases]
    triples = [combinations_of(params, 3) for params in cases]
    left_pairs: set[Combination] = set().union(*pairs) if pairs else set()
    left_triples: set[Combination] = set().union(*triples) if triples else set()
    used: dict[tuple[str, str], int] = {}
    chosen: list[int] = []
    remaining = set(range(len(cases)))
    while remaining and len(chosen) < size:
        best = max(
            remaining,
            key=lambda i: (
                len(pairs[i] & left_pairs),
                len(triples[i] & left_triples),
                -sum(used.get(item, 0) for item in cases[i].items()),
                -i,
            ),
        )
        remaining.remove(best)
        chosen.append(best)
        left_pairs -= pairs[best]
        left_triples -= triples[best]
        for item in cases[best].items():
            used[item] = used.get(item, 0) + 1
    return sorted(chosen)
