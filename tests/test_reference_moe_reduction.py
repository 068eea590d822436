"""moe_reduction: golden and oracle against exact fractions, the contract's rules, the inputs, and wrong kernels."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from engine_samples import CPU, digest, rounded
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.case import Case
from conformance.data.values import PATTERNS
from conformance.errors import ConformanceError
from conformance.formats import FORMATS, bits
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.operator import Call, Reference, Shared
from conformance.registry import kernels, matrix
from conformance.result import Result, Settings
from conformance.verdicts.verdict import golden_fraction
from references.moe_reduction import OPERATOR, cost, golden, memory, oracle, tokens_expected, valid_slots, validate

NAME, NAN = "moe_reduction", math.nan
FORMS = ("fp16", "bf16", "fp32")
every_form = pytest.mark.parametrize("form", FORMS)


def sample(**params: Any) -> Case:
    """A small case of no tier; ``params`` replace."""
    standard = {"tokens": 5, "topk": 4, "hidden": 24, "in": "fp32", "mask": "valid", "routing": "padding"}
    return Case(NAME, {key: str(value) for key, value in (standard | params).items()})


def call_of(case: Case, poison: int = 0) -> tuple[Call, Reference]:
    call = OPERATOR.inputs(case, "reduced", CPU, Shared())
    call.set_poison(poison)
    return call, OPERATOR.reference(call, Shared())


def slots_of(call: Call) -> list[list[bool]]:
    """Which slots are valid, read from the masks one number at a time."""
    part, valid, ids, known = (call.arguments[name] for name in OPERATOR.arguments)
    if valid is not None:
        return [[value != 0 for value in row] for row in valid.tolist()]
    if ids is None:
        return [[True] * part.shape[1]] * part.shape[0]
    experts = known.tolist()
    return [[0 <= e < len(experts) and experts[e] != 0 for e in row] for row in ids.tolist()]


# ---- golden and oracle ----------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("data", ["real", "cancel", "tiny", "overflow", "wide", "negative_zeros"])
@pytest.mark.parametrize("mask", ["none", "valid", "expert"])
def test_golden_is_bitwise_one_rounding_per_slot_and_one_cast(form: str, data: str, mask: str) -> None:
    call, reference = call_of(sample(**{"in": form, "data": data, "mask": mask}))
    part, slots = call.arguments["part"].double().tolist(), slots_of(call)
    expected = []
    for t, rows in enumerate(part):
        for h in range(len(rows[0])):
            acc = 0.0
            for s, row in enumerate(rows):
                if slots[t][s] and not math.isinf(acc):
                    acc = rounded(Fraction(acc) + Fraction(row[h]), "fp32")
            expected.append(acc if math.isinf(acc) else rounded(Fraction(acc), form))
    exact = torch.tensor(expected, dtype=torch.float64).to(FORMATS[form].dtype).view(reference.golden.shape)
    assert torch.equal(bits(reference.golden), bits(exact))


@every_form
def test_a_token_without_valid_slots_is_plus_zero(form: str) -> None:
    for poison in (0, 1):
        for mask in ("valid", "expert"):
            call, reference = call_of(sample(**{"in": form, "mask": mask, "routing": "none"}), poison)
            assert not bits(reference.golden).any()
            assert call.bitwise_rows is not None and bool(call.bitwise_rows.all())


@every_form
@pytest.mark.parametrize("data", list(PATTERNS))
def test_golden_is_within_its_own_budget(form: str, data: str) -> None:
    for mask, topk in (("none", 1), ("valid", 2), ("expert", 9), ("none", 127)):
        call, reference = call_of(sample(**{"in": form, "data": data, "mask": mask, "topk": topk, "hidden": 40}))
        assert golden_fraction(reference)() <= 1.0, call.case.id


def test_the_oracle_is_the_exact_sum_and_its_bound_holds_for_every_order() -> None:
    call, _ = call_of(sample(topk=6, hidden=16, data="cancel"))
    part, slots = call.arguments["part"], slots_of(call)
    (rows,) = oracle(call.arguments)
    for t, valid in enumerate(slots):
        for h in range(part.shape[2]):
            terms = [Fraction(float(part[t, s, h])) for s, there in enumerate(valid) if there]
            exact, size, n = sum(terms, Fraction(0)), sum(map(abs, terms), Fraction(0)), max(0, len(terms) - 1)
            assert float(rows.value[t, h]) == float(exact)
            u = Fraction(1, 2**24)
            bound = n * u / (1 - n * u) * size
            assert bound <= Fraction(float(rows.error[t, h])) <= bound * Fraction(100001, 100000) + Fraction(1, 10**30)
    for order in ([5, 4, 3, 2, 1, 0], [0, 2, 4, 1, 3, 5], [3, 0, 5, 1, 4, 2]):
        acc = torch.zeros(rows.value.shape)
        for s in order:
            there = torch.tensor([[valid[s]] for valid in slots])
            acc = torch.where(there, acc + part[:, s], acc)
        assert bool(((acc.double() - rows.value).abs() <= rows.error).all())


def test_one_valid_slot_leaves_no_room_but_the_cast() -> None:
    call, _ = call_of(sample(routing="single"))
    assert not next(iter(oracle(call.arguments))).error.any()


def test_golden_of_more_tokens_than_one_chunk() -> None:
    part = torch.arange(300.0).view(150, 2, 1).expand(150, 2, 4000).contiguous()
    valid = torch.ones(150, 2, dtype=torch.uint8)
    valid[70:80, 1] = 0
    expected = (torch.arange(300.0).view(150, 2) * valid).sum(dim=1, keepdim=True)
    assert torch.equal(golden(part, valid), expected.expand(150, 4000))
    rows = list(oracle({"part": part, "valid_mask": valid}))
    assert len(rows) > 1 and [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])] and rows[-1].stop == 150
    assert torch.equal(torch.cat([r.value for r in rows]), expected.double().expand(150, 4000))


def test_validity_by_hand() -> None:
    ids = torch.tensor([[0, 1, 2], [-1, 3, 2], [-(2**31), 2**31 - 1, 0]], dtype=torch.int32)
    known = torch.tensor([5, 0, -256], dtype=torch.int32)
    expected = [[True, False, True], [False, False, True], [False, False, True]]
    part = torch.zeros(3, 3, 1)
    found = valid_slots({"part": part, "topk_ids": ids, "expert_mask": known})
    assert found is not None and found.tolist() == expected
    mask = torch.tensor([[1, 0, 255]] * 3, dtype=torch.uint8)
    found = valid_slots({"part": part, "valid_mask": mask})
    assert found is not None and found.tolist() == [[True, False, True]] * 3
    assert valid_slots({"part": part}) is None


# ---- the contract ---------------------------------------------------------------------------------------------------

PART = torch.zeros(3, 2, 8, dtype=torch.float16)
MASK, IDS = torch.ones(3, 2, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.int32)
KNOWN = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"part": None}, TypeError, "part is None"),
    ({"part": 3.0}, TypeError, "part is a float"),
    ({"valid_mask": [1]}, TypeError, "valid_mask is a list"),
    ({"part": PART.double()}, TypeError, "part has dtype torch.float64: float16, bfloat16 or float32"),
    ({"part": PART[0]}, ValueError, r"part has shape \(2, 8\)"),
    ({"part": torch.zeros(3, 128, 8)}, ValueError, "1 <= k <= 127"),
    ({"part": torch.zeros(3, 0, 8)}, ValueError, "1 <= k <= 127"),
    ({"part": torch.zeros(3, 2, 0)}, ValueError, "H >= 1"),
    ({"valid_mask": MASK.bool()}, TypeError, "valid_mask has dtype torch.bool: torch.uint8"),
    ({"valid_mask": MASK[:2]}, ValueError, r"valid_mask has shape \(2, 2\): \(3, 2\)"),
    ({"valid_mask": MASK, "topk_ids": IDS, "expert_mask": KNOWN}, ValueError, "both given"),
    ({"topk_ids": IDS}, ValueError, "topk_ids is given and expert_mask is None"),
    ({"expert_mask": KNOWN}, ValueError, "expert_mask is given and topk_ids is None"),
    ({"topk_ids": IDS.long(), "expert_mask": KNOWN}, TypeError, "topk_ids has dtype torch.int64"),
    ({"topk_ids": IDS, "expert_mask": KNOWN.bool()}, TypeError, "expert_mask has dtype torch.bool"),
    ({"topk_ids": IDS.T, "expert_mask": KNOWN}, ValueError, r"topk_ids has shape \(2, 3\)"),
    ({"topk_ids": IDS, "expert_mask": KNOWN[:0]}, ValueError, "E >= 1"),
    ({"out": torch.zeros(3, 9, dtype=torch.float16)}, ValueError, r"out has shape \(3, 9\): \(3, 8\)"),
    ({"out": torch.zeros(3, 8)}, TypeError, "out has dtype torch.float32: part's dtype torch.float16"),
    ({"part": torch.zeros(3, 2, 16, dtype=torch.float16)[..., ::2]}, ValueError, "requires contiguous"),
    ({"part": torch.zeros(49, dtype=torch.float16)[1:].view(3, 2, 8)}, ValueError, "16-byte alignment"),
])
def test_a_call_that_breaks_the_contract(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"part": PART, "valid_mask": None, "topk_ids": None, "expert_mask": None, "out": None} | change
    out = given.pop("out")
    with pytest.raises(error, match=message):
        validate(given, out)


def test_strided_calls_pass_for_kernels_that_take_them() -> None:
    validate({"part": torch.zeros(3, 2, 16)[..., ::2], "valid_mask": MASK}, None, strided=True)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def cpu_edge_cases() -> list[Case]:
    of = matrix(NAME)
    return list(of.grouped(case for case in of.cases("edge") if not of.devices(case)))


def test_numbers_of_cases() -> None:
    of = matrix(NAME)
    counts = {tier: len(of.cases(tier)) for tier in of.tier_names}
    assert counts == {"official": 90, "published": 10, "smoke": 24, "models": 30, "edge": 516}
    assert {case.id for case in of.cases("published")} <= {case.id for case in of.cases("official")}
    assert sum("smoke" in case.tiers for case in of.cases("edge")) == 91


def test_every_edge_case_says_its_validity_rightly_and_poisons_all_else() -> None:
    for case in cpu_edge_cases():
        call, _ = call_of(case)
        part = call.arguments["part"]
        valid = torch.tensor(slots_of(call), dtype=torch.bool).view(part.shape[:2])
        assert bool(part[~valid].isnan().all()), case.id
        if case.get("data") not in ("nonfinite", "overflow"):
            assert bool(part[valid].isfinite().all()), case.id
        call.set_poison(1)
        assert bool((part[~valid] == 30000).all()), case.id
        validate(call.arguments, None, strided=True)


def test_inputs_are_the_same_bits_everywhere() -> None:
    call, _ = call_of(sample(mask="expert", ids="outside", values="any"))
    assert [digest(call.arguments[name]) for name in ("part", "topk_ids", "expert_mask")] == [
        "7b91591fc8288862", "af744a0f7357c845", "4130a9004a95ed62",
    ]


def test_masks_that_differ_only_in_form_share_rows_and_validity() -> None:
    shared = Shared()
    one, two, none = (OPERATOR.inputs(sample(mask=m), "reduced", CPU, shared) for m in ("valid", "expert", "none"))
    assert one.arguments["part"] is two.arguments["part"] is not none.arguments["part"]
    assert slots_of(one) == slots_of(two)


def test_sizes_memory_and_cost() -> None:
    large = next(iter(matrix(NAME).cases("official")))
    assert (tokens_expected(large, "official"), tokens_expected(large, "reduced")) == (32769, 61)
    assert memory(large, "official") > 32769 * 8 * 7168 * 2
    call, _ = call_of(sample(**{"tokens": 3, "topk": 2, "hidden": 10, "in": "fp16", "routing": "complete"}))
    assert (cost(call).flops, cost(call).bytes) == (60, 60 * 2 + 30 * 2 + 6)


@pytest.mark.parametrize("change", [{"in": "e4m3"}, {"out": "bf16"}, {"mask": "some"}, {"mask": "expert", "ids": "x"}])
def test_a_parameter_that_does_not_fit(change: dict[str, str]) -> None:
    with pytest.raises(ConformanceError):
        OPERATOR.inputs(sample(**change), "reduced", CPU, Shared())


# ---- wrong kernels --------------------------------------------------------------------------------------------------

Wrong = Callable[[Tensor, Tensor, Tensor], None]  # part, valid (bool [T, k]), out


def total(part: Tensor, valid: Tensor) -> Tensor:
    return part.double().masked_fill(~valid[..., None], 0.0).sum(dim=1).float()


def right(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(total(part, valid))


def mask_by_product(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_((part.float() * valid[..., None]).sum(dim=1))


def no_mask(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(part.float().sum(dim=1))


def first_slot_for_all(part: Tensor, valid: Tensor, out: Tensor) -> None:
    right(part[:, :1].expand(part.shape), valid, out)


def last_slot_dropped(part: Tensor, valid: Tensor, out: Tensor) -> None:
    right(part[:, :-1], valid[:, :-1], out)


def rounded_at_each_slot(part: Tensor, valid: Tensor, out: Tensor) -> None:
    acc = torch.zeros_like(out)
    for slot in range(part.shape[1]):
        acc = torch.where(valid[:, slot, None], (acc.float() + part[:, slot].float()).to(out.dtype), acc)
    out.copy_(acc)


def bf16_accumulator(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(functools.reduce(lambda a, b: a + b, part.masked_fill(~valid[..., None], 0.0).bfloat16().unbind(1)))


def mean(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(total(part, valid) / valid.sum(dim=1, keepdim=True).clamp(min=1))


def empty_rows_left(part: Tensor, valid: Tensor, out: Tensor) -> None:
    some = valid.any(dim=1)
    out[some] = total(part, valid)[some].to(out.dtype)


def adds_to_out(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(out.float() + total(part, valid))


def last_row_left(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out[:-1] = total(part, valid)[:-1].to(out.dtype)


def tail_of_8_left(part: Tensor, valid: Tensor, out: Tensor) -> None:
    width = out.shape[1] // 8 * 8
    out[:, :width] = total(part, valid)[:, :width].to(out.dtype)


def neighbour_token_of_the_last_slot(part: Tensor, valid: Tensor, out: Tensor) -> None:
    moved = part.clone()
    moved[:, -1] = moved[:, -1].roll(1, dims=0)
    right(moved, valid, out)


def truncates(part: Tensor, valid: Tensor, out: Tensor) -> None:
    value = total(part, valid)
    cast = value.to(out.dtype)
    lower = (bits(cast) - 1).view(out.dtype)
    out.copy_(torch.where((cast.float().abs() > value.abs()) & cast.isfinite(), lower, cast))


def saturates(part: Tensor, valid: Tensor, out: Tensor) -> None:
    limit = torch.finfo(out.dtype).max
    out.copy_(total(part, valid).clamp(-limit, limit))


def flushes_subnormals(part: Tensor, valid: Tensor, out: Tensor) -> None:
    value = total(part, valid).to(out.dtype)
    out.copy_(torch.where(value.abs() < torch.finfo(out.dtype).smallest_normal, 0.0, value))


def nan_to_zero(part: Tensor, valid: Tensor, out: Tensor) -> None:
    out.copy_(total(part, valid).nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf))


def half_away(part: Tensor, valid: Tensor, out: Tensor) -> None:
    """bf16 by adding half and cutting: FlyDSL's rounding of GEMM outputs; the contract here says nearest even."""
    value = total(part, valid)
    away = ((value.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    out.copy_(torch.where(value.isfinite(), away.float(), value) if out.dtype == torch.bfloat16 else value)


WRONG: tuple[Wrong, ...] = (
    mask_by_product, no_mask, first_slot_for_all, last_slot_dropped, rounded_at_each_slot, bf16_accumulator, mean,
    empty_rows_left, adds_to_out, last_row_left, tail_of_8_left, neighbour_token_of_the_last_slot, truncates,
    saturates, flushes_subnormals, nan_to_zero,
)


def of_masks(reading: Callable[[dict[str, Any]], Tensor], function: Wrong) -> Callable[..., None]:
    def run(part: Tensor, *, valid_mask: Any = None, topk_ids: Any = None, expert_mask: Any = None,
            out: Tensor) -> None:
        given = {"part": part, "valid_mask": valid_mask, "topk_ids": topk_ids, "expert_mask": expert_mask}
        function(part, reading(given), out)

    return run


def read_rightly(given: dict[str, Any]) -> Tensor:
    found = valid_slots(given)
    return torch.ones(given["part"].shape[:2], dtype=torch.bool) if found is None else found


def only_one_is_true(given: dict[str, Any]) -> Tensor:
    if given["valid_mask"] is not None:
        return (given["valid_mask"] == 1) & True
    return read_rightly(given | {"expert_mask": (given["expert_mask"] == 1).int()}) if given["topk_ids"] is not None \
        else read_rightly(given)


def low_byte_only(given: dict[str, Any]) -> Tensor:
    return read_rightly(given if given["topk_ids"] is None else given | {"expert_mask": given["expert_mask"] & 0xFF})


def negative_ids_wrap(given: dict[str, Any]) -> Tensor:
    ids, known = given["topk_ids"], given["expert_mask"]
    if ids is None:
        return read_rightly(given)
    return known[torch.remainder(ids, len(known)).long()] != 0


def mask_by_slot(given: dict[str, Any]) -> Tensor:
    """expert_mask indexed by the slot's number instead of its expert."""
    if given["topk_ids"] is None:
        return read_rightly(given)
    return (given["expert_mask"][: given["part"].shape[1]] != 0).expand(given["part"].shape[:2])


def mask_transposed(given: dict[str, Any]) -> Tensor:
    tokens, topk = given["part"].shape[:2]
    return read_rightly(given).T.reshape(tokens, topk)


READINGS = (only_one_is_true, low_byte_only, negative_ids_wrap, mask_by_slot, mask_transposed)


def outcomes(function: Callable[..., None], cases: Iterable[Case]) -> Iterator[Result]:
    """The results of a kernel that is in no registry and promises to be within the budget."""
    parameters = frozenset(inspect.signature(function).parameters)
    kernel, judge = Kernel("subject", NAME, function, "within-budget", strided=True, parameters=parameters), Judge(
        Settings())
    return (judge.run(case, kernel) for case in cases)


def test_a_right_kernel_of_another_order_passes_every_edge_case() -> None:
    found = list(outcomes(of_masks(read_rightly, right), cpu_edge_cases()))
    assert {result.state for result in found} == {"pass"}, next(r.message for r in found if r.state != "pass")


def smoke_cases() -> list[Case]:
    return [case for case in cpu_edge_cases() if "smoke" in case.tiers]


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_smoke_rejects_a_kernel_that(function: Wrong) -> None:
    assert any(result.state == "fail" for result in outcomes(of_masks(read_rightly, function), smoke_cases()))


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.__name__)
def test_smoke_rejects_a_kernel_whose_mask_is(reading: Callable[[dict[str, Any]], Tensor]) -> None:
    assert any(result.state == "fail" for result in outcomes(of_masks(reading, right), smoke_cases()))


def test_rounding_half_away_from_zero_is_told_apart_on_exact_data_only() -> None:
    found = list(outcomes(of_masks(read_rightly, half_away), cpu_edge_cases()))
    assert {(result.family, result.kind) for result in found if result.state != "pass"} == {("F12-ties", "exact")}


def test_the_operator_has_a_pytorch_kernel() -> None:
    assert {kernel.name for kernel in kernels(NAME)} == {"reduction_tiled", "reduction_torch"}
