"""Metamorphic relations of moe_reduction on every kernel that runs here: no reference says what is right.

On exact data every order of summation gives the same bits, so all relations are bitwise there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relations import Answer, agree, equal, every_kernel, handed, output_of, tries
from torch import Tensor

from conformance import mutants
from conformance.case import Case
from conformance.kernel import Kernel
from conformance.operator import Call, Shared
from conformance.registry import MUTANTS, kernels, operator

OPERATOR = "moe_reduction"
EXPERTS, HIDDEN = 5, 256
all_kernels = every_kernel(OPERATOR)
exactly = tries()


@dataclass(frozen=True)
class Sum:
    """part [T, k, H] bf16 of small integers, ids [T, k], mask [E]; ids may be no expert."""

    part: Tensor
    ids: Tensor
    mask: Tensor

    def on(self, kernel: Kernel, **changes: Any) -> Tensor:
        given = {"part": self.part, "topk_ids": self.ids, "expert_mask": self.mask} | changes
        found: Tensor = kernel(**handed(given))
        return found.cpu()

    @property
    def valid(self) -> Tensor:
        """bool [T, k]."""
        inside = (self.ids >= 0) & (self.ids < EXPERTS)
        return inside & (self.mask[self.ids.clamp(0, EXPERTS - 1).long()] != 0)


@st.composite
def sums(draw: st.DrawFn) -> Sum:
    tokens, topk = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    part = torch.randint(-8, 9, (tokens, topk, HIDDEN), generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, topk), generator=generator).int()
    return Sum(part, ids, torch.randint(0, 3, (EXPERTS,), generator=generator).int())


@all_kernels
@exactly
@given(drawn=sums(), chance=st.randoms(use_true_random=False))
def test_tokens_are_independent_of_their_order(kernel, drawn, chance):
    order = chance.sample(range(len(drawn.ids)), len(drawn.ids))
    assert equal(drawn.on(kernel, part=drawn.part[order], topk_ids=drawn.ids[order]), drawn.on(kernel)[order])


@all_kernels
@exactly
@given(drawn=sums(), chance=st.randoms(use_true_random=False))
def test_slots_may_be_reordered(kernel, drawn, chance):
    order = chance.sample(range(drawn.ids.shape[1]), drawn.ids.shape[1])
    assert equal(drawn.on(kernel, part=drawn.part[:, order], topk_ids=drawn.ids[:, order]), drawn.on(kernel))


@all_kernels
@exactly
@given(drawn=sums(), chance=st.randoms(use_true_random=False))
def test_experts_may_be_relabelled(kernel, drawn, chance):
    order = torch.tensor(chance.sample(range(EXPERTS), EXPERTS))
    inside = (drawn.ids >= 0) & (drawn.ids < EXPERTS)
    ids = torch.where(inside, torch.argsort(order)[drawn.ids.clamp(0, EXPERTS - 1).long()].int(), drawn.ids)
    assert equal(drawn.on(kernel, topk_ids=ids, expert_mask=drawn.mask[order]), drawn.on(kernel))


@all_kernels
@exactly
@given(drawn=sums())
def test_both_forms_of_a_mask_say_the_same(kernel, drawn):
    valid = drawn.valid.to(torch.uint8)
    assert equal(drawn.on(kernel, valid_mask=valid, topk_ids=None, expert_mask=None), drawn.on(kernel))


@all_kernels
@exactly
@given(drawn=sums())
def test_a_masked_slot_is_a_slot_of_zeros(kernel, drawn):
    part = torch.where(drawn.valid[..., None], drawn.part, 0)
    poisoned = torch.where(drawn.valid[..., None], drawn.part, torch.nan)
    right = drawn.on(kernel, part=part, topk_ids=None, expert_mask=None)
    assert equal(drawn.on(kernel, part=poisoned), right)


@all_kernels
@exactly
@given(drawn=sums(), power=st.integers(-20, 20))
def test_a_power_of_two_passes_through(kernel, drawn, power):
    assert equal(drawn.on(kernel, part=drawn.part * 2.0**power), drawn.on(kernel) * 2.0**power)


@all_kernels
@exactly
@given(drawn=sums(), count=st.integers(1, 4))
def test_padding_tokens_that_are_appended_change_nothing(kernel, drawn, count):
    tokens, topk = drawn.ids.shape
    part = torch.cat([drawn.part, torch.full((count, topk, HIDDEN), torch.nan).bfloat16()])
    longer = drawn.on(kernel, part=part, topk_ids=torch.cat([drawn.ids, torch.full((count, topk), -1).int()]))
    assert equal(longer[:tokens], drawn.on(kernel))
    assert not bool(longer[tokens:].view(torch.int16).any())


@all_kernels
@exactly
@given(drawn=sums(), at=st.integers(0, 9))
def test_a_batch_may_be_split(kernel, drawn, at):
    parts = [drawn.on(kernel, part=drawn.part[part], topk_ids=drawn.ids[part]) for part in (slice(at), slice(at, None))]
    assert equal(torch.cat(parts), drawn.on(kernel))


@all_kernels
@exactly
@given(drawn=sums(), which=st.integers(0, 8))
def test_a_token_twice_gives_its_row_twice(kernel, drawn, which):
    order = [*range(len(drawn.ids)), which % len(drawn.ids)]
    assert equal(drawn.on(kernel, part=drawn.part[order], topk_ids=drawn.ids[order]), drawn.on(kernel)[order])


@all_kernels
@exactly
@given(drawn=sums(), local=st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS))
def test_expert_parallel_ranks_add_up(kernel, drawn, local):
    here = torch.tensor(local)
    parts = [drawn.on(kernel, expert_mask=drawn.mask * side) for side in (here, ~here)]
    assert equal(parts[0] + parts[1], drawn.on(kernel))


@all_kernels
@exactly
@given(drawn=sums(), seed=st.integers(0, 2**31))
def test_linear_within_summed_budgets(kernel, drawn, seed):
    """The sum of two inputs, on random values in fp32; the search is driven to where the error fills the budget."""
    generator = torch.Generator().manual_seed(seed)
    one, two = (torch.randint(-4096, 4097, drawn.part.shape, generator=generator).float() / 4096 for _ in range(2))
    parts = [_answer(kernel, drawn, part) for part in (one, two, one + two)]  # the sums of inputs are exact
    agree(parts[0] + parts[1], parts[2])


def _answer(kernel: Kernel, drawn: Sum, part: Tensor) -> Answer:
    given = {"part": part, "valid_mask": None, "topk_ids": drawn.ids, "expert_mask": drawn.mask}
    given = handed(given)
    of = operator(OPERATOR)
    call = Call(Case(OPERATOR, {"in": "fp32"}), given, of.output(given, None), lambda which: None)
    return Answer.of(output_of(kernel, call), of.reference(call, Shared()))


@pytest.mark.parametrize(("name", "relation"), [
    ("mask_previous_token", test_tokens_are_independent_of_their_order),
    ("mask_slot_0", test_slots_may_be_reordered),
    ("id_clamped", test_experts_may_be_relabelled),
    ("id_wrapped", test_both_forms_of_a_mask_say_the_same),
    ("mask_ignored", test_a_masked_slot_is_a_slot_of_zeros),
    ("empty_nan", test_padding_tokens_that_are_appended_change_nothing),
    ("row_shift", test_a_batch_may_be_split),
    ("row_shift", test_a_token_twice_gives_its_row_twice),
    ("valid_mean", test_expert_parallel_ranks_add_up),
    ("bf16_sum", test_linear_within_summed_budgets),
])
def test_each_relation_sees_a_mutant(name, relation):
    kernels(OPERATOR, (MUTANTS,))
    with pytest.raises(AssertionError):
        relation(kernel=mutants.mutants(OPERATOR)[name].kernel)
