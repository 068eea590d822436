"""The sort of `references.moe_gemm_2stage.sorting` against a plain loop, its limits and its preconditions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_samples import one_thread as one_thread
from sorting_samples import by_loop, routes

from references.moe_gemm_2stage.sorting import (
    capacity,
    local_ids,
    pack,
    path,
    positions,
    routed,
    sentinel,
    sort,
    unpack,
)


@pytest.mark.parametrize(("tokens", "topk", "experts", "block"), [
    (1, 1, 1, 16), (3, 2, 4, 16), (7, 2, 8, 32), (33, 6, 32, 16), (129, 8, 16, 64), (64, 9, 17, 128), (0, 2, 4, 16),
    (40, 2, 256, 32), (3, 127, 128, 16), (50, 3, 3, 256),
])
@pytest.mark.parametrize("masked", [0.0, 0.3, 0.7, 1.0])
def test_sort_is_the_contract(tokens: int, topk: int, experts: int, block: int, masked: float) -> None:
    ids, weights = routes(tokens, topk, experts)
    mask = (np.random.default_rng(1).random(experts) >= masked).astype(np.int32)
    given = None if masked == 0.0 else torch.from_numpy(mask)
    found = sort(ids, weights, experts, block, given)
    expected = by_loop(ids, weights, experts, block, mask.tolist())
    assert [found.token_ids.tolist(), found.weights.tolist(), found.expert_ids.tolist(), found.num_valid.tolist()
            ] == list(expected)
    assert [x.dtype for x in (found.token_ids, found.weights, found.expert_ids, found.num_valid)] == [
        torch.int32, torch.float32, torch.int32, torch.int32]


def test_experts_with_0_1_block_minus_1_block_and_block_plus_1_tokens() -> None:
    counts, block = [0, 1, 15, 16, 17, 0], 16
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(counts)).to(torch.int32)[:, None]
    found = sort(ids, torch.ones(49, 1), 6, block)
    assert found.expert_ids[:5].tolist() == [1, 2, 3, 4, 4]
    assert found.num_valid.tolist() == [80, 49]
    pads = (found.token_ids.view(-1, block)[:5] == sentinel(49, 1)).sum(dim=1).tolist()
    assert pads == [15, 1, 0, 0, 15]


def test_packed_ids_and_their_limits() -> None:
    token, slot = torch.tensor([0, 5, 2**24 - 1]), torch.tensor([0, 127, 127])
    ids = pack(token, slot)
    assert ids.tolist() == [0, 127 << 24 | 5, 2**31 - 1]
    assert [part.tolist() for part in unpack(ids)] == [token.tolist(), slot.tolist()]
    assert unpack(pack(torch.tensor([3]), torch.tensor([128])))[1].tolist() == [-128]  # why k stops at 127
    assert sentinel(49, 2) == 2 << 24 | 49
    assert capacity(64, 2, 4, 16) == (190, 12)


def test_positions_invert_the_sort() -> None:
    ids, weights = routes(33, 4, 9)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.int32)
    found = sort(ids, weights, 9, 16, mask)
    where = positions(found, 33, 4)
    there = routed(ids, 9, mask)
    assert torch.equal(where >= 0, there)
    token, slot = there.nonzero().unbind(1)
    assert torch.equal(found.token_ids[where[token, slot].long()], pack(token, slot))
    local = local_ids(mask)
    assert local.tolist() == [0, -1, 1, 2, -1, 3, 4, 5, -1]
    assert torch.equal(found.expert_ids[where[token, slot].long() // 16], local[ids[token, slot].long()])


def test_positions_refuse_what_is_no_permutation() -> None:
    ids, weights = routes(5, 2, 4)
    found = sort(ids, weights, 4, 16)
    first = (found.token_ids != sentinel(5, 2)).nonzero().flatten()
    for value in (int(found.token_ids[first[1]]), 7, -(1 << 24)):
        changed = found.token_ids.clone()
        changed[first[0]] = value
        with pytest.raises(ValueError, match=r"stands twice|out of range"):
            positions(dataclasses.replace(found, token_ids=changed), 5, 2)


def test_a_fake_expert_slot_that_is_always_masked_changes_only_the_width() -> None:
    """Expert-parallel callers append one: k + 1 slots, the last of them of an expert that is never local."""
    ids, weights = routes(20, 3, 6)
    wide = torch.cat([ids, torch.full((20, 1), 6, dtype=torch.int32)], dim=1)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.int32)
    one = sort(ids, weights, 6, 16, mask[:6])
    two = sort(wide, torch.cat([weights, torch.ones(20, 1)], dim=1), 7, 16, mask)
    assert one.num_valid.tolist() == two.num_valid.tolist()
    routes_of = [set(x.token_ids.tolist()) - {sentinel(20, 3), sentinel(20, 4)} for x in (one, two)]
    assert routes_of[0] == routes_of[1]


def test_invalid_ids_and_duplicates_follow_the_stated_policy() -> None:
    ids = torch.tensor([[0, -1], [3, 1], [2, 4]], dtype=torch.int32)
    weights = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"topk_ids\[0, 1\] is -1: \[0, 4\) is required"):
        sort(ids, weights, 4, 16)
    found = sort(ids, weights, 4, 16, invalid="skip")
    assert set(found.token_ids.tolist()) == {0, 1, 1 << 24 | 1, 2, sentinel(3, 2)}
    assert positions(found, 3, 2)[0].tolist() == [0, -1]
    twice = torch.tensor([[1, 2], [3, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"token 1 lists an expert twice, \[3, 3\]"):
        sort(twice, weights[:2], 4, 16)
    kept = sort(twice, weights[:2], 4, 16, duplicates="keep")
    assert kept.token_ids[32:34].tolist() == [1, 1 << 24 | 1]
    both_out = torch.tensor([[-1, -1]], dtype=torch.int32)  # padding markers are no duplicates
    assert sort(both_out, weights[:1], 4, 16, invalid="skip").num_valid.tolist() == [0, 1]


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"topk_ids": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "topk_ids has dtype torch.int64"),
    ({"topk_weights": torch.zeros(2, 2).half()}, TypeError, "topk_weights has dtype torch.float16"),
    ({"expert_mask": torch.ones(4).bool()}, TypeError, "expert_mask has dtype torch.bool"),
    ({"topk_weights": torch.zeros(2, 3)}, ValueError, r"topk_weights \(2, 3\)"),
    ({"topk_ids": torch.zeros(1, 128, dtype=torch.int32), "topk_weights": torch.zeros(1, 128)}, ValueError, "k is 128"),
    ({"topk_ids": torch.zeros(1, 1, dtype=torch.int32).expand(1 << 24, 1),
      "topk_weights": torch.zeros(1, 1).expand(1 << 24, 1)}, ValueError, "T is 16777216: at most"),
    ({"expert_mask": torch.ones(3, dtype=torch.int32)}, ValueError, r"expert_mask has shape \(3,\)"),
    ({"block": 24}, ValueError, "BM is 24"), ({"block": 0}, ValueError, "BM is 0"), ({"block": 272}, ValueError, "BM"),
    ({"experts": 0}, ValueError, "E is 0"), ({"invalid": "wrap"}, ValueError, "one of reject, skip"),
    ({"duplicates": "drop"}, ValueError, "one of reject, keep"),
])
def test_preconditions(change: dict[str, object], error: type[Exception], message: str) -> None:
    ids, weights = routes(2, 2, 4)
    given: dict[str, object] = {"topk_ids": ids, "topk_weights": weights, "experts": 4, "block": 16}
    with pytest.raises(error, match=message):
        sort(**(given | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("experts", "topk", "limits"), [
    (256, 8, (16, 16)), (257, 8, (16, 16)), (385, 8, (16, 16)), (513, 9, (8, 16)), (640, 8, (8, 16)),
    (896, 16, (0, 16)), (1024, 8, (0, 16)),
])
def test_the_one_shot_limit_depends_on_shared_memory(experts: int, topk: int, limits: tuple[int, int]) -> None:
    """Published thresholds of gfx942 (64 KiB) and gfx950 (160 KiB)."""
    for shared, limit in zip((65536, 163840), limits, strict=True):
        found = [path(tokens, topk, experts, shared) for tokens in range(1, 65)]
        assert found == ["oneshot"] * limit + ["two_kernels"] * (64 - limit)
    assert [path(t, topk, experts, 65536) for t in (2048, 2049)] == ["two_kernels", "four_kernels"]
