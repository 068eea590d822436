"""Covering subsets: what they reach is measured here by brute force, not by the code that chose them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from engine_samples import NAME

from conformance.case import Case
from conformance.cases import coverage as coverage_module
from conformance.cases.coverage import combinations_of, coverage, covering_subset
from conformance.registry import matrix


def held(cases: Iterable[Case], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {chosen for case in cases for chosen in itertools.combinations(sorted(case.params.items()), strength)}


def product(*sizes: int) -> list[dict[str, str]]:
    axes = [[str(value) for value in range(size)] for size in sizes]
    return [{f"k{number}": value for number, value in enumerate(point)} for point in itertools.product(*axes)]


def test_smoke_covers_every_pair_and_93_percent_of_triples() -> None:
    of = matrix(NAME)
    smoke, official = of.cases("smoke"), of.cases("official")
    assert len(smoke) == 48
    assert held(smoke, 2) == held(official, 2)
    assert len(held(official, 2)) == 244
    assert len(held(official, 3)) == 1378
    assert len(held(smoke, 3)) / 1378 >= 0.93
    for strength in (1, 2, 3):
        assert coverage([c.params for c in smoke], [c.params for c in official], strength) == (
            len(held(smoke, strength)), len(held(official, strength)))


def test_96_cases_cover_every_triple() -> None:
    official = [case.params for case in matrix(NAME).cases("official")]
    chosen = [official[index] for index in covering_subset(official, 96)]
    assert coverage(chosen, official, 3) == (1378, 1378)


def test_smoke_compiles_everything_that_official_does() -> None:
    of = matrix(NAME)
    keys = ("in", "out", "weights", "xsf")
    assert {tuple(c.get(k) for k in keys) for c in of.cases("smoke")} == {
        tuple(c.get(k) for k in keys) for c in of.cases("official")}


@pytest.mark.parametrize(("sizes", "size"), [((3, 3, 2), 10), ((4, 4, 4), 24), ((2, 2, 2, 2, 2), 8)])
def test_pairs_are_covered_with_few_cases(sizes: Sequence[int], size: int) -> None:
    whole = product(*sizes)
    chosen = covering_subset(whole, size)
    assert len(chosen) == len(set(chosen)) == size
    assert chosen == sorted(chosen)
    covered, possible = coverage([whole[index] for index in chosen], whole, 2)
    assert covered == possible == sum(a * b for a, b in itertools.combinations(sizes, 2))


def test_spread_covers_combinations_of_more_than_two_parameters() -> None:
    whole = product(4, 3, 2, 2, 2)
    spread = ("k2", "k3", "k4")

    def combinations(chosen: Sequence[int]) -> int:
        return len({tuple(whole[index][key] for key in spread) for index in chosen})

    assert combinations(covering_subset(whole, 8, spread)) == 8
    assert combinations(covering_subset(whole, 8)) == 6  # pairs alone leave two out


def test_a_subset_of_everything_is_everything() -> None:
    whole = product(2, 2)
    assert covering_subset(whole, 4) == [0, 1, 2, 3]
    assert covering_subset(whole, 9) == [0, 1, 2, 3]
    assert covering_subset(whole, 0) == []
    assert covering_subset([], 3) == []


def test_the_choice_is_the_greedy_one() -> None:
    """Against a plain greedy that measures every candidate anew in each step."""
    whole = product(3, 2, 2, 3)
    covered: set[tuple[int, object]] = set()
    used: dict[tuple[str, str], int] = {}
    expected: list[int] = []

    def rank(index: int) -> tuple[int, int, int, int]:
        point = whole[index]
        gains = [len({(n, c) for c in combinations_of(point, n)} - covered) for n in (2, 3)]
        return -gains[0], -gains[1], sum(used.get(item, 0) for item in point.items()), index

    for _ in range(12):
        best = min((index for index in range(len(whole)) if index not in expected), key=rank)
        expected.append(best)
        covered |= {(n, c) for n in (2, 3) for c in combinations_of(whole[best], n)}
        for item in whole[best].items():
            used[item] = used.get(item, 0) + 1
    assert covering_subset(whole, 12) == sorted(expected)


def test_coverage_of_nothing() -> None:
    assert coverage([], product(2, 2), 2) == (0, 4)
    assert coverage([], [], 2) == (0, 0)
    assert coverage([{"k0": "7", "k1": "7"}], product(2, 2), 2) == (0, 4)  # what the matrix lacks does not count


def test_what_was_chosen_is_kept_and_chosen_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_module, "cache_dir", lambda: tmp_path)
    cases = product(5, 6, 7)
    first = covering_subset(cases, 42)
    (note,) = (tmp_path / "covering").iterdir()
    calls = []
    chosen = coverage_module._chosen
    monkeypatch.setattr(coverage_module, "_chosen", lambda *given: calls.append(given) or chosen(*given))
    assert covering_subset(cases, 42) == first and not calls
    note.write_bytes(note.read_bytes()[:-2])
    assert covering_subset(cases, 42) == first and len(calls) == 1
    last = first[:-1]
    for wrong in ([0], last, [*last, 10**9], [-1, *first[1:]], first[::-1], [*last, True], [*last, last[-1]], {}, 3):
        coverage_module.keep(note, json.dumps(wrong))
        assert covering_subset(cases, 42) == first, wrong
    coverage_module.keep(note, "[" * 100_000)
    assert covering_subset(cases, 42) == first
    calls[1:] = []
    others = [covering_subset(cases, 41), covering_subset(cases, 42, ("k0", "k2")), covering_subset(cases[:-1], 42)]
    assert len(calls) == 4 and len(list((tmp_path / "covering").iterdir())) == 4
    assert [len(other) for other in others] == [41, 42, 42]
