"""Metamorphic relations of moe_sorting on every kernel that runs here. What is compared is what a sort says of every
slot, its expert and its weight, whatever the order within a run; all of it exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relations import every_kernel, handed, tries
from torch import Tensor

from conformance import mutants
from conformance.kernel import Kernel
from conformance.registry import MUTANTS, kernels

OPERATOR = "moe_sorting"
EXPERTS, BLOCK = 7, 16
all_kernels = every_kernel(OPERATOR)
exactly = tries()


@dataclass(frozen=True)
class Placed:
    """Read from a sort's outputs: the local expert of each slot [T, k], -1 where it has none, the bits of its weight,
    0 there, and the rows of each local expert, [E]."""

    expert: Tensor
    weight: Tensor
    rows: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placed) and all(
            torch.equal(getattr(self, name), getattr(other, name)) for name in ("expert", "weight", "rows"))


@dataclass(frozen=True)
class Routes:
    """ids [T, k], -1 in some slots, and weights of which no two are alike."""

    ids: Tensor
    weights: Tensor

    def on(self, kernel: Kernel, mask: Tensor | None = None) -> Placed:
        given: dict[str, Any] = {"topk_ids": self.ids, "topk_weights": self.weights, "expert_mask": mask}
        given |= {"experts": EXPERTS, "block": BLOCK, "hidden": 4, "buffer_dtype": torch.bfloat16}
        found: Mapping[str, Tensor] = kernel(**handed(given), invalid="skip", duplicates="keep")
        return placed({name: one.cpu() for name, one in found.items()}, *self.ids.shape)

    def at(self, order: Any) -> Routes:
        return Routes(self.ids[order], self.weights[order])


def placed(found: Mapping[str, Tensor], tokens: int, topk: int) -> Placed:
    """Every row of the list is a route or padding, no route stands twice, and behind the valid rows is none."""
    valid, count = found["num_valid_ids"].tolist()
    assert count == tokens and valid % BLOCK == 0 and not found["moe_buf"].view(torch.int16).any()
    ids, owners = found["sorted_token_ids"], found["sorted_expert_ids"]
    route = ids != (topk << 24 | tokens)
    assert not route[valid:].any()
    row = route.nonzero().flatten()
    token, slot = ids[row] & 0xFFFFFF, ids[row] >> 24
    assert bool(((token < tokens) & (slot >= 0) & (slot < topk)).all())
    assert len({*zip(token.tolist(), slot.tolist(), strict=True)}) == len(row)
    expert, weight = torch.full((tokens, topk), -1), torch.zeros(tokens, topk, dtype=torch.int32)
    expert[token, slot] = owners[row // BLOCK].long()
    weight[token, slot] = found["sorted_weights"][row].view(torch.int32)
    blocks = owners[: valid // BLOCK].long()
    assert bool((blocks[1:] >= blocks[:-1]).all())
    return Placed(expert, weight, torch.bincount(blocks, minlength=EXPERTS) * BLOCK)


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    tokens, topk = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :topk].int()
    ids = ids.masked_fill(torch.rand(tokens, topk, generator=generator) < 0.15, -1)
    return Routes(ids, torch.arange(1.0, tokens * topk + 1).view(tokens, topk))


@all_kernels
@exactly
@given(drawn=routes(), chance=st.randoms(use_true_random=False))
def test_tokens_are_independent_of_their_order(kernel, drawn, chance):
    order = chance.sample(range(len(drawn.ids)), len(drawn.ids))
    whole, moved = drawn.on(kernel), drawn.at(order).on(kernel)
    assert moved == Placed(whole.expert[order], whole.weight[order], whole.rows)


@all_kernels
@exactly
@given(drawn=routes(), chance=st.randoms(use_true_random=False))
def test_slots_may_be_reordered_with_their_weights(kernel, drawn, chance):
    order = chance.sample(range(drawn.ids.shape[1]), drawn.ids.shape[1])
    whole, moved = drawn.on(kernel), drawn.at((slice(None), order)).on(kernel)
    assert moved == Placed(whole.expert[:, order], whole.weight[:, order], whole.rows)


@all_kernels
@exactly
@given(drawn=routes(), chance=st.randoms(use_true_random=False))
def test_experts_may_be_relabelled(kernel, drawn, chance):
    name = torch.tensor(chance.sample(range(EXPERTS), EXPERTS))
    renamed = torch.where(drawn.ids < 0, drawn.ids, name[drawn.ids.clamp(min=0).long()].int())
    whole, moved = drawn.on(kernel), Routes(renamed, drawn.weights).on(kernel)
    expert = torch.where(whole.expert < 0, -1, name[whole.expert.clamp(min=0)])
    rows = torch.zeros_like(whole.rows)
    rows[name] = whole.rows
    assert moved == Placed(expert, whole.weight, rows)


@all_kernels
@exactly
@given(drawn=routes(), local=st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS))
def test_expert_parallel_ranks_share_the_routes(kernel, drawn, local):
    """Every route is at one of two ranks, under the number that its expert has there."""
    here, whole = torch.tensor(local), drawn.on(kernel)
    for side in (here, ~here):
        number = torch.where(side, side.long().cumsum(0) - 1, -1)
        found = drawn.on(kernel, side.to(torch.int32) * 3)
        expert = torch.where(whole.expert < 0, -1, number[whole.expert.clamp(min=0)])
        rows = torch.zeros_like(whole.rows)
        rows[: int(side.sum())] = whole.rows[side]
        assert found == Placed(expert, torch.where(expert < 0, 0, whole.weight), rows)


@all_kernels
@exactly
@given(drawn=routes(), at=st.integers(0, 40))
def test_a_batch_may_be_split(kernel, drawn, at):
    whole = drawn.on(kernel)
    parts = [drawn.at(part).on(kernel) for part in (slice(at), slice(at, None))]
    assert torch.equal(torch.cat([part.expert for part in parts]), whole.expert)
    assert torch.equal(torch.cat([part.weight for part in parts]), whole.weight)
    assert bool((sum(part.rows for part in parts) >= whole.rows).all())


@all_kernels
@exactly
@given(drawn=routes(), count=st.integers(1, 4))
def test_padding_tokens_that_are_appended_change_nothing(kernel, drawn, count):
    tokens, topk = drawn.ids.shape
    longer = Routes(torch.cat([drawn.ids, torch.full((count, topk), -1).int()]),
                    torch.cat([drawn.weights, torch.full((count, topk), torch.nan)])).on(kernel)
    whole = drawn.on(kernel)
    assert Placed(longer.expert[:tokens], longer.weight[:tokens], longer.rows) == whole
    assert bool((longer.expert[tokens:] == -1).all())


@all_kernels
@exactly
@given(drawn=routes(), which=st.integers(0, 39))
def test_a_token_twice_has_its_routes_twice(kernel, drawn, which):
    order = [*range(len(drawn.ids)), which % len(drawn.ids)]
    whole, twice = drawn.on(kernel), drawn.at(order).on(kernel)
    assert torch.equal(twice.expert, whole.expert[order]) and torch.equal(twice.weight, whole.weight[order])


@all_kernels
@exactly
@given(drawn=routes(), expert=st.integers(0, EXPERTS - 1))
def test_a_slot_without_an_expert_is_a_slot_removed(kernel, drawn, expert):
    """Routes of an expert that is taken away: the others stay as they are, and it has no block."""
    whole, rest = drawn.on(kernel), Routes(drawn.ids.masked_fill(drawn.ids == expert, -1), drawn.weights).on(kernel)
    gone = whole.expert == expert
    rows = whole.rows.clone()
    rows[expert] = 0
    assert rest == Placed(whole.expert.masked_fill(gone, -1), whole.weight.masked_fill(gone, 0), rows)


@all_kernels
@exactly
@given(drawn=routes(), power=st.integers(-140, 60))
def test_a_power_of_two_passes_through(kernel, drawn, power):
    scaled = drawn.weights * 2.0**power
    whole, moved = drawn.on(kernel), Routes(drawn.ids, scaled).on(kernel)
    assert torch.equal(moved.expert, whole.expert)
    assert torch.equal(moved.weight, torch.where(whole.expert < 0, 0, scaled.view(torch.int32)))


@pytest.mark.parametrize(("name", "relation"), [
    ("weight_next_token", test_tokens_are_independent_of_their_order),
    ("weight_next_slot", test_slots_may_be_reordered_with_their_weights),
    ("last_expert", test_experts_may_be_relabelled),
    ("global_ids", test_expert_parallel_ranks_share_the_routes),
    ("last_token", test_a_batch_may_be_split),
    ("negative_is_0", test_padding_tokens_that_are_appended_change_nothing),
    ("weight_next_token", test_a_token_twice_has_its_routes_twice),
    ("empty_not_numbered", test_a_slot_without_an_expert_is_a_slot_removed),
    ("weight_twice", test_a_power_of_two_passes_through),
])
def test_each_relation_sees_a_mutant(name, relation):
    kernels(OPERATOR, (MUTANTS,))
    with pytest.raises(AssertionError):
        relation(kernel=mutants.mutants(OPERATOR)[name].kernel)
