"""Metamorphic relations of the operators of two-stage MoE on every kernel that runs here, within summed budgets.

A sum may be taken in any order, so two ways to ask the same need not give the same bits; each answer lies within its
own budget, and both together within the sum. Powers of two pass through bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from hypothesis import given
from hypothesis import strategies as st
from relations import DEVICE, EXAMPLES, Answer, agree, equal, every_kernel, output_of, tries
from torch import Tensor

from conformance import mutants
from conformance.case import Case
from conformance.kernel import Kernel
from conformance.operator import Arguments, Call, Shared
from conformance.registry import MUTANTS, kernels, operator
from references.moe_gemm_2stage.sorting import sort

FEW = tries(EXAMPLES // 3)
OPERATORS = ("moe_gemm1", "moe_gemm2", "moe_gemm_2stage")
EXPERTS = 6
every_one = [(name, kernel) for name in OPERATORS for kernel in every_kernel(name).args[1]]
all_kernels = pytest.mark.parametrize(("name", "kernel"), every_one, ids=lambda value: getattr(value, "name", value))
stage_2 = pytest.mark.parametrize(("name", "kernel"), [one for one in every_one if one[0] != "moe_gemm1"],
                                  ids=lambda value: getattr(value, "name", value))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, str]:
    """Parameters of a case: slot-major rows with scales, or plain ones without; all experts are here."""
    kind, out = draw(st.sampled_from([("int8smooth", "f16"), ("bf16", "bf16")]))
    return {"tokens": str(draw(st.integers(1, 9))), "hidden": "128", "inter": "64", "experts": str(EXPERTS),
            "topk": str(draw(st.integers(1, 3))), "bm": "16", "in": kind, "out": out,
            "mode": draw(st.sampled_from(["atomic", "reduce"])), "mask": "no", "data": "real",
            "draw": str(draw(st.integers(1, 1000)))}


def call_of(name: str, params: dict[str, str]) -> Call:
    known = {key: value for key, value in params.items() if key != "mode" or name != "moe_gemm1"}
    return operator(name).inputs(Case(name, known), "official", DEVICE, Shared())


def changed(call: Call, **changes: Any) -> Call:
    """The call with other arguments, and its routes sorted again."""
    arguments: Arguments = call.arguments | changes
    found = sort(arguments["topk_ids"], arguments["topk_weights"], EXPERTS, arguments["block"],
                 arguments["expert_mask"])
    arguments |= {"sorted_token_ids": found.token_ids, "sorted_expert_ids": found.expert_ids,
                  "sorted_weights": found.weights, "num_valid_ids": found.num_valid[:1].clone()}
    arguments = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    of = operator(call.case.operator)
    return replace(call, arguments=arguments, form=of.output(arguments, call.output.dtype),
                   set_poison=lambda which: None, bitwise_rows=None)


def answer(kernel: Kernel, call: Call) -> Answer:
    with torch.no_grad():
        reference = operator(call.case.operator).reference(call, Shared())
        return Answer.of(output_of(kernel, call), reference)


def on_tokens(call: Call, order: Tensor) -> Call:
    """The call on tokens in another order, some left out or more than once."""
    given, (tokens, topk) = call.arguments, call.arguments["topk_ids"].shape
    moved: dict[str, Any] = {key: given[key][order] for key in ("topk_ids", "topk_weights")}
    for key, shape in (("x", (topk, tokens)), ("scale_x", (topk, tokens))):
        if given.get(key) is not None:
            slot_major = len(given[key]) != tokens or given["in_dtype"] == "int8smooth"
            moved[key] = (given[key].view(*shape, *given[key].shape[1:])[:, order].reshape(-1, *given[key].shape[1:])
                          if slot_major else given[key][order])
    if "a2" in given:
        moved["a2"] = given["a2"][order]
        if given["scale_a2"] is not None:
            moved["scale_a2"] = given["scale_a2"].view(tokens, topk)[order].flatten()
    return changed(call, **moved)


def rows_of(call: Call, order: Tensor) -> Tensor:
    """The rows of the output that belong to tokens."""
    tokens, topk = call.arguments["topk_ids"].shape
    if call.output.shape[0] == tokens and not per_slot(call):
        return order
    return (order[:, None] * topk + torch.arange(topk, device=DEVICE)).flatten()


def per_slot(call: Call) -> bool:
    return "w2" not in call.arguments or ("a2" in call.arguments and call.arguments["combine"] == "reduce")


def masked(call: Call, here: Tensor) -> Call:
    """The call where only the experts of a bool mask [E] are local: their weights come first."""
    given = call.arguments
    order = torch.cat([here.nonzero().flatten(), (~here).nonzero().flatten()])
    moved: dict[str, Any] = {"expert_mask": here.to(torch.int32)}
    for key in ("w1", "w2", "scale_w1", "scale_w2"):
        if given.get(key) is not None:
            moved[key] = given[key][order]
    if given.get("smooth2") is not None:
        moved["smooth2"] = given["smooth2"][here]
    return changed(call, **moved)


@all_kernels
@FEW
@given(params=calls(), chance=st.randoms(use_true_random=False))
def test_tokens_are_independent_of_their_order(name, kernel, params, chance):
    call = call_of(name, params)
    count = len(call.arguments["topk_ids"])
    order = torch.tensor(chance.sample(range(count), count), device=DEVICE)
    agree(answer(kernel, on_tokens(call, order)), answer(kernel, call)[rows_of(call, order)])


@all_kernels
@FEW
@given(params=calls(), at=st.integers(0, 9))
def test_a_batch_may_be_split(name, kernel, params, at):
    call = call_of(name, params)
    count = len(call.arguments["topk_ids"])
    whole, tokens = answer(kernel, call), torch.arange(count, device=DEVICE)
    for label, part in (("first", tokens[:at]), ("second", tokens[at:])):
        agree(answer(kernel, on_tokens(call, part)), whole[rows_of(call, part)], label)


@all_kernels
@FEW
@given(params=calls(), which=st.integers(0, 8))
def test_a_token_twice_gives_its_row_twice(name, kernel, params, which):
    call = call_of(name, params)
    count = len(call.arguments["topk_ids"])
    order = torch.tensor([*range(count), which % count], device=DEVICE)
    agree(answer(kernel, on_tokens(call, order)), answer(kernel, call)[rows_of(call, order)])


@all_kernels
@FEW
@given(params=calls(), chance=st.randoms(use_true_random=False))
def test_experts_may_be_relabelled(name, kernel, params, chance):
    call = call_of(name, params)
    order = torch.tensor(chance.sample(range(EXPERTS), EXPERTS), device=DEVICE)  # new expert n was order[n]
    moved = {key: call.arguments[key][order] for key in ("w1", "w2", "scale_w1", "scale_w2", "smooth2")
             if call.arguments.get(key) is not None}
    ids = torch.argsort(order)[call.arguments["topk_ids"].long()].to(torch.int32)
    agree(answer(kernel, changed(call, topk_ids=ids, **moved)), answer(kernel, call))


@all_kernels
@FEW
@given(params=calls(), chance=st.randoms(use_true_random=False))
def test_slots_may_be_reordered_with_their_weights(name, kernel, params, chance):
    call = call_of(name, params | {"topk": "3"})
    given_, (tokens, topk) = call.arguments, call.arguments["topk_ids"].shape
    order = torch.tensor(chance.sample(range(topk), topk), device=DEVICE)
    moved: dict[str, Any] = {key: given_[key][:, order] for key in ("topk_ids", "topk_weights")}
    if given_["in_dtype"] == "int8smooth" and "x" in given_:
        for key in ("x", "scale_x"):
            moved[key] = given_[key].view(topk, tokens, *given_[key].shape[1:])[order].reshape(given_[key].shape)
    if "a2" in given_:
        moved["a2"] = given_["a2"][:, order]
        if given_["scale_a2"] is not None:
            moved["scale_a2"] = given_["scale_a2"].view(tokens, topk)[:, order].flatten()
    whole = answer(kernel, call)
    rows = (torch.arange(tokens, device=DEVICE)[:, None] * topk + order).flatten()
    agree(answer(kernel, changed(call, **moved)), whole[rows] if per_slot(call) else whole)


@all_kernels
@FEW
@given(params=calls(), local=st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS))
def test_expert_parallel_ranks_add_up(name, kernel, params, local):
    call = call_of(name, params | {"out": "f32"} if name != "moe_gemm1" and params["mode"] == "atomic" else params)
    here = torch.tensor(local, device=DEVICE)
    agree(answer(kernel, masked(call, here)) + answer(kernel, masked(call, ~here)), answer(kernel, call))


@all_kernels
@FEW
@given(params=calls(), count=st.integers(1, 3))
def test_padding_tokens_that_are_appended_change_nothing(name, kernel, params, count):
    """Tokens whose experts all live elsewhere."""
    call = call_of(name, params)
    here = torch.arange(EXPERTS, device=DEVICE) < EXPERTS - call.arguments["topk_ids"].shape[1]
    tokens, topk = call.arguments["topk_ids"].shape
    order = torch.tensor([*range(tokens), *[0] * count], device=DEVICE)
    longer = on_tokens(call, order)
    ids = longer.arguments["topk_ids"].clone()
    ids[tokens:] = torch.arange(EXPERTS - topk, EXPERTS, device=DEVICE, dtype=torch.int32)
    weights = longer.arguments["topk_weights"].clone()
    weights[tokens:] = torch.nan
    found = answer(kernel, masked(changed(longer, topk_ids=ids, topk_weights=weights), here))
    rows = len(found.value) - count * (topk if per_slot(call) else 1)
    agree(found[slice(rows)], answer(kernel, masked(call, here)))
    assert bool((found.value[rows:] == 0).all())


@stage_2
@FEW
@given(params=calls(), expert=st.integers(0, EXPERTS - 1))
def test_slots_of_weight_0_are_slots_removed(name, kernel, params, expert):
    call = call_of(name, params)
    weights = call.arguments["topk_weights"].masked_fill(call.arguments["topk_ids"] == expert, 0.0)
    without = masked(call, torch.arange(EXPERTS, device=DEVICE) != expert)
    agree(answer(kernel, changed(call, topk_weights=weights)), answer(kernel, without))


@stage_2
@FEW
@given(params=calls(), power=st.integers(-3, 3))
def test_a_power_of_two_in_the_weights_passes_through(name, kernel, params, power):
    """Bit by bit in f32, which no scaled number leaves."""
    call = call_of(name, params | {"out": "f32", "mode": "atomic", "topk": str(min(2, int(params["topk"])))})
    scaled = changed(call, topk_weights=call.arguments["topk_weights"] * 2.0**power)
    assert equal(output_of(kernel, scaled), output_of(kernel, call) * 2.0**power)


@stage_2
@FEW
@given(params=calls(), share=st.floats(0.1, 0.9))
def test_linear_in_the_weights(name, kernel, params, share):
    call = call_of(name, params | {"out": "f32", "mode": "atomic"})
    weights = call.arguments["topk_weights"]
    parts = [answer(kernel, changed(call, topk_weights=weights * part)) for part in (share, 1 - share)]
    agree(parts[0] + parts[1], answer(kernel, call))


RELATIONS = [
    ("moe_gemm2", "token_0", test_tokens_are_independent_of_their_order),
    ("moe_gemm1", "target_slot_major", test_a_batch_may_be_split),
    ("moe_gemm1", "one_row_experts", test_a_token_twice_gives_its_row_twice),
    ("moe_gemm1", "expert_0", test_experts_may_be_relabelled),
    ("moe_gemm2", "weight_of_slot_0", test_slots_may_be_reordered_with_their_weights),
    ("moe_gemm2", "mask_ignored", test_expert_parallel_ranks_add_up),
    ("moe_gemm2", "mask_ignored", test_padding_tokens_that_are_appended_change_nothing),
    ("moe_gemm2", "no_weight", test_slots_of_weight_0_are_slots_removed),
    ("moe_gemm_2stage", "weight_twice", test_a_power_of_two_in_the_weights_passes_through),
    ("moe_gemm_2stage", "weight_twice", test_linear_in_the_weights),
]


@pytest.mark.parametrize(("name", "mutant", "relation"), RELATIONS)
def test_each_relation_sees_a_mutant(name, mutant, relation):
    kernels(name, (MUTANTS,))
    with pytest.raises(AssertionError):
        relation(name=name, kernel=mutants.mutants(name)[mutant].kernel)
