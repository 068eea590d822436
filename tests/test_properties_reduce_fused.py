"""Metamorphic relations of moe_reduce_fused on every kernel that runs here: no reference says what is right.

On exact data every order of summation gives the same bits, so all relations are bitwise there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import relations
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from relations import equal, handed, tries
from torch import Tensor

from conformance import mutants
from conformance.formats import bits
from conformance.operator import Call, Reference
from conformance.registry import MUTANTS, kernels, operator
from conformance.verdicts.verdict import golden_fraction, judge

OPERATOR = "moe_reduce_fused"
HIDDEN = 256
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Sum:
    """A drawn call: x [E, H] fp32 of small integers, positions [T, K], weights [T, K] and x_sf [E] powers of two."""

    x: Tensor
    positions: Tensor
    weights: Tensor
    x_sf: Tensor

    def on(self, kernel, **changes: Tensor) -> Tensor:
        given = {"x": self.x, "token_topk_to_pos": self.positions, "topk_weights": self.weights, "x_sf": self.x_sf}
        return kernel(**handed(given | changes)).cpu()


@st.composite
def sums(draw: st.DrawFn) -> Sum:
    tokens, topk, rows = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    positions = torch.randint(-rows // 3 - 1, rows, (tokens, topk), generator=generator).clamp(min=-1).int()
    x = torch.randint(-8, 9, (rows, HIDDEN), generator=generator).float()
    weights = torch.exp2(torch.randint(-2, 3, (tokens, topk), generator=generator).float())
    return Sum(x, positions, weights, torch.exp2(torch.randint(-2, 3, (rows,), generator=generator).float()))


exactly = tries()
every_kernel = relations.every_kernel(OPERATOR)


@every_kernel
@exactly
@given(sums(), st.randoms(use_true_random=False))
def test_tokens_are_independent_of_their_order(kernel, drawn, chance):
    order = chance.sample(range(len(drawn.positions)), len(drawn.positions))
    moved = drawn.on(kernel, token_topk_to_pos=drawn.positions[order], topk_weights=drawn.weights[order])
    assert equal(moved, drawn.on(kernel)[order])


@every_kernel
@exactly
@given(sums(), st.randoms(use_true_random=False))
def test_slots_may_be_reordered_with_their_weights(kernel, drawn, chance):
    order = chance.sample(range(drawn.positions.shape[1]), drawn.positions.shape[1])
    moved = drawn.on(kernel, token_topk_to_pos=drawn.positions[:, order], topk_weights=drawn.weights[:, order])
    assert equal(moved, drawn.on(kernel))


@every_kernel
@exactly
@given(sums(), st.randoms(use_true_random=False))
def test_rows_may_be_relabelled(kernel, drawn, chance):
    order = torch.tensor(chance.sample(range(len(drawn.x)), len(drawn.x)))
    where = torch.argsort(order).int()
    positions = torch.where(drawn.positions < 0, -1, where[drawn.positions.clamp(min=0).long()])
    moved = drawn.on(kernel, x=drawn.x[order], x_sf=drawn.x_sf[order], token_topk_to_pos=positions)
    assert equal(moved, drawn.on(kernel))


@every_kernel
@exactly
@given(sums(), st.integers(0, 8))
def test_a_slot_of_weight_0_is_a_slot_removed(kernel, drawn, slot):
    slot %= drawn.positions.shape[1]
    weights, positions = drawn.weights.clone(), drawn.positions.clone()
    weights[:, slot], positions[:, slot] = 0.0, -1
    assert equal(drawn.on(kernel, topk_weights=weights), drawn.on(kernel, token_topk_to_pos=positions))


@every_kernel
@exactly
@given(sums(), st.integers(-20, 20), st.sampled_from(("x", "topk_weights", "x_sf")))
def test_a_power_of_two_passes_through(kernel, drawn, power, name):
    value = {"x": drawn.x, "topk_weights": drawn.weights, "x_sf": drawn.x_sf}[name]
    assert equal(drawn.on(kernel, **{name: value * 2.0**power}), drawn.on(kernel) * 2.0**power)


@every_kernel
@exactly
@given(sums(), st.integers(1, 4))
def test_padding_tokens_that_are_appended_change_nothing(kernel, drawn, count):
    tokens, topk = drawn.positions.shape
    positions = torch.cat([drawn.positions, torch.full((count, topk), -1, dtype=torch.int32)])
    weights = torch.cat([drawn.weights, torch.full((count, topk), torch.nan)])
    longer = drawn.on(kernel, token_topk_to_pos=positions, topk_weights=weights)
    assert equal(longer[:tokens], drawn.on(kernel))
    assert bool((bits(longer[tokens:]) == 0).all())


@every_kernel
@exactly
@given(sums(), st.integers(0, 9))
def test_a_batch_may_be_split(kernel, drawn, at):
    parts = [drawn.on(kernel, token_topk_to_pos=drawn.positions[part], topk_weights=drawn.weights[part])
             for part in (slice(at), slice(at, None))]
    assert equal(torch.cat(parts), drawn.on(kernel))


@every_kernel
@exactly
@given(sums(), st.integers(0, 9))
def test_expert_parallel_ranks_add_up(kernel, drawn, at):
    """Slots that are split over two ranks: the sum of both partial results is the whole."""
    here = torch.arange(drawn.positions.shape[1]) < at
    parts = [drawn.on(kernel, token_topk_to_pos=drawn.positions.masked_fill(mask, -1)) for mask in (here, ~here)]
    assert equal(parts[0] + parts[1], drawn.on(kernel))


@every_kernel
@exactly
@given(sums())
def test_what_e4m3_holds_comes_out_as_it_went_in(kernel, drawn):
    """Quantised, read back, and quantised again: one slot without a weight, of numbers that a first pass rounded."""
    alone = torch.arange(len(drawn.x), dtype=torch.int32)[:, None]
    code = torch.arange(drawn.x.numel()).view(drawn.x.shape) * 37 % 256
    code = code.masked_fill(code % 128 == 127, 0).to(torch.uint8)  # without the two codes of NaN
    once = code.view(torch.float8_e4m3fn)
    given_ = {"x": once.float(), "token_topk_to_pos": alone}
    again = kernel(**handed(given_), out_dtype=torch.float8_e4m3fn).cpu()
    same = (bits(again) == bits(once)) | ((code == 128) & (bits(again) == 0))  # a sum of -0 is +0
    assert bool(same.all())


@every_kernel
@exactly
@given(sums(), st.integers(0, 8))
def test_a_token_twice_gives_its_row_twice(kernel, drawn, which):
    order = torch.tensor([*range(len(drawn.positions)), which % len(drawn.positions)])
    twice = drawn.on(kernel, token_topk_to_pos=drawn.positions[order], topk_weights=drawn.weights[order])
    assert equal(twice, drawn.on(kernel)[order])


@every_kernel
@exactly
@given(sums(), st.integers(0, 2**31))
def test_linear_in_the_weights_within_the_budget(kernel, drawn, seed):
    """w = a + b on random values; the search is driven to where the error fills most of the budget."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(drawn.x.shape, generator=generator)
    share = torch.rand(drawn.weights.shape, generator=generator)
    parts = [drawn.on(kernel, x=x, topk_weights=drawn.weights * part) for part in (share, 1 - share)]
    fraction = _fraction(drawn, x, kernel)
    target(fraction)
    assert fraction <= 1
    terms = drawn.on(kernel, x=x.abs(), topk_weights=drawn.weights)
    bound = terms * 4 * (drawn.positions.shape[1] + 2) * 2.0**-24
    assert bool(((parts[0] + parts[1] - drawn.on(kernel, x=x)).abs() <= bound).all())


def _fraction(drawn: Sum, x: Tensor, kernel) -> float:
    """The budget fraction of a kernel's result against the oracle."""
    from conformance.case import Case
    from references.moe_reduce_fused import golden, oracle

    given = {"x": x, "token_topk_to_pos": drawn.positions, "topk_weights": drawn.weights, "x_sf": drawn.x_sf}
    given["sf"] = None
    right = golden(**given)
    reference = Reference(right, lambda: oracle(given))
    form = operator(OPERATOR).output(given, None)
    call = Call(Case(OPERATOR, {}), given, form, lambda which: None)
    found = judge(drawn.on(kernel, x=x), call, reference, "within-budget", golden_fraction(reference)())
    return found.budget_fraction if found.passed and found.budget_fraction is not None else 2.0


@pytest.mark.parametrize(("name", "relation"), [
    ("map_weight_token", test_tokens_are_independent_of_their_order),
    ("tail_odd_slot", test_slots_may_be_reordered_with_their_weights),
    ("sentinel_zero", test_rows_may_be_relabelled),
    ("sentinel_row_0", test_a_slot_of_weight_0_is_a_slot_removed),
    ("semantic_weighted_twice", test_a_power_of_two_passes_through),
    ("map_rows_rolled", test_padding_tokens_that_are_appended_change_nothing),
    ("map_weight_token", test_a_batch_may_be_split),
    ("semantic_mean", test_expert_parallel_ranks_add_up),
    ("precision_bf16_sum", test_linear_in_the_weights_within_the_budget),
])
def test_each_relation_sees_a_mutant(name, relation):
    kernels(OPERATOR, (MUTANTS,))
    with pytest.raises(AssertionError):
        relation(kernel=mutants.mutants(OPERATOR)[name].kernel)
