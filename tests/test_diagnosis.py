"""Diagnosis: the sentence names what is wrong, and costs right kernels nothing and failing ones little."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from engine_samples import CPU, call_of, contract, right, sample, subject

from conformance import mutants
from conformance.diagnosis import diagnose as diagnosis
from conformance.diagnosis import inquiry, nearby
from conformance.diagnosis.diagnose import FIRST, Allowance, diagnose
from conformance.diagnosis.evidence import gather
from conformance.diagnosis.faulty_casts import casts
from conformance.diagnosis.regions import region
from conformance.formats import FORMATS
from conformance.judging.judge import Judge
from conformance.registry import MUTANTS, kernels, matrix
from conformance.result import Settings
from conformance.zoo.kill_matrix import cause_of

OPERATOR = "moe_reduce_fused"
kernels(OPERATOR, (MUTANTS,))
ZOO = {name: one for name, one in mutants.mutants(OPERATOR).items() if not name.startswith("tl_")}

# Small cases with something for every fault to act on.
CASES = [
    sample(tokens=21, topk=4, xsf="yes"),
    sample(tokens=21, topk=3, xsf="yes", **{"in": "bf16", "out": "e4m3"}),
    sample(tokens=19, topk=9, hidden=1280, weights="no", **{"in": "bf16", "out": "bf16"}),
    sample(tokens=33, topk=5, routing="some_empty", xsf="yes", **{"in": "fp16", "out": "fp16"}),
    sample(tokens=17, topk=3, routing="shuffled", weights="yes", data="overflow", **{"in": "fp16", "out": "fp16"}),
    sample(tokens=17, topk=2, weights="no", data="overflow", **{"in": "fp32", "out": "e4m3"}),
    sample(tokens=19, topk=1, routing="shuffled", data="codes", hidden=512, **{"in": "fp32", "out": "e4m3"}),
    sample(tokens=17, topk=1, routing="shuffled", data="codes", weights="no", **{"in": "fp32", "out": "e4m3"}),
    sample(tokens=27, topk=4, data="nonfinite", poison="weights"),
    sample(tokens=27, topk=4, data="nonfinite", weights="no"),
    sample(tokens=13, topk=3, sf="zero", **{"in": "bf16", "out": "e4m3"}),
    sample(tokens=19, topk=4, routing="sparse", data="coded"),
    sample(tokens=17, topk=4, layout="strided"),
    sample(tokens=15, topk=4, routing="duplicates", data="exact"),
    sample(tokens=9, topk=16, routing="duplicates"),
    sample(tokens=9, topk=2, launch="configs"),
    sample(tokens=21, topk=4, launch="redraw"),
    sample(tokens=3, topk=2, hidden=7168, **{"in": "bf16", "out": "bf16"}),
    sample(tokens=11, topk=2, **{"in": "fp16", "out": "e4m3"}),
    sample(tokens=0, topk=2),
    sample(tokens=13, topk=2, data="high", scales="subnormal", weights="yes", xsf="no"),
    sample(tokens=13, topk=2, data="high", scales="subnormal", weights="no", xsf="yes"),
    sample(tokens=13, topk=2, data="high", sf="subnormal", routing="shuffled", **{"in": "bf16", "out": "e4m3"}),
    sample(tokens=4099, topk=2, hidden=256, **{"in": "bf16", "out": "bf16"}),
    sample(send=4001, topk=2, experts=72, ranks=8, hidden=2048),
]
CASES[-1] = replace(CASES[-1], params={k: v for k, v in CASES[-1].params.items() if k not in ("tokens", "routing")})


@pytest.fixture(scope="module")
def named() -> dict[str, Counter[str | None]]:
    """Mutant -> what its first sentences name, on all cases that kill it. Case by case, so that inputs are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small are the tensors
    judge = Judge(Settings())
    found: dict[str, Counter[str | None]] = {name: Counter() for name in ZOO}
    for case in CASES:
        for name, one in ZOO.items():
            result = judge.run(case, one.kernel)
            if result.state in ("fail", "error") and sum(found[name].values()) < FIRST:
                found[name][cause_of(result.record())] += 1
    torch.set_num_threads(threads)
    return found


def test_every_mutant_is_killed_by_these_few_cases(named):
    assert [name for name, causes in named.items() if not causes] == []


def test_at_least_nine_mutants_in_ten_get_the_right_first_sentence(named):
    wrong = {name: dict(causes) for name, causes in named.items()
             if causes.most_common(1)[0][0] not in ZOO[name].diagnosis}
    assert len(wrong) <= len(ZOO) // 10, wrong


def test_the_sentence_comes_first_and_the_details_hold_the_figures():
    case = sample(tokens=21, topk=4)
    result = Judge(Settings()).run(case, ZOO["semantic_unweighted"].kernel)
    start = f"{case.id} on semantic_unweighted: the weights are left out (explains 100 % of "
    assert result.message.startswith(start)
    assert ". launch 1 (output pre-filled with NaN bytes): " in result.message
    assert result.details is not None
    found = result.details["diagnosis"]
    assert (found["key"], found["explained"], found["wrong"]) == ("weights-missing", 1.0, result.wrong)


def test_padding_read_as_row_0_and_as_the_last_row_are_told_apart():
    """Both hold the same poison in an ordinary run; the run that is added for the diagnosis tells them apart."""
    case = sample(tokens=21, topk=4)
    for name, key in (("sentinel_row_0", "padding-row-0"), ("sentinel_wrapped", "padding-last-row")):
        result = Judge(Settings()).run(case, ZOO[name].kernel)
        assert result.details is not None
        assert result.details["diagnosis"]["key"] == key
        assert result.details["diagnosis"]["others"] == ()


def test_a_share_below_all_is_said_and_what_remains_is_placed():
    def half(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        whole = right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype)
        out.copy_(right(x, token_topk_to_pos, None, x_sf, sf, out.dtype))
        out[-4:] = whole[-4:] + 1.0

    result = Judge(Settings()).run(sample(tokens=20, routing="shuffled", data="real"), subject(half))
    said = "the weights are left out (explains 80 % of 5120 wrong elements, the others in rows >= 16 (of 20))"
    assert said in result.message


def test_what_no_fault_explains_is_said_to_be_unexplained():
    def noise(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        whole = right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype)
        out.copy_(whole + torch.sin(torch.arange(whole.numel()) * 1.7).view(whole.shape) * 5)

    result = Judge(Settings()).run(sample(tokens=21), subject(noise))
    assert "no known fault explains it" in result.message
    assert result.details is not None and result.details["diagnosis"]["key"] == "unexplained"


@pytest.mark.parametrize(("source", "target"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_a_right_result_that_promised_the_goldens_bits_is_said_to_be_right(source, target):
    """No explanation that is only near by counts: a right result is near to whatever is nearly right."""
    def other_order(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))

    case = sample(tokens=61, topk=8, hidden=2048, data="real", **{"in": source, "out": target})
    result = Judge(Settings()).run(case, subject(other_order, promise="bit-exact"))
    assert (result.state, result.kind, result.level) == ("fail", "bits", "within-budget")
    assert result.details is not None and result.details["diagnosis"]["key"] == "other-rounding", result.message
    said = ": correct within its budget, but in another order or with other roundings than the golden's: off by 1 ULP "
    assert said in result.message
    assert "promise='within-budget' is the level that it reaches" in result.message


def test_what_depends_on_poison_is_not_said_to_be_right():
    def sums(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        poisoned = bool(out.isnan().any())
        found = right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype)
        out.copy_(torch.where(found == 0, 0.0, found.nextafter(torch.zeros(()))) if poisoned else found)

    case = sample(tokens=21, topk=4, data="real", routing="shuffled")
    result = Judge(Settings()).run(case, subject(sums))
    assert result.kind == "poison" and "correct within its budget" not in result.message


def test_an_explanation_that_another_poison_refutes_is_not_named():
    """NaN everywhere is what a sum added to an output full of NaN leaves as well, in the first launch only."""
    def reads_all_rows(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype) + x.float().sum(dim=0) * 0)

    result = Judge(Settings()).run(sample(tokens=21, topk=4), subject(reads_all_rows))
    assert result.state == "fail" and cause_of(result.record()) == "all-nan", result.message


def test_a_factor_next_to_one_is_told_by_its_distance_from_one():
    def nearly(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype) * (1 + 2.0**-13))

    result = Judge(Settings()).run(sample(tokens=21, topk=4), subject(nearly))
    assert ": the result is 1 + 0.00012 times the right one (explains " in result.message, result.message


def test_a_right_result_has_no_diagnosis():
    call, reference = call_of(sample(tokens=9))
    assert diagnose([gather(reference.golden.clone(), call, reference, 0)], contract().faults) is None


# ---- what it costs ------------------------------------------------------------------------------------------------


def test_kernels_that_fail_on_one_case_share_its_predictions_and_are_told_apart_as_each_alone(monkeypatch):
    case, predicted = sample(tokens=21, topk=4, xsf="yes"), Counter()

    def counted(fault):
        def predict(call, columns):
            predicted[fault.key] += 1
            return fault.predict(call, columns)

        return replace(fault, predict=predict)

    counting = replace(contract(), faults=tuple(counted(one) for one in contract().faults))
    monkeypatch.setattr("conformance.judging.judge.operator", lambda name: counting)
    names = ("semantic_unweighted", "sentinel_row_0", "sentinel_wrapped", "semantic_unweighted")
    alone = [Judge(Settings()).run(case, ZOO[name].kernel).details for name in names]
    once = predicted.copy()
    predicted.clear()
    judge = Judge(Settings())
    assert [judge.run(case, ZOO[name].kernel).details for name in names] == alone
    assert sum(predicted.values()) < sum(once.values()) / 2
    assert predicted["weights-missing"] <= 2  # poisons


def test_a_failure_of_a_gpu_is_explained_on_the_cpu_alike(monkeypatch):
    """As if this were another device. Where it matters how arguments lie in memory they stay where they are."""
    known = {kernel.name: kernel for kernel in kernels(OPERATOR, (MUTANTS,))}
    chosen = [known[name] for name in list(ZOO)[::4] if not name.startswith("race")]  # another result each time

    def said() -> list[tuple[str, str]]:
        found = []
        for case in (CASES[1], CASES[8], CASES[12]):
            judge = Judge(Settings())
            found += [(kernel.name, judge.run(case, kernel).message) for kernel in chosen]
        return found

    here, brought = said(), []
    monkeypatch.setattr(nearby, "_far", lambda value: True)
    monkeypatch.setattr(nearby, "brought", lambda call, real=nearby.brought: brought.append(real(call)) or brought[-1])
    assert said() == here
    assert sum(call is not None for call in brought) > 5 and None in brought


def test_a_passing_case_is_never_looked_into(monkeypatch):
    monkeypatch.setattr("conformance.judging.comparison.explain", lambda *_: pytest.fail("asked for an explanation"))
    for name in ("torch_control", "control_reversed"):
        assert Judge(Settings()).run(sample(xsf="yes"), mutants.controls(OPERATOR)[name]).state == "pass"


def test_of_a_thousand_failures_few_are_diagnosed():
    allowance = Allowance()
    granted = [number for number in range(1, 1001) if allowance.grants("k", "budget")]
    assert granted == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512]
    assert allowance.grants("other", "budget")
    assert allowance.grants("k", "nan-map")
    few = Allowance(2)
    assert [few.grants("k", kind) for kind in ("budget", "nan-map", "exact")] == [True, True, False]


def test_diagnoses_end_when_their_time_is_spent(monkeypatch):
    clock = iter((0.0, diagnosis.SECONDS + 1, 0.0, diagnosis.SECONDS))
    monkeypatch.setattr(diagnosis.time, "perf_counter", lambda: next(clock))
    allowance = Allowance()
    with allowance:
        pass
    assert allowance.grants("k", "budget") and not allowance.grants("k", "budget")
    with allowance:
        pass
    assert not allowance.grants("another", "budget")


def test_a_fault_of_the_diagnosis_does_not_hide_the_failure(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(inquiry, "diagnose", broken)
    result = Judge(Settings()).run(sample(tokens=21), ZOO["semantic_unweighted"].kernel)
    assert (result.state, result.kind) == ("fail", "budget")
    assert result.message.endswith("(no diagnosis: RuntimeError: broken)")


def test_inputs_are_as_before_after_a_diagnosis():
    """The added run writes another poison; a right kernel judged on the same inputs then must pass."""
    judge, case = Judge(Settings()), sample(tokens=21, xsf="yes")
    assert judge.run(case, ZOO["sentinel_row_0"].kernel).state == "fail"
    kept = judge._subject
    assert kept is not None
    assert judge.run(case, mutants.controls(OPERATOR)["torch_control"]).state == "pass"
    assert judge._subject is kept


# ---- the parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("places", "text"), [
    ([(slice(None), slice(None))], "everywhere"),
    ([(9, 19)], "in the last element [9, 19]"),
    ([(2, 3)], "in the element [2, 3]"),
    ([(9, slice(None))], "in the last row (9)"),
    ([(slice(6, None), slice(None))], "in rows >= 6 (of 10)"),
    ([(slice(2, 4), slice(8, 12))], "in rows 2 to 3, columns 8 to 11"),
    ([(slice(None), slice(16, None))], "in columns >= 16 (of 20)"),
    ([(1, slice(None)), (5, slice(None))], "in 2 of the rows 1 to 5"),
    ([(i, i) for i in range(10)] + [(0, i) for i in range(20)], "all over the output"),
])
def test_where_in_words(places, text):
    mask = torch.zeros((10, 20), dtype=torch.bool)
    for place in places:
        mask[place] = True
    found = region(mask)
    assert found is not None and found.text == text


def test_an_empty_mask_has_no_region():
    assert region(torch.zeros((3, 4), dtype=torch.bool)) is None


@pytest.mark.parametrize(("form", "key", "value", "result"), [
    ("bf16", "cast-truncates", 1.0 + 2.0**-8 + 2.0**-9, 1.0),
    ("bf16", "cast-ties-away", 1.0 + 2.0**-8, 1.0 + 2.0**-7),
    ("bf16", "cast-half-up", -1.0 - 2.0**-8, -1.0),
    ("bf16", "cast-rounds-up", -1.0 - 2.0**-9, -1.0),
    ("fp16", "cast-rounds-down", -1.0 - 2.0**-12, -1.0 - 2.0**-10),
    ("e4m3", "cast-truncates", 2.0**-7 * 1.9, 2.0**-7 + 2.0**-9 * 3),
    ("e4m3", "cast-flushes", 2.0**-7, 0.0),
    ("e4m3", "overflow-240", 300.0, 240.0),
    ("e4m3", "nan-448", float("nan"), 448.0),
    ("e4m3", "infinity-nan", -1000.0, -448.0),
    ("fp16", "overflow-saturates", 1e6, 65504.0),
])
def test_a_faulty_cast(form, key, value, result):
    predicted = {name: tensor for name, _, tensor in casts(torch.tensor([[value]], dtype=torch.float64), FORMATS[form])}
    assert float(predicted[key]) == result


def test_every_fault_of_the_table_has_a_mutant_or_a_reason():
    """Keys that no mutant expects are explanations for faults next to the mutants'."""
    expected = {key for one in mutants.mutants(OPERATOR).values() for key in one.diagnosis}
    assert {fault.key for fault in contract().faults} - expected <= {
        "weights-of-next-slot", "weights-of-next-token", "x_sf-of-slot", "x_sf-bf16", "x_sf-fp16", "x_sf-tf32",
        "weights-fp16", "weights-tf32", "weights-abs", "weights-negative", "weights-finite", "x_sf-abs"}


@pytest.mark.parametrize(("change", "causes", "params"), [
    (lambda w: w.half().float(), {"weights-fp16"}, {}),
    (lambda w: ((w.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32),
     {"weights-fp16", "weights-tf32"}, {}),  # apart in ties
    (torch.abs, {"weights-abs"}, {"data": "coded"}),
    (lambda w: w.clamp(min=0), {"weights-negative"}, {"data": "coded"}),
    (lambda w: w.nan_to_num(0.0, 0.0, 0.0), {"weights-finite"}, {"data": "nonfinite"}),
])
def test_what_became_of_the_weights_is_named(change, causes, params):
    def changed(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, change(topk_weights), x_sf, sf, out.dtype))

    result = Judge(Settings()).run(sample(tokens=27, topk=4, **params), subject(changed))
    assert cause_of(result.record()) in causes, result.message


@pytest.mark.parametrize(("change", "cause"), [
    (lambda s: s.half().float(), "x_sf-fp16"), (torch.abs, "x_sf-abs")])
def test_what_became_of_x_sf_is_named(change, cause):
    def changed(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        out.copy_(right(x, token_topk_to_pos, topk_weights, change(x_sf), sf, out.dtype))

    result = Judge(Settings()).run(sample(tokens=27, topk=4, xsf="yes"), subject(changed))
    assert cause_of(result.record()) == cause, result.message


def test_infinity_as_nan_is_told_apart_from_every_overflow_as_nan():
    values = torch.tensor([[1000.0, float("inf")]], dtype=torch.float64)
    predicted = {name: tensor.float() for name, _, tensor in casts(values, FORMATS["e4m3"])}
    assert predicted["infinity-nan"].isnan().tolist() == [[False, True]]
    assert predicted["overflow-nan"].isnan().tolist() == [[True, True]]


def test_a_fault_predicts_nothing_for_a_call_that_it_cannot_act_on():
    call, _ = call_of(sample(weights="no", routing="shuffled"))
    columns = torch.arange(256, device=CPU)
    by_key = {fault.key: fault.predict(call, columns) for fault in contract().faults}
    assert {key for key, value in by_key.items() if value is None} >= {
        "weights-missing", "x_sf-missing", "sf-missing", "padding-row-0", "x-contiguous", "x-bits"}


def test_zeros_of_the_wrong_sign_are_named_and_nothing_else_explains_them():
    """-0 and +0 are equal as numbers, so that every explanation that leaves them alone seemed to fit."""
    name = "moe_gemm1"
    of = matrix(name)
    known = mutants.mutants(name)["minus_zero_rows"].kernel
    case = next(case for case in of.plan(("edge",)) if case.family == "F03-sentinel" and case.get("in") == "bf16"
                and case.get("mask") == "yes")
    found = Judge(Settings()).run(case, known)
    assert found.state == "fail" and cause_of(found.record()) == "zero-sign", found.message
    assert "zeros have the wrong sign (explains 100 %" in found.message and "fits as well" not in found.message
