"""moe_sorting as an operator: its matrix, golden, contract, and which results are right and which are not."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from sorting_samples import ALLOWED, EDITS, NAME, Edit, by_loop, call_of, loop_kernel, sample
from torch import Tensor

from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.formats import bits
from conformance.judging import vacuity
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.operator import Arguments, References, Shared
from conformance.registry import kernels, matrix, operator
from conformance.result import Result, Settings
from conformance.zoo.kill_matrix import cause_of
from references.moe_gemm_2stage.sorting import sentinel, sort

CONTRACT = operator(NAME)


def judged(kernel: Kernel, case: Case) -> Result:
    return Judge(Settings()).run(case, kernel)


def cpu_edge_cases() -> list[Case]:
    of = matrix(NAME)
    return [case for case in of.cases("edge") if not of.devices(case)]


# ---- the matrix and its data ----------------------------------------------------------------------------------------


def test_tiers_have_the_declared_numbers_of_cases() -> None:
    of = matrix(NAME)
    counts = {tier: len(of.cases(tier)) for tier in of.tier_names}
    assert counts == {"official": 240, "smoke": 36, "masks": 96, "models": 64, "edge": 320}
    assert len(of.plan(("smoke", "edge"))) - len(of.cases("edge")) == 36
    assert {case.get("mask") for case in of.cases("official")} == {"none", "half"}


def test_the_last_of_1024_experts_has_routes() -> None:
    """With one slot of 50 tokens it had none, and a kernel that numbers it 1022 passed."""
    last = [case for case in cpu_edge_cases() if case.family == "F13-last-expert"]
    assert [case.number("experts") for case in last] == [256, 512, 1024]
    for case in last:
        ids = operator(NAME).inputs(case, "reduced", torch.device("cpu"), Shared()).arguments["topk_ids"]
        assert int((ids == case.number("experts") - 1).sum()) > 0


def _sorts_in_16_bits(narrow: Callable[[Tensor], Tensor]) -> Kernel:
    """The reference with another number in the place of each token, given slot << 24 | token."""
    def sorts(topk_ids, topk_weights, expert_mask, experts, block, hidden,  # type: ignore[no-untyped-def]
              buffer_dtype, invalid, duplicates):
        found = sort(topk_ids, topk_weights, experts, block, expert_mask)
        padding = found.token_ids == sentinel(*topk_ids.shape)
        ids = torch.where(padding, found.token_ids, narrow(found.token_ids).to(torch.int32))
        return ids, found.weights, found.expert_ids, found.num_valid, torch.zeros(len(topk_ids), hidden,
                                                                                  dtype=buffer_dtype)

    return Kernel("sorts", NAME, sorts, "within-budget", parameters=frozenset(inspect.signature(sorts).parameters))


@pytest.mark.parametrize("narrow", [
    lambda ids: ids & ~0xFF8000,
    lambda ids: ids & ~0xFF0000,
    lambda ids: torch.where((ids & 0xFFFFFF) * 8 + (ids >> 24) > 0xFFFF, 0, ids),
])
def test_a_kernel_with_16_bits_for_tokens_or_routes_is_caught_without_a_gpu(narrow: Callable[[Tensor], Tensor]) -> None:
    """Cases of official sizes have as many only on a GPU."""
    cases = [case for case in cpu_edge_cases() if case.family == "F10-16-bits" and case.get("mask") == "none"]
    judge = Judge(Settings())
    assert {judge.run(case, _sorts_in_16_bits(narrow)).state for case in cases} >= {"fail"}
    assert {judge.run(case, _sorts_in_16_bits(lambda ids: ids)).state for case in cases} == {"pass"}


@pytest.mark.parametrize(("key", "change"), [
    ("tokens-routes", lambda w: w.outs["num_valid_ids"].__setitem__(1, 3 * w.outs["num_valid_ids"][1])),
    ("sentinel-last-slot", lambda w: w.outs["sorted_token_ids"].masked_fill_(
        w.outs["sorted_token_ids"] == w.pad, w.pad - 2**24)),
    ("sentinel-last-token", lambda w: w.outs["sorted_token_ids"].masked_fill_(
        w.outs["sorted_token_ids"] == w.pad, w.pad - 1)),
    ("owner-8-bit", lambda w: w.outs["sorted_expert_ids"].bitwise_and_(255)),
])
def test_the_first_sentence_names_it(key: str, change: Edit) -> None:
    case = sample(tokens=40, topk=3, experts=300 if key == "owner-8-bit" else 9, routing="even")
    assert cause_of(Judge(Settings()).run(case, loop_kernel(change)).record()) == key


@pytest.mark.parametrize(("mask", "routes", "blocks"), [(None, 4, 3), ([1, 0, 1, 1], 3, 2)])
def test_cost_counts_routed_slots_and_blocks_in_use(mask: list[int] | None, routes: int, blocks: int) -> None:
    """Two tokens of two slots on the experts 0, 1 and 0, 2 of 4."""
    call, _ = call_of(sample())
    given = call.arguments | {
        "topk_ids": torch.tensor([[0, 1], [0, 2]], dtype=torch.int32), "topk_weights": torch.ones(2, 2), "experts": 4,
        "block": 16, "hidden": 32, "buffer_dtype": torch.bfloat16,
        "expert_mask": None if mask is None else torch.tensor(mask, dtype=torch.int32),
    }
    found = CONTRACT.cost(replace(call, arguments=given, form=CONTRACT.output(given, None)))
    ids, read = 2 * 2 + 4 * 16 - 2, 4 * 4 + (0 if mask is None else 4 * 4)
    assert (found.flops, found.bytes) == (0, read + 8 * routes + 4 * blocks + 4 * ids + 2 * 4 + 2 * 32 * 2)


def test_the_golden_is_the_loop_in_every_edge_case() -> None:
    for case in cpu_edge_cases()[::3]:
        call, references = call_of(case)
        given = call.arguments
        mask = [1] * given["experts"] if given["expert_mask"] is None else given["expert_mask"].tolist()
        lists = by_loop(given["topk_ids"], bits(given["topk_weights"]), given["experts"], given["block"], mask)
        for (name, reference), expected in zip(references.of.items(), lists, strict=False):
            found = bits(reference.golden)
            assert torch.equal(found, torch.tensor(expected, dtype=found.dtype)), (case.id, name)
        assert not bits(references.of["moe_buf"].golden).any()
        assert {name: (one.golden.shape, one.golden.dtype) for name, one in references.of.items()} == {
            name: (form.shape, form.dtype) for name, form in call.outputs.items()}


def test_edge_cases_hold_what_their_families_are_for() -> None:
    seen: Counter[str] = Counter()
    for case in cpu_edge_cases():
        call, references = call_of(case)
        ids, experts, mask = (call.arguments[name] for name in ("topk_ids", "experts", "expert_mask"))
        counts = torch.bincount(ids[(ids >= 0) & (ids < experts)].long(), minlength=experts)
        seen["-1"] += bool((ids == -1).any())
        seen["INT_MIN"] += bool((ids == -(1 << 31)).any())
        seen["-2"] += bool((ids == -2).any())
        seen["-E"] += bool((ids == -experts).any())
        seen["E"] += bool((ids == experts).any())
        seen["all invalid"] += ids.numel() > 0 and bool((ids < 0).all())
        seen["full block"] += bool((counts == call.arguments["block"]).any())
        seen["one over"] += bool((counts == call.arguments["block"] + 1).any())
        seen["no token of expert 0"] += int(counts[0]) == 0
        seen["no token of the last"] += int(counts[-1]) == 0
        seen["packed id 0"] += bool((references.of["sorted_token_ids"].golden == 0).any())
        seen["mask is not 1"] += mask is not None and bool(((mask != 0) & (mask != 1)).any())
        seen["nothing local"] += mask is not None and not bool(mask.any())
        seen["127 slots"] += ids.shape[1] == 127
        seen["nan weight"] += bool(references.of["sorted_weights"].golden.isnan().any())
        payloads = bits(references.of["sorted_weights"].golden)[references.of["sorted_weights"].golden.isnan()]
        seen["signalling NaN"] += bool((payloads == 0x7F800001).any())
        seen["NaN of several payloads"] += len(payloads.unique()) > 3
        ordered = ids.sort(dim=1).values
        seen["duplicate"] += bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())
    assert min(seen.values()) >= 2, seen


def test_weights_of_slots_without_a_local_expert_are_poisoned_and_change_nothing() -> None:
    case = sample(mask="half", ids="holes")
    call, first = call_of(case)
    poisoned = call.arguments["topk_weights"].isnan()
    assert 0 < int(poisoned.sum()) < poisoned.numel()
    call.set_poison(1)
    assert (call.arguments["topk_weights"][poisoned] == 30000.0).all()
    second = References.made_of(CONTRACT.reference(call, Shared()))
    assert all(torch.equal(first.of[name].golden, second.of[name].golden) for name in first.of)


@pytest.mark.parametrize(("change", "message"), [
    ({"mask": "some"}, "unknown value of mask"), ({"routing": "block_tails"}, "needs topk:1"),
    ({"topk": 9}, "topk:9 is more than experts:7"), ({"out": "e4m3"}, "unknown value of out"),
])
def test_parameters_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        call_of(sample(**change))


# ---- the contract ---------------------------------------------------------------------------------------------------


def arguments(**change: Any) -> Arguments:
    call, _ = call_of(sample(tokens=4, topk=2, mask="half"))
    return call.arguments | change


IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0]], dtype=torch.int32)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"topk_ids": None}, TypeError, r"topk_ids is None: a tensor \[T, k\] is required"),
    ({"topk_ids": IDS.long()}, TypeError, "topk_ids has dtype torch.int64: torch.int32 is required"),
    ({"topk_ids": IDS[:, :0]}, ValueError, r"topk_ids has shape \(4, 0\): .*1 <= k <= 127"),
    ({"topk_ids": IDS[:1, :1].expand(1 << 24, 1)}, ValueError, r"topk_ids has shape \(16777216, 1\): .*T < 2\^24"),
    ({"topk_ids": IDS[:, :1].expand(4, 8)}, ValueError, "topk_ids has 8 slots and experts is 7: no more slots"),
    ({"topk_weights": None}, TypeError, "topk_weights is None: a tensor is required"),
    ({"topk_weights": torch.ones(4, 2).half()}, TypeError, "topk_weights has dtype torch.float16"),
    ({"topk_weights": torch.ones(4, 3)}, ValueError, r"topk_weights has shape \(4, 3\): \(4, 2\) is required"),
    ({"expert_mask": torch.ones(8, dtype=torch.int32)}, ValueError, r"expert_mask has shape \(8,\): \(7,\) is req"),
    ({"expert_mask": torch.ones(7, dtype=torch.bool)}, TypeError, "expert_mask has dtype torch.bool"),
    ({"experts": 0}, ValueError, "experts is 0: E >= 1 is required"),
    ({"hidden": -1}, ValueError, "hidden is -1: H >= 1 is required"),
    ({"block": 24}, ValueError, "block is 24: a multiple of 16 from 16 to 256 is required"),
    ({"block": 272}, ValueError, "block is 272"), ({"block": 16.0}, ValueError, "block is 16.0"),
    ({"experts": 1 << 28, "block": 16, "expert_mask": None}, ValueError, r"T k \+ experts block - k < 2\^31"),
    ({"buffer_dtype": torch.float64}, TypeError, "buffer_dtype is torch.float64: float16, bfloat16 or float32"),
    ({"invalid": "wrap"}, ValueError, "invalid is 'wrap': None or one of reject, skip"),
    ({"duplicates": "drop"}, ValueError, "duplicates is 'drop': None or one of reject, keep"),
    ({"topk_ids": torch.where(IDS == 3, -1, IDS)}, ValueError, r"topk_ids\[1, 1\] is -1: \[0, 7\) is required"),
    ({"topk_ids": torch.where(IDS == 3, 7, IDS)}, ValueError, r"topk_ids\[1, 1\] is 7: \[0, 7\) is required"),
    ({"topk_ids": torch.where(IDS == 3, 2, IDS)}, ValueError, r"token 1 lists an expert twice, \[2, 2\]"),
    ({"topk_ids": IDS.T.contiguous().T}, ValueError, r"topk_ids has strides \(1, 4\)"),
])
def test_a_call_that_breaks_a_rule_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    CONTRACT.validate(arguments(topk_ids=IDS), None, False)
    with pytest.raises(error, match=message):
        CONTRACT.validate(arguments(topk_ids=IDS) | change, None, False)


def test_policies_lift_the_preconditions() -> None:
    CONTRACT.validate(arguments(topk_ids=torch.where(IDS == 3, -1, IDS), invalid="skip"), None, False)
    CONTRACT.validate(arguments(topk_ids=torch.where(IDS == 3, 2, IDS), duplicates="keep"), None, False)


def test_outputs_are_checked_by_name() -> None:
    forms = call_of(sample())[0].outputs
    outs = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
    given = call_of(sample())[0].arguments
    CONTRACT.validate(given, outs, False)
    for name, wrong, error in (
        ("num_valid_ids", torch.empty(1, dtype=torch.int32), ValueError),
        ("sorted_token_ids", torch.empty(forms["sorted_token_ids"].shape, dtype=torch.int64), TypeError),
        ("moe_buf", torch.empty((45, 9), dtype=torch.bfloat16), ValueError),
    ):
        with pytest.raises(error, match=f"{name} has "):
            CONTRACT.validate(given, outs | {name: wrong}, False)


# ---- which results are right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "half", "none_left"])
def test_the_loop_is_right_and_bit_exact(mask: str) -> None:
    found = judged(loop_kernel(promise="bit-exact"), sample(mask=mask))
    assert (found.state, found.level, found.budget_fraction) == ("pass", "bit-exact", None), found.message
    call, _ = call_of(sample(mask=mask))
    assert found.elements == sum(torch.Size(form.shape).numel() for form in call.outputs.values())


@pytest.mark.parametrize("name", ALLOWED)
def test_another_order_in_a_run_and_garbage_in_open_places_are_right(name: str) -> None:
    for params in ({}, {"mask": "half"}, {"topk": 1, "routing": "one_expert"}, {"ids": "duplicates"}, {"tokens": 0}):
        found = judged(loop_kernel(edit=ALLOWED[name]), sample(**params))
        assert found.state == "pass", found.message
        same = name == "open places left" or params == {"tokens": 0}
        assert found.level == ("bit-exact" if same else "within-budget")


def test_another_order_is_wrong_where_bit_exactness_is_promised() -> None:
    found = judged(loop_kernel(edit=ALLOWED["runs in reverse"], promise="bit-exact"), sample())
    assert (found.state, found.kind) == ("fail", "bits")
    assert "right in another order, which only kernels that do not promise bit-exact may use" in found.message
    assert judged(loop_kernel(edit=ALLOWED["open places left"], promise="bit-exact"), sample()).state == "pass"


def test_an_order_that_no_fault_explains_is_said_to_be_right() -> None:
    found = judged(loop_kernel(edit=ALLOWED["runs rotated"], promise="bit-exact"), sample())
    diagnosis = (found.details or {})["diagnosis"]
    assert diagnosis["key"] == "other-order" and "promise='within-budget' is the level" in found.message, found.message


WRONG_PLACES = {"routes of two experts exchanged": "unexplained", "a route behind the valid rows": "unexplained",
                "a route twice": "one-element"}


@pytest.mark.parametrize("name", EDITS)
def test_a_route_in_a_wrong_place_is_found_and_told_where(name: str) -> None:
    found = judged(loop_kernel(edit=EDITS[name]), sample())
    assert (found.state, found.kind) == ("fail", "exact"), found.message
    diagnosis = (found.details or {})["diagnosis"]
    assert diagnosis["key"] == WRONG_PLACES[name] and "sorted_token_ids" in found.message


def test_no_two_explanations_have_one_key() -> None:
    keys = [fault.key for fault in CONTRACT.faulty_outputs]
    assert len(set(keys)) == len(keys) > 60


def test_a_result_of_an_earlier_call_is_recognised() -> None:
    kept: list[dict[str, Tensor]] = []

    def remembers(written: Any) -> None:
        if not kept:
            kept.append({name: one.clone() for name, one in written.outs.items()})
        for name, one in written.outs.items():
            one.copy_(kept[0][name])

    found = judged(loop_kernel(edit=remembers), sample(launch="redraw"))
    assert (found.details or {})["diagnosis"]["key"] == "remembered-result", found.message


def test_one_wrong_id_is_one_wrong_element_in_any_order() -> None:
    def one_wrong(written: Any) -> None:
        ALLOWED["runs rotated"](written)
        written.outs["sorted_token_ids"][3] = 2**24 * 9 + 1

    found = judged(loop_kernel(edit=one_wrong), sample())
    assert (found.wrong, found.first) == (1, {"output": "sorted_token_ids", "index": [3], "expected": found.first[
        "expected"], "actual": 2**24 * 9 + 1})
    assert isinstance(found.first["expected"], int)


def test_an_order_that_changes_from_call_to_call_must_be_declared() -> None:
    calls: list[int] = []

    def sometimes(written: Any) -> None:
        calls.append(1)
        if len(calls) % 2:
            ALLOWED["runs in reverse"](written)

    assert judged(loop_kernel(edit=sometimes, repeatable=False), sample()).state == "pass"
    found = judged(loop_kernel(edit=sometimes), sample())
    assert found.state == "fail" and found.kind in ("poison", "repeat")
    assert "sorted_token_ids of the result" in found.message


# ---- vacuity --------------------------------------------------------------------------------------------------------


def test_no_edge_case_accepts_what_is_wrong_on_purpose() -> None:
    for case in cpu_edge_cases()[::5]:
        assert vacuity.accepted(*call_of(case)) is None, case.id


def test_a_settlement_that_gives_in_is_noticed() -> None:
    call, references = call_of(sample())
    lax = References(references.of, lambda results: {
        name: type(one)(results[name], open=one.open) for name, one in references.of.items()})
    taken = vacuity.accepted(call, lax)
    assert taken is not None and "moe_buf: a constant" in taken and "sorted_token_ids: zeros" in taken
    assert {part.split(":")[0] for part in taken.split(", ")} == set(references.of)


def test_the_kernels_that_come_along() -> None:
    assert {kernel.name for kernel in kernels(NAME)} == {"sort_block", "sort_torch"}


def test_the_goldens_are_left_as_they_were() -> None:
    call, references = call_of(sample())
    before: dict[str, Tensor] = {name: one.golden.clone() for name, one in references.of.items()}
    vacuity.accepted(call, references)
    assert all(torch.equal(bits(before[name]), bits(one.golden)) for name, one in references.of.items())
