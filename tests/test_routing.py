"""Routing: upstream's generator against a slow model, and what each pattern promises."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from engine_samples import CPU, digest, mixed

from conformance.data.routing import PATTERNS, SPARSE_ROWS, expanded_positions, expert_parallel, pattern
from conformance.errors import ConformanceError

SHAPES = [(0, 2), (1, 1), (2, 8), (5, 4), (37, 3), (61, 9)]


def slow_expert_parallel(send: int, topk: int, experts: int, ranks: int, seed: int) -> list[list[int]]:
    """Every token takes the experts with the largest scores; rank 0's are kept, the others become -1, and tokens
    without any of rank 0's are dropped."""
    kept = []
    for token in range(send * ranks):
        scores = {expert: mixed(token * experts + expert, seed) for expert in range(experts)}
        chosen = sorted(scores, key=lambda expert: -scores[expert])[:topk]
        mine = [expert if expert < experts // ranks else -1 for expert in chosen]
        if max(mine) >= 0:
            kept.append(mine)
    return kept


def slow_positions(ids: list[list[int]]) -> list[list[int]]:
    """Slots sorted by (expert, token, slot) are numbered from 0."""
    slots = sorted((expert, t, j) for t, row in enumerate(ids) for j, expert in enumerate(row) if expert >= 0)
    number = {(t, j): n for n, (_, t, j) in enumerate(slots)}
    return [[number.get((t, j), -1) for j in range(len(row))] for t, row in enumerate(ids)]


# ---- expert parallelism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("send", "topk", "experts", "ranks"), [
    (3, 2, 16, 8), (6, 6, 12, 4), (2, 9, 72, 8), (5, 1, 8, 8), (4, 3, 6, 1), (1, 8, 256, 64),
])
def test_against_the_slow_model(send: int, topk: int, experts: int, ranks: int) -> None:
    for seed in (1, 0x7654321):
        ids = expert_parallel(send, topk, experts, ranks, seed, CPU)
        expected = slow_expert_parallel(send, topk, experts, ranks, seed)
        assert ids.tolist() == expected
        assert ids.shape == (len(expected), topk)
        assert expanded_positions(ids).tolist() == slow_positions(expected)


def test_golden_routing() -> None:
    ids = expert_parallel(40, 6, 72, 8, 2024, CPU)
    assert ids.shape == (183, 6)
    assert digest(ids) == "79046ea48c4c8db4"
    assert digest(expanded_positions(ids)) == "14d3b81c47d092d8"


def test_experts_of_a_token_are_distinct_and_local() -> None:
    ids = expert_parallel(200, 8, 72, 8, 5, CPU)
    assert bool((ids >= 0).any(dim=1).all())
    assert int(ids.max()) == 8
    assert int(ids.min()) == -1
    for row in ids.tolist():
        local = [expert for expert in row if expert >= 0]
        assert len(local) == len(set(local))


def test_experts_are_chosen_uniformly() -> None:
    ids = expert_parallel(2000, 6, 72, 1, 3, CPU)  # one rank: nothing is dropped or padded
    assert ids.shape == (2000, 6)
    counts = torch.bincount(ids.flatten(), minlength=72)
    assert len(counts) == 72
    assert int(counts.min()) > 110  # 166.7 expected, deviation 12.4
    assert int(counts.max()) < 225


@pytest.mark.parametrize(("topk", "tokens", "slots"), [(2, 7.6e3, 8.0e3), (8, 21.7e3, 32.0e3)])
def test_the_official_size_is_upstreams_without_ties(topk: int, tokens: float, slots: float) -> None:
    ids = expert_parallel(4001, topk, 72, 8, 17, CPU)
    assert len(ids) == pytest.approx(tokens, rel=0.02)
    assert int((ids >= 0).sum()) == pytest.approx(slots, rel=0.02)


def test_a_cap_keeps_the_first_tokens() -> None:
    whole = expert_parallel(40, 6, 72, 8, 2024, CPU)
    assert torch.equal(expert_parallel(40, 6, 72, 8, 2024, CPU, most=50), whole[:50])
    assert torch.equal(expert_parallel(40, 6, 72, 8, 2024, CPU, most=10**6), whole)


def test_drawing_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expert_parallel(40, 6, 72, 8, 2024, CPU)
    monkeypatch.setattr("conformance.data.routing._CHUNK", 72 * 7)
    assert torch.equal(expert_parallel(40, 6, 72, 8, 2024, CPU), whole)
    assert torch.equal(expert_parallel(40, 6, 72, 8, 2024, CPU, most=33), whole[:33])


def test_no_tokens_at_all() -> None:
    ids = expert_parallel(0, 1, 1, 1, 3, CPU)
    assert ids.shape == (0, 1)
    assert expanded_positions(ids).shape == (0, 1)


@pytest.mark.parametrize("ranks", [1, 8])
def test_positions_are_a_bijection_grouped_by_expert(ranks: int) -> None:
    ids = expert_parallel(150, 6, 72, ranks, 8, CPU)
    positions = expanded_positions(ids)
    assert positions.dtype == torch.int32
    assert torch.equal(positions < 0, ids < 0)
    valid = positions[positions >= 0]
    assert sorted(valid.tolist()) == list(range(len(valid)))
    by_position = sorted(zip(positions.flatten().tolist(), ids.flatten().tolist(), range(ids.numel()), strict=True))
    experts = [(expert, place // 6) for position, expert, place in by_position if position >= 0]
    assert experts == sorted(experts)  # by expert, and within an expert by token


# ---- patterns -----------------------------------------------------------------------------------------------------


ROWS = {"complete": lambda slots: slots, "duplicates": lambda slots: max(3, slots // 4 + 1),
        "sparse": lambda slots: SPARSE_ROWS, "no_rows": lambda slots: 0}


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize(("tokens", "topk"), SHAPES)
def test_the_form_of_every_pattern(name: str, tokens: int, topk: int) -> None:
    positions, rows = pattern(name, tokens, topk, 12, CPU)
    assert positions.shape == (tokens, topk)
    assert positions.dtype == torch.int32
    assert rows == ROWS.get(name, lambda slots: slots + 2)(tokens * topk)
    assert bool(((positions >= -1) & (positions < rows)).all())
    again, _ = pattern(name, tokens, topk, 12, CPU)
    assert torch.equal(positions, again)


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"complete"}))
@pytest.mark.parametrize(("tokens", "topk"), SHAPES)
def test_row_0_and_the_last_row_are_never_referenced(name: str, tokens: int, topk: int) -> None:
    positions, rows = pattern(name, tokens, topk, 12, CPU)
    referenced = positions[positions != -1]
    assert bool(((referenced >= 1) & (referenced <= rows - 2)).all())


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"duplicates", "none", "no_rows", "same"}))
def test_no_row_is_referenced_twice(name: str) -> None:
    positions, _ = pattern(name, 61, 9, 12, CPU)
    valid = positions[positions >= 0].tolist()
    assert len(valid) == len(set(valid)) > 0


def test_only_the_padding_patterns_have_padding() -> None:
    with_padding = {name for name in PATTERNS if bool((pattern(name, 61, 9, 12, CPU)[0] < 0).any())}
    assert with_padding == {"padding", "some_empty", "none", "no_rows", "single", "ragged", "duplicates", "sparse"}


def test_shuffled_is_a_permutation_in_no_order() -> None:
    positions, _ = pattern("shuffled", 61, 9, 12, CPU)
    values = positions.flatten().tolist()
    assert sorted(values) == list(range(1, 550))
    rising = sum(a < b for a, b in itertools.pairwise(values))
    assert 0.4 < rising / 548 < 0.6
    other, _ = pattern("shuffled", 61, 9, 13, CPU)
    assert not torch.equal(positions, other)


def test_padding_drops_a_quarter_and_keeps_the_others_in_place() -> None:
    positions, _ = pattern("padding", 61, 9, 12, CPU)
    full, _ = pattern("shuffled", 61, 9, 12, CPU)
    kept = positions >= 0
    assert torch.equal(positions[kept], full[kept])
    assert 0.2 < float((~kept).float().mean()) < 0.3


def test_some_empty_empties_every_third_token() -> None:
    positions, _ = pattern("some_empty", 61, 9, 12, CPU)
    assert bool((positions[::3] == -1).all())
    assert bool((positions[1::3] >= 0).any(dim=1).all())


def test_none_is_padding_only() -> None:
    assert pattern("none", 3, 2, 12, CPU)[0].tolist() == [[-1, -1]] * 3


def test_single_has_one_slot_per_token_at_every_place() -> None:
    positions, _ = pattern("single", 7, 3, 12, CPU)
    places = [[j for j, p in enumerate(row) if p >= 0] for row in positions.tolist()]
    assert places == [[0], [1], [2], [0], [1], [2], [0]]


def test_ragged_has_every_count_from_0_to_k_at_the_front() -> None:
    positions, _ = pattern("ragged", 11, 4, 12, CPU)
    counts = [sum(p >= 0 for p in row) for row in positions.tolist()]
    assert counts == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert all(all(p >= 0 for p in row[:n]) for row, n in zip(positions.tolist(), counts, strict=True))


def test_duplicates_within_a_token_and_between_tokens() -> None:
    positions, _ = pattern("duplicates", 35, 6, 12, CPU)
    assert torch.equal(positions[:, 0], positions[:, -1])
    assert bool((positions[::2, 1] == -1).all())
    assert bool((positions[1::2] >= 0).all())
    users: Counter[int] = Counter(p for row in positions.tolist() for p in set(row) if p >= 0)
    assert max(users.values()) >= 3
    assert bool((pattern("duplicates", 35, 2, 12, CPU)[0] >= 0).all())


def test_complete_refers_to_every_row() -> None:
    positions, rows = pattern("complete", 61, 9, 12, CPU)
    assert sorted(positions.flatten().tolist()) == list(range(rows)) == list(range(549))


def test_same_refers_to_one_row_in_all_slots_of_a_token() -> None:
    positions, _ = pattern("same", 61, 9, 12, CPU)
    assert bool((positions == positions[:, :1]).all())
    assert len(positions[:, 0].unique()) == 61


def test_sparse_refers_to_few_rows_far_apart_beyond_two_to_the_16() -> None:
    positions, rows = pattern("sparse", 19, 8, 12, CPU)
    valid = sorted(positions[positions >= 0].tolist())
    assert rows == 70001
    assert 2**16 < valid[-1] < 70000
    assert min(b - a for a, b in itertools.pairwise(valid)) >= 70001 // 153
    assert bool((positions == -1).any())


def test_identity_and_reverse() -> None:
    assert pattern("identity", 2, 3, 12, CPU)[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert pattern("reverse", 2, 3, 12, CPU)[0].tolist() == [[6, 5, 4], [3, 2, 1]]


def test_an_unknown_pattern_lists_the_known_ones() -> None:
    with pytest.raises(ConformanceError, match=r"unknown routing pattern 'shufled'\. Did you mean 'shuffled'"):
        pattern("shufled", 2, 2, 0, CPU)
