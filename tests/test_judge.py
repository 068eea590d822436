"""Judging: kernels that are wrong in one way each get that state and kind; right ones pass everywhere."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import CPU, NAME, call_of, edge_cases, narrow, right, sample, subject
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance import NotSupported, report_path
from conformance.case import Case, parse_case
from conformance.errors import ConformanceError
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.registry import matrix
from conformance.result import Result, Settings, refusal
from references.moe_reduce_fused import golden

Arguments = dict[str, Any]
E4M3 = sample(**{"in": "bf16", "out": "e4m3", "xsf": "yes"})
PLAIN = sample(tokens=9, topk=8)


def filling(body: Callable[[Arguments, Tensor], None], promise: str = "within-budget", **options: Any) -> Kernel:
    """A kernel that lets ``body`` fill the output from the arguments by name."""

    def filler(x, token_topk_to_pos, topk_weights, x_sf, sf, out):  # type: ignore[no-untyped-def]
        given = {"x": x, "token_topk_to_pos": token_topk_to_pos, "topk_weights": topk_weights, "x_sf": x_sf, "sf": sf}
        body(given, out)

    return subject(filler, promise, **options)


def returning(body: Callable[[Arguments, torch.dtype], Any], promise: str = "within-budget", **options: Any) -> Kernel:
    """A kernel that allocates its own result."""

    def returner(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype):  # type: ignore[no-untyped-def]
        given = {"x": x, "token_topk_to_pos": token_topk_to_pos, "topk_weights": topk_weights, "x_sf": x_sf, "sf": sf}
        return body(given, out_dtype)

    return subject(returner, promise, **options)


def answer(given: Arguments, out: Tensor) -> Tensor:
    return right(**given, dtype=out.dtype)


def fill_right(given: Arguments, out: Tensor) -> None:
    out.copy_(answer(given, out))


def judged(kernel: Kernel, case: Case = PLAIN) -> Result:
    return Judge(Settings()).run(case, kernel)


# ---- right kernels --------------------------------------------------------------------------------------------------


def terms_of(given: Arguments) -> Tensor:
    """fp32 [T, K, H]: the terms, each product rounded to fp32; 0 where a slot is padding."""
    positions = given["token_topk_to_pos"]
    rows = positions.clamp(min=0).long()
    terms = given["x"][rows].float()
    scale = given["topk_weights"]
    if given["x_sf"] is not None:
        scale = given["x_sf"][rows] if scale is None else scale * given["x_sf"][rows]
    terms = terms if scale is None else terms * scale[..., None]
    return terms.masked_fill(positions[..., None] < 0, 0.0)


def finished(total: Tensor, given: Arguments, out: Tensor) -> None:
    if given["sf"] is not None:
        total = (total * given["sf"]).masked_fill((given["token_topk_to_pos"] < 0).all(dim=1)[:, None], 0.0)
    out.copy_(narrow(total, out.dtype))


def ascending(given: Arguments, out: Tensor) -> None:
    total = torch.zeros(out.shape)
    for term in terms_of(given).unbind(1):
        total = total + term
    finished(total, given, out)


def descending(given: Arguments, out: Tensor) -> None:
    total = torch.zeros(out.shape)
    for term in reversed(terms_of(given).unbind(1)):
        total = total + term
    finished(total, given, out)


def pairwise(given: Arguments, out: Tensor) -> None:
    parts = list(terms_of(given).unbind(1))
    while len(parts) > 1:
        parts = [a if b is None else a + b for a, b in itertools.zip_longest(parts[::2], parts[1::2])]
    finished(parts[0] + 0.0, given, out)  # -0 + 0 is +0


def factors_apart(given: Arguments, out: Tensor) -> None:
    """x_sf before the weight, and sf into every term: one more rounding each."""
    rows = given["token_topk_to_pos"].clamp(min=0).long()
    padding = given["token_topk_to_pos"] < 0
    terms = given["x"][rows].float()
    for factor in (None if given["x_sf"] is None else given["x_sf"][rows], given["topk_weights"], given["sf"]):
        if factor is not None:
            terms = terms * (factor if factor.numel() == 1 and factor.dim() == 1 else factor[..., None])
    total = terms.masked_fill(padding[..., None], 0.0).sum(dim=1)
    out.copy_(narrow(total + 0.0, out.dtype))


def with_a_row(body: Callable[[Arguments, Tensor], None]) -> Callable[[Arguments, Tensor], None]:
    """The body, which gathers row 0 for padding, on an x that has one."""

    def padded(given: Arguments, out: Tensor) -> None:
        if len(given["x"]) == 0:
            scale = None if given["x_sf"] is None else torch.zeros(1)
            given = given | {"x": given["x"].new_zeros((1, given["x"].shape[1])), "x_sf": scale}
        body(given, out)

    return padded


RIGHT = {"fp64": fill_right, "ascending": ascending, "descending": descending, "pairwise": pairwise,
         "factors apart": factors_apart}


def test_right_kernels_of_any_order_pass_every_edge_case() -> None:
    """Every case with the fp64 kernel, and with one of the others in turn: each of them meets every family."""
    kernels = {name: filling(with_a_row(body), strided=True) for name, body in RIGHT.items()}
    first, *others = kernels.values()
    judge = Judge(Settings())
    results: list[tuple[Kernel, Result]] = []
    for number, case in enumerate(edge_cases()):
        for kernel in (first, others[number % len(others)]):
            results.append((kernel, judge.run(case, kernel)))
    wrong = [result.message for _, result in results if result.state != "pass"]
    assert not wrong, f"{len(wrong)} false failures, first: {wrong[:3]}"
    assert len(results) == 2 * len(edge_cases()) > 700
    assert all(result.budget_fraction <= 1 for _, result in results)
    families = {case.family for case in edge_cases()}
    for kernel in kernels.values():
        mine = [result for k, result in results if k is kernel]
        assert {result.family for result in mine} == families
        assert {result.level for result in mine} == {"bit-exact", "within-budget"}


def test_the_golden_as_a_kernel_is_bit_exact_on_every_edge_family() -> None:
    kernel = filling(lambda given, out: out.copy_(golden(**given, out_dtype=out.dtype)), "bit-exact", strided=True)
    judge = Judge(Settings())
    for case in edge_cases()[::4]:
        result = judge.run(case, kernel)
        assert (result.state, result.level) == ("pass", "bit-exact"), result.message
        assert result.budget_fraction <= 1


def test_official_cases_at_reduced_sizes() -> None:
    judge, kernel = Judge(Settings(sizes="reduced")), filling(pairwise)
    cases = [c for c in matrix(NAME).cases("smoke") if c.get("hidden") == "2048"]
    assert len(cases) > 4
    for case in cases:
        result = judge.run(case, kernel)
        assert result.state == "pass", result.message
        tokens = result.elements // 2048
        assert 10 <= tokens <= 61
        assert tokens % 32


def test_a_kernel_that_returns_its_result() -> None:
    kernel = returning(lambda given, dtype: right(**given, dtype=dtype))
    for case in (PLAIN, E4M3, sample(tokens=0)):
        assert judged(kernel, case).state == "pass"


def test_what_a_result_says() -> None:
    def path_kernel(given: Arguments, out: Tensor) -> None:
        report_path("dispatch")
        report_path("fast")
        fill_right(given, out)

    case = Case(NAME, PLAIN.params, "F01-padding", frozenset({"edge", "smoke"}))
    result = judged(filling(path_kernel), case)
    assert (result.state, result.level, result.kind, result.message) == ("pass", "within-budget", None, "")
    assert (result.case, result.operator, result.variant, result.kernel) == (case.id, NAME, "base", "filler")
    assert (result.family, result.tiers, result.promised) == ("F01-padding", ["edge", "smoke"], "within-budget")
    assert result.params == dict(PLAIN.params)
    assert result.group == matrix(NAME).group_of(case)
    assert (result.path, result.lane, result.elements) == ("fast", "execute", 9 * 256)
    assert 0 < result.budget_fraction <= 1
    assert 0 < result.max_error < 1e-5
    assert 0 < result.seconds < 5
    assert result.worker == os.environ.get("PYTEST_XDIST_WORKER", "main")
    assert f"--case '{case.id}'" in result.rerun
    assert "--sizes reduced --arch cpu" in result.rerun
    record = json.loads(json.dumps(result.record()))
    assert record["type"] == "result"
    assert record["params"]["topk"] == "8"


@pytest.mark.parametrize(("out", "xsf", "variant"), [
    ("bf16", "no", "base"), ("bf16", "yes", "with_x_sf"), ("e4m3", "no", "fp8"), ("e4m3", "yes", "quantized"),
])
def test_variants(out: str, xsf: str, variant: str) -> None:
    assert judged(filling(fill_right), sample(**{"in": "bf16", "out": out, "xsf": xsf})).variant == variant


# ---- what a kernel leaves in its output -----------------------------------------------------------------------------


def unwritten_element(given: Arguments, out: Tensor) -> None:
    kept = out[3, 5].clone()
    fill_right(given, out)
    out[3, 5] = kept


@pytest.mark.parametrize("case", [PLAIN, E4M3, sample(**{"in": "fp16", "out": "fp16"})])
def test_an_element_that_is_not_written(case: Case) -> None:
    result = judged(filling(unwritten_element), case)
    assert (result.state, result.kind, result.level, result.wrong) == ("fail", "nan-map", None, 1)
    assert result.first["index"] == [3, 5]
    assert "launch 1 (output pre-filled with NaN bytes): 1 of" in result.message
    assert "1 elements still hold what the output was pre-filled with, first at [3, 5]" in result.message
    assert result.message.startswith(f"{case.id} on filler: ")


def test_an_unwritten_element_where_nan_is_right_shows_with_the_other_poison() -> None:
    case = sample(tokens=27, data="nonfinite")
    where: list[list[int]] = []

    def body(given: Arguments, out: Tensor) -> None:
        value = answer(given, out)
        where[:] = [value.isnan().nonzero()[0].tolist()]
        value[tuple(where[0])] = out[tuple(where[0])]
        out.copy_(value)

    result = judged(filling(body), case)
    assert (result.state, result.kind, result.wrong) == ("fail", "poison", 1)
    assert result.first["index"] == where[0]
    assert math.isnan(result.first["expected"])


def test_no_element_is_written() -> None:
    result = judged(filling(lambda given, out: None))
    assert (result.state, result.kind, result.wrong) == ("fail", "nan-map", 9 * 256)
    assert "no element was written" in result.message


@pytest.mark.parametrize(("out", "doubted"), [("bf16", True), ("fp32", False)])
def test_nan_that_has_the_bits_of_the_poison_is_not_called_unwritten(out: str, doubted: bool) -> None:
    """torch's cast to bf16 makes 0xffff of any NaN on a CPU, which is what stood in the output."""

    def body(given: Arguments, out: Tensor) -> None:
        out.view(torch.uint8).fill_(0xFF)

    result = judged(filling(body), sample(**{"in": out, "out": out}))
    assert "no element was written" in result.message
    assert result.message.endswith(", unless the kernel wrote NaN with the same bits") == doubted


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("case", [PLAIN, E4M3, sample(tokens=0)])
def test_a_write_beside_the_output(where: str, case: Case) -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        offset = out.storage_offset() + (out.numel() if where == "after" else -1)
        out.as_strided((1,), (1,), offset).zero_()

    result = judged(filling(body), case)
    assert (result.state, result.kind) == ("fail", "guard")
    offset = "offset 0" if where == "after" else "offset -1"
    assert f"bytes changed {where} the output (nearest at byte {offset})" in result.message


def test_one_row_too_many() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        out.as_strided((out.shape[0] + 1, out.shape[1]), (out.shape[1], 1), out.storage_offset()).zero_()
        fill_right(given, out)

    assert judged(filling(body)).kind == "guard"


def test_adding_to_what_stood_in_the_output() -> None:
    result = judged(filling(lambda given, out: out.add_(answer(given, out))))
    assert (result.state, result.kind) == ("fail", "nan-map")

    def careful(given: Arguments, out: Tensor) -> None:
        out.copy_(out.nan_to_num(nan=0.0) + answer(given, out))

    result = judged(filling(careful))
    assert (result.state, result.kind, result.level) == ("fail", "poison", None)
    assert "depends on what stood in the output, in padding or in rows that no slot refers to" in result.message
    one, two = "launch 1 (output pre-filled with NaN bytes)", "launch 2 (output pre-filled with 0x5a bytes)"
    assert f"'{one}' and '{two}'" in result.message


def test_another_tensor_in_the_place_of_the_output() -> None:
    """The caller's buffer is never written, although the name ``out`` refers to the right values."""

    def body(given: Arguments, out: Tensor) -> None:
        out.data = answer(given, out)

    result = judged(filling(body))
    assert (result.state, result.kind) == ("fail", "nan-map")
    assert "no element was written" in result.message


# ---- what a kernel must not read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, -1])
def test_a_row_that_no_slot_refers_to(row: int) -> None:
    def adds_zero(given: Arguments, out: Tensor) -> None:
        out.copy_(answer(given, out) + given["x"][row] * 0)

    assert judged(filling(adds_zero)).kind == "nan-map"

    def hides_nan(given: Arguments, out: Tensor) -> None:
        out.copy_(answer(given, out) + given["x"][row].nan_to_num(nan=0.0))

    result = judged(filling(hides_nan))
    assert (result.state, result.kind) == ("fail", "poison")


def test_a_padding_slot_times_zero() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        positions = given["token_topk_to_pos"]
        weights = given["topk_weights"] * (positions >= 0)
        out.copy_((given["x"][positions.clamp(min=0).long()] * weights[..., None]).sum(dim=1))

    assert judged(filling(body)).kind == "nan-map"
    assert judged(filling(body), sample(routing="shuffled")).state == "pass"  # without padding it is right


def test_the_weight_of_a_padding_slot() -> None:
    """Rows are selected, weights are not: 0 times a weight of NaN."""

    def body(given: Arguments, out: Tensor) -> None:
        positions = given["token_topk_to_pos"]
        rows = given["x"][positions.clamp(min=0).long()].masked_fill(positions[..., None] < 0, 0.0)
        out.copy_((rows * given["topk_weights"][..., None]).sum(dim=1))

    assert judged(filling(body)).state == "pass"
    result = judged(filling(body), sample(poison="weights"))
    assert (result.state, result.kind) == ("fail", "nan-map")


def test_a_scale_of_a_row_that_no_slot_refers_to() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        out.copy_(answer(given, out) + given["x_sf"][0] * 0)

    assert judged(filling(body), sample(xsf="yes")).kind == "nan-map"


def test_padding_read_as_row_0_or_as_the_last_row() -> None:
    for wrap in (lambda p: p.clamp(min=0), lambda p: p):  # -1 indexes the last row in PyTorch
        def body(given: Arguments, out: Tensor, wrap: Callable[[Tensor], Tensor] = wrap) -> None:
            rows = given["x"][wrap(given["token_topk_to_pos"]).long()]
            out.copy_((rows * given["topk_weights"][..., None]).sum(dim=1))

        assert judged(filling(body)).kind == "nan-map"


# ---- what a kernel must not change ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "token_topk_to_pos", "topk_weights", "x_sf", "sf"])
def test_an_input_that_is_written_once(name: str) -> None:
    done: list[int] = []

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        done.append(0)
        if len(done) == 2:
            used = int(given["token_topk_to_pos"].max())
            place = {"x": (used, 7), "token_topk_to_pos": (2, 1), "topk_weights": (2, 1), "x_sf": (used,), "sf": (0,)}
            given[name][place[name]] = 1

    result = judged(filling(body), E4M3)
    assert (result.state, result.kind) == ("fail", "input-changed")
    assert f"wrote to its input {name}" in result.message


@pytest.mark.parametrize("change", [
    lambda given: given["x"].neg_(),
    lambda given: given["topk_weights"].mul_(2.0),
    lambda given: given["token_topk_to_pos"].copy_(given["token_topk_to_pos"].sort(dim=1).values),
])
def test_an_input_that_is_written_in_every_run(change: Callable[[Arguments], Any]) -> None:
    """The second run then gives another result, and the oracle as well: the cause is the input, not arithmetic,
    poison or chance."""

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        change(given)

    result = judged(filling(body), sample(tokens=9, topk=8, data="real"))
    assert (result.state, result.kind, result.level) == ("fail", "input-changed", None)
    assert "launch 1 (output pre-filled with NaN bytes): wrote to its input " in result.message


def test_positions_sorted_in_place_without_effect_on_the_result() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        given["token_topk_to_pos"].copy_(given["token_topk_to_pos"].sort(dim=1, descending=True).values)

    result = judged(filling(body), sample(weights="no", data="exact"))
    assert (result.state, result.kind) == ("fail", "input-changed")
    assert result.message.endswith("wrote to its input token_topk_to_pos")


def test_a_faulty_kernel_spoils_nothing_for_the_next() -> None:
    judge = Judge(Settings())

    def spoils(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        given["x"].zero_()
        given["token_topk_to_pos"].fill_(1)

    for _ in range(2):
        assert judge.run(PLAIN, filling(spoils)).state == "fail"
        assert judge.run(PLAIN, filling(fill_right)).state == "pass"


def reach(judge: Judge, name: str) -> Tensor:
    """A tensor of the reference, as a stray write may hit it."""
    assert judge._subject is not None
    if name == "golden":
        return next(iter(judge._subject[1].joint.references.of.values())).golden
    rows = dict(judge.shared.latest_values())["oracle"][0]
    return {"exact result": rows.value, "error budget": rows.error}[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["golden", "exact result", "error budget"])
def test_a_write_to_the_reference_is_blamed_on_the_kernel_that_made_it(name: str) -> None:
    """It would turn its own wrong result, or the next kernel's, into another verdict."""
    judge = Judge(Settings())
    assert judge.run(PLAIN, filling(fill_right)).state == "pass"  # the oracle is there

    def spoils(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        reach(judge, name)[0, 3] = 7.0

    for _ in range(2):
        result = judge.run(PLAIN, filling(spoils))
        assert (result.state, result.kind) == ("fail", "guard")
        assert f"wrote to memory of the suite that holds the reference ({name})" in result.message
        assert judge.run(PLAIN, filling(fill_right)).state == "pass"


def test_a_wrong_result_that_is_also_written_over_the_golden_fails() -> None:
    judge = Judge(Settings())

    def forges(given: Arguments, out: Tensor) -> None:
        out.fill_(2.0)
        reach(judge, "golden").fill_(2.0)

    result = judge.run(PLAIN, filling(forges))
    assert (result.state, result.kind) == ("fail", "guard")


def test_settings_of_torch_are_put_back() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        assert not torch.is_grad_enabled()
        fill_right(given, out)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(True)

    assert torch.is_grad_enabled()
    result = judged(filling(body))
    assert result.state == "pass", result.message
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.is_grad_enabled()


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")
def test_subnormals_are_kept_after_a_kernel_that_flushes_them() -> None:
    """A library built with -ffast-math does that to the thread that loads it."""

    def body(given: Arguments, out: Tensor) -> None:
        torch.set_flush_denormal(True)
        fill_right(given, out)

    try:
        assert judged(filling(body)).state == "pass"
        assert float(torch.tensor([2.0**-140]) * 1.0) == 2.0**-140
        assert judged(filling(fill_right), sample(data="tiny", topk=8)).state == "pass"
    finally:
        torch.set_flush_denormal(False)


# ---- repeatability --------------------------------------------------------------------------------------------------


def changing_order() -> Callable[[Arguments, Tensor], None]:
    """Right every time, in another order of summation each time."""
    runs = itertools.count()

    def body(given: Arguments, out: Tensor) -> None:
        terms, shift = terms_of(given), next(runs)
        total = torch.zeros(out.shape)
        for slot in range(terms.shape[1]):
            total = total + terms[:, (slot + shift) % terms.shape[1]]
        finished(total, given, out)

    return body


def test_a_result_that_changes_from_run_to_run() -> None:
    case = sample(tokens=9, topk=8, routing="shuffled")
    result = judged(filling(changing_order()), case)
    assert (result.state, result.kind, result.level) == ("fail", "repeat", None)
    assert "is not repeatable" in result.message
    assert result.wrong > 10
    assert judged(filling(changing_order(), repeatable=False), case).state == "pass"
    assert judged(filling(changing_order()), sample(tokens=9, topk=8, data="exact")).state == "pass"


def test_a_rare_fault_shows_in_repeats() -> None:
    runs = itertools.count()

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        if next(runs) == 19:
            out[0, 0] += 1

    result = judged(filling(body), sample(launch="repeat"))
    assert (result.state, result.kind, result.wrong) == ("fail", "repeat", 1)
    assert "'repeat 20 of 25'" in result.message


def test_a_result_kept_from_an_earlier_case() -> None:
    """Cached by address: the next case of the group has the same x and other weights."""
    kept: dict[int, Tensor] = {}

    def body(given: Arguments, dtype: torch.dtype) -> Tensor:
        return kept.setdefault(given["x"].data_ptr(), right(**given, dtype=dtype))

    judge, kernel = Judge(Settings()), returning(body)
    assert judge.run(sample(weights="yes"), kernel).state == "pass"
    result = judge.run(sample(weights="no"), kernel)
    assert (result.state, result.kind) == ("fail", "budget")


def test_a_result_kept_within_a_case() -> None:
    """Cached by address, and other values written there."""
    kept: dict[int, Tensor] = {}

    def body(given: Arguments, out: Tensor) -> None:
        out.copy_(kept.setdefault(given["x"].data_ptr(), answer(given, out)))

    assert judged(filling(body)).state == "pass"
    result = judged(filling(body), sample(launch="redraw"))
    assert (result.state, result.kind) == ("fail", "budget")
    assert "other values at the same addresses" in result.message
    assert judged(filling(fill_right), sample(launch="redraw")).state == "pass"
    assert judged(returning(lambda given, dtype: right(**given, dtype=dtype)), sample(launch="redraw")).state == "pass"


def test_a_result_that_changes_when_the_first_values_return() -> None:
    runs = itertools.count()

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0)) if next(runs) == 2 else out[0, 0]

    result = judged(filling(body), sample(launch="redraw", routing="shuffled"))
    assert (result.state, result.kind, result.wrong) == ("fail", "repeat", 1)
    assert "'first values' and 'the first values again'" in result.message


def test_an_earlier_result_that_is_overwritten_by_the_next_run() -> None:
    buffer = torch.empty(9, 256)
    kernel = returning(lambda given, dtype: buffer.copy_(right(**given, dtype=dtype)))
    result = judged(kernel, sample(tokens=9, launch="redraw"))
    assert (result.state, result.kind) == ("fail", "guard")
    assert "a result returned earlier was overwritten by this call" in result.message


def test_a_kernel_that_writes_between_the_rows_of_a_strided_output() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        if not out.is_contiguous():
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_()

    assert judged(filling(body, strided=True)).state == "pass"
    result = judged(filling(body, strided=True), sample(layout="strided_all"))
    assert (result.state, result.kind) == ("fail", "guard")
    assert "bytes changed between the output's rows" in result.message


def test_a_write_beside_an_input() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        x = given["x"]
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()

    result = judged(filling(body))
    assert (result.state, result.kind) == ("fail", "input-changed")


# ---- form, levels and arithmetic ------------------------------------------------------------------------------------


def test_a_result_that_is_missing_when_it_is_asked_for_again() -> None:
    runs = itertools.count()

    def body(given: Arguments, dtype: torch.dtype) -> Tensor | None:
        run = next(runs)
        return None if run >= 2 else right(**given, dtype=dtype) + 2.0**-22 * run

    result = judged(returning(body))
    assert (result.state, result.kind) == ("fail", "repeat")


@pytest.mark.parametrize(("body", "message"), [
    (lambda given, dtype: None, "it has no parameter for the output, so it must return its result, and returned None"),
    (lambda given, dtype: (right(**given, dtype=dtype),), "returned tuple instead of a tensor"),
    (lambda given, dtype: right(**given, dtype=torch.float64), "dtype is torch.float64, torch.float32 is required"),
    (lambda given, dtype: right(**given, dtype=dtype)[:, :255], "shape is (9, 255), (9, 256) is required"),
    (lambda given, dtype: right(**given, dtype=dtype)[None], "shape is (1, 9, 256), (9, 256) is required"),
    (lambda given, dtype: right(**given, dtype=dtype).T.contiguous().T, "strides are (1, 9), a contiguous result"),
    (lambda given, dtype: right(**given, dtype=dtype).to("meta"), "device is meta, cpu is required"),
])
def test_a_wrong_form(body: Callable[[Arguments, torch.dtype], Any], message: str) -> None:
    result = judged(returning(body))
    assert (result.state, result.kind, result.level) == ("fail", "form", None)
    assert f"launch 1 (output pre-filled with NaN bytes): {message}" in result.message


def test_a_bf16_accumulator_and_a_truncating_cast() -> None:
    case = sample(**{"in": "bf16", "out": "bf16", "topk": 8, "tokens": 9, "routing": "shuffled"})

    def accumulates_narrow(given: Arguments, out: Tensor) -> None:
        total = torch.zeros_like(out)
        for term in terms_of(given).unbind(1):
            total = (total.float() + term).bfloat16()
        out.copy_(total)

    def truncates(given: Arguments, out: Tensor) -> None:
        exact = right(**given, dtype=torch.float32)
        out.copy_((exact.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16())

    assert judged(filling(accumulates_narrow), case).kind == "budget"
    result = judged(filling(truncates), case)
    assert (result.state, result.kind, result.level) == ("fail", "budget", "published")
    assert judged(filling(truncates, "published"), case).state == "pass"


def test_a_promise_that_is_not_kept() -> None:
    case = sample(tokens=9, topk=8, routing="shuffled")
    result = judged(filling(fill_right, "bit-exact"), case)
    assert (result.state, result.kind, result.level, result.promised) == ("fail", "bits", "within-budget", "bit-exact")
    assert 0 < result.budget_fraction <= 1
    assert "promised bit-exact, reached within-budget" in result.message


def test_exact_data_leaves_no_room() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        out[1, 1] = torch.nextafter(out[1, 1], torch.tensor(1e9))

    assert judged(filling(body), sample()).state == "pass"
    result = judged(filling(body), sample(data="exact"))
    assert (result.state, result.kind, result.wrong) == ("fail", "exact", 1)


def test_minus_zero_for_padding() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        empty = (given["token_topk_to_pos"] < 0).all(dim=1)
        out.copy_(answer(given, out).masked_fill(empty[:, None], -0.0))

    result = judged(filling(body), sample(routing="some_empty"))
    assert (result.state, result.kind) == ("fail", "bits")
    assert "in rows that the contract fixes bit by bit" in result.message


# ---- raising and refusing -------------------------------------------------------------------------------------------


def test_a_kernel_that_raises() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        raise RuntimeError("no such intrinsic")

    result = judged(filling(body))
    assert (result.state, result.kind, result.level) == ("error", "exception", None)
    assert result.message == f"{PLAIN.id} on filler: raised RuntimeError: no such intrinsic"
    assert "in body" in result.trace
    assert "no such intrinsic" in result.trace


def test_a_kernel_that_raises_in_the_second_run() -> None:
    runs = itertools.count()

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        if next(runs) == 1:
            raise ValueError("stale plan")

    result = judged(filling(body))
    assert (result.state, result.kind) == ("error", "exception")


def test_not_supported_is_not_run_with_its_reason() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        raise NotSupported("topk above 4")

    result = judged(filling(body))
    assert (result.state, result.kind, result.lane) == ("not-run", "refused", "route")
    assert result.message == "not supported by filler: topk above 4"


def test_a_parameter_that_a_kernel_lacks() -> None:
    def lacks(x, token_topk_to_pos, topk_weights, out):  # type: ignore[no-untyped-def]
        out.copy_(right(x, token_topk_to_pos, topk_weights, None, None, out.dtype))

    assert judged(subject(lacks)).state == "pass"
    result = judged(subject(lacks), sample(xsf="yes"))
    assert (result.state, result.kind) == ("error", "exception")
    assert "kernel lacks has no parameter 'x_sf'" in result.message


def _refuses_by_exception(params: Any) -> str | None:
    raise NotSupported("topk above 4")


@pytest.mark.parametrize(("options", "words"), [
    ({"supports": lambda params: params["dtype"]}, "supports= of filler asks for parameter 'dtype', which the case"),
    ({"supports": lambda params: True}, "supports= of filler returned True: return None where the case is taken"),
    ({"supports": lambda: None}, "supports= of filler raised TypeError: "),
    ({"supports": lambda params: int("a\nb")}, r"raised ValueError: invalid literal for int() with base 10: 'a\nb'"),
    ({"requires": lambda device: False}, "requires= of filler returned False: return None where it can run"),
    ({"requires": lambda device: 1 / 0}, "requires= of filler raised ZeroDivisionError: division by zero"),
    ({"repeatable": lambda params: params["bits"]}, "repeatable= of filler asks for parameter 'bits'"),
    ({"repeatable": lambda params: "yes"}, "repeatable= of filler returned 'yes': return True or False"),
])
def test_a_declared_function_that_gives_no_answer_is_the_kernels_error(options: dict[str, Any], words: str) -> None:
    calls = itertools.count()

    def nearly_right(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        out.mul_(1 + next(calls) * 2.0**-22)  # other bits the second time: asks whether it repeats them

    result = judged(filling(nearly_right, **options))
    assert (result.state, result.kind) == ("error", "exception")
    assert result.message.startswith(f"{PLAIN.id} on filler: ") and words in result.message
    assert "\n" not in result.message


def test_supports_may_refuse_as_a_kernel_does() -> None:
    kernel = replace(filling(fill_right), supports=_refuses_by_exception)
    assert refusal(sample(), kernel) == "not supported by filler: topk above 4"


@pytest.mark.parametrize("layout", ["strided", "unaligned", "offset", "strided_all", "column_major"])
def test_layouts(layout: str) -> None:
    case = sample(layout=layout)
    plain = judged(filling(fill_right, "bit-exact"), sample(layout=layout, data="exact"))
    assert plain.state == "pass"
    assert plain.path == (None if layout == "offset" else "rejected")
    if layout != "offset":
        assert plain.level == "bit-exact"
        assert plain.message.startswith("rejected, as the contract allows: x ")
    assert judged(filling(fill_right, strided=True), case).path is None

    def refuses(given: Arguments, out: Tensor) -> None:
        raise ValueError("x must start at its storage")

    result = judged(filling(refuses, strided=True), case)
    assert (result.state, result.path) == (("error", None) if layout == "offset" else ("pass", "rejected"))


def test_a_kernel_that_ignores_strides() -> None:
    def body(given: Arguments, out: Tensor) -> None:
        x = given["x"]
        flat = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
        out.copy_(right(**{**given, "x": flat}, dtype=out.dtype))

    assert judged(filling(body, strided=True)).state == "pass"
    assert judged(filling(body, strided=True), sample(layout="strided")).state == "fail"


@pytest.mark.parametrize(("options", "reason", "kind"), [
    ({"devices": ("cuda",)}, "filler runs on cuda", None),
    ({"requires": lambda device: f"no compiler for {device}"}, "no compiler for cpu", None),
    ({"supports": lambda params: f"hidden {params['hidden']} is too small"},
     "not supported by filler: hidden 256 is too small", "refused"),
])
def test_what_cannot_run_says_why(options: dict[str, Any], reason: str, kind: str | None) -> None:
    def body(given: Arguments, out: Tensor) -> None:
        raise AssertionError("must not be called")

    result = judged(filling(body, **options))
    assert (result.state, result.message, result.lane, result.kind) == ("not-run", reason, "route", kind)
    assert "--kernels" in result.rerun


def test_kernels_that_run_here_after_all() -> None:
    options = {"devices": ("cpu",), "requires": lambda device: None, "supports": lambda params: None}
    assert judged(filling(fill_right, **options)).state == "pass"


def test_a_family_that_needs_a_gpu() -> None:
    case = next(case for case in matrix(NAME).cases("edge") if case.family == "F29-replay")
    result = judged(filling(fill_right), case)
    assert (result.state, result.message) == ("not-run", "F29-replay needs cuda")


def test_memory_that_runs_out_in_the_suite_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    monkeypatch.setattr(Judge, "_prepare", prepare)
    result = judged(filling(fill_right))
    assert (result.state, result.kind) == ("error", "memory")
    assert result.message.endswith("out of memory in the suite itself: CUDA out of memory. Tried to allocate 2 GiB")


# ---- ways to launch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launch", "runs"), [(None, 2), ("plain", 2), ("repeat", 25), ("configs", 2)])
def test_how_often_a_kernel_runs(launch: str | None, runs: int) -> None:
    poison: list[float] = []

    def body(given: Arguments, out: Tensor) -> None:
        poison.append(float(out[0, 0]))
        fill_right(given, out)

    case = sample() if launch is None else sample(launch=launch)
    assert judged(filling(body), case).state == "pass"
    assert [math.isnan(value) for value in poison] == [number % 2 == 0 for number in range(runs)]


def test_every_configuration_runs_with_both_poisons() -> None:
    seen: list[tuple[str | None, bool]] = []

    def configured(x, token_topk_to_pos, topk_weights, out, config=None):  # type: ignore[no-untyped-def]
        seen.append((config, bool(out[0, 0].isnan())))
        out.copy_(right(x, token_topk_to_pos, topk_weights, None, None, out.dtype))
        if config == "tile:64":
            out[2, 70] = 0.0

    case = sample(launch="configs", routing="shuffled")
    good = subject(configured, configs=("tile:32", "tile:128"))
    assert judged(good, case).state == "pass"
    own, forced = [(None, True), (None, False)], ("tile:32", "tile:128")
    assert seen == own + [(config, poison) for config in forced for poison in (True, False)]
    result = judged(subject(configured, configs=("tile:32", "tile:64")), case)
    assert (result.state, result.wrong) == ("fail", 1)
    assert "configuration tile:64" in result.message
    seen.clear()
    assert judged(good, sample()).state == "pass"  # elsewhere the kernel chooses
    assert seen == [(None, True), (None, False)]


def test_configurations_may_differ_from_one_another_and_the_weakest_counts() -> None:
    """Tiles of another width may sum in another order; each configuration must only agree with itself."""

    def configured(x, token_topk_to_pos, topk_weights, out, config=None):  # type: ignore[no-untyped-def]
        given = {"x": x, "token_topk_to_pos": token_topk_to_pos, "topk_weights": topk_weights, "x_sf": None, "sf": None}
        config = config or "golden"
        report_path(config)
        if config == "golden":
            out.copy_(golden(**given))
        else:
            (ascending if config == "up" else descending)(given, out)

    case = sample(tokens=9, topk=8, launch="configs", routing="shuffled")
    result = judged(subject(configured, configs=("golden", "up", "down")), case)
    assert (result.state, result.level) == ("pass", "within-budget")
    assert result.path == "golden"  # the path is that of the kernel's own choice
    exact = judged(subject(configured, "bit-exact", configs=("golden", "up")), case)
    assert (exact.state, exact.kind) == ("fail", "bits")
    assert "configuration up, launch 1 (output pre-filled with NaN bytes)" in exact.message
    assert judged(subject(configured, "bit-exact", configs=("golden",)), case).level == "bit-exact"


def test_a_configuration_that_is_not_repeatable() -> None:
    body = changing_order()

    def configured(x, token_topk_to_pos, topk_weights, x_sf, sf, out, config=None):  # type: ignore[no-untyped-def]
        given = {"x": x, "token_topk_to_pos": token_topk_to_pos, "topk_weights": topk_weights, "x_sf": x_sf, "sf": sf}
        (body if config == "b" else ascending)(given, out)

    case = sample(tokens=9, topk=8, launch="configs", routing="shuffled")
    result = judged(subject(configured, configs=("a", "b")), case)
    assert (result.state, result.kind) == ("fail", "repeat")
    assert "'configuration b, launch 1 (output pre-filled with NaN bytes)' and 'configuration b, l" in result.message


def test_an_unknown_way_to_launch() -> None:
    with pytest.raises(ConformanceError, match=r"unknown launch mode 'repeats'\. Did you mean 'repeat'"):
        judged(filling(fill_right), sample(launch="repeats"))


def test_an_unknown_layout_and_a_dtype_that_does_not_fit() -> None:
    with pytest.raises(ConformanceError, match=r"unknown layout 'stridden'\. Did you mean 'strided'"):
        judged(filling(fill_right), sample(layout="stridden"))
    with pytest.raises(ConformanceError, match="in:fp32 out:bf16 is no dtype combination of the contract"):
        judged(filling(fill_right), sample(**{"in": "fp32", "out": "bf16"}))


# ---- what the judge keeps -------------------------------------------------------------------------------------------


def test_cases_of_a_group_share_inputs_and_others_do_not() -> None:
    addresses: list[int] = []

    def body(given: Arguments, out: Tensor) -> None:
        addresses.append(given["x"].data_ptr())
        fill_right(given, out)

    judge, kernel = Judge(Settings()), filling(body)
    for weights, out in itertools.product(("yes", "no"), ("fp32", "e4m3")):
        case = sample(weights=weights, out=out)
        assert judge.run(case, kernel).state == "pass"
        assert judge.holds(case)
    assert len(set(addresses)) == 1
    assert not judge.holds(sample(topk=5))
    assert judge.run(sample(topk=5), kernel).state == "pass"
    assert not judge.holds(sample())
    judge.forget()
    assert not judge.holds(sample(topk=5))


def test_a_case_is_judged_alike_whatever_ran_before() -> None:
    cases = [sample(), sample(out="e4m3"), sample(weights="no"), E4M3, sample(poison="weights"), sample()]
    judge = Judge(Settings())
    one_after_another = [judge.run(case, filling(pairwise)) for case in cases]
    for case, result in zip(cases, one_after_another, strict=True):
        alone = judged(filling(pairwise), case)
        assert (result.state, result.level, result.budget_fraction, result.max_error) == (
            alone.state, alone.level, alone.budget_fraction, alone.max_error)
        assert result.state == "pass"


def test_an_id_given_by_hand_is_the_same_case() -> None:
    by_hand = parse_case(PLAIN.id)
    assert judged(filling(pairwise), by_hand).max_error == judged(filling(pairwise), PLAIN).max_error
    assert Judge(Settings()).device == CPU


def test_a_result_that_is_a_view_of_an_input_fails_in_its_form() -> None:
    case = sample(weights="no", topk=1, routing="identity", tokens=9)

    def body(given: Arguments, dtype: torch.dtype) -> Tensor:
        result = right(**given, dtype=dtype)
        view = given["x"][1 : len(result) + 1]
        assert torch.equal(view, result)  # the values are right: only the memory is not the kernel's own
        return view

    result = judged(returning(body), case)
    assert (result.state, result.kind) == ("fail", "form")
    assert "the result is a view of the input x" in result.message


@pytest.mark.parametrize(("name", "change"), [
    ("a subclass", lambda result: result.as_subclass(type("Special", (Tensor,), {}))),
    ("sparse", lambda result: result.to_sparse()),
    ("a lazy negative", lambda result: torch._neg_view(-result)),
    ("nested", lambda result: torch.nested.nested_tensor(list(result))),
])
def test_what_is_no_plain_tensor_fails_in_its_form(name: str, change: Callable[[Tensor], Tensor]) -> None:
    def body(given: Arguments, dtype: torch.dtype) -> Tensor:
        return change(right(**given, dtype=dtype))

    result = judged(returning(body), sample(**{"in": "fp32", "out": "fp32"}))
    assert (result.state, result.kind) == ("fail", "form"), name


class LeftFunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("still here")


class LeftDispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("still here")


@pytest.mark.parametrize("mode", [LeftFunctionMode, LeftDispatchMode])
def test_a_mode_that_a_kernel_entered_and_did_not_leave_does_not_reach_the_suite(mode: Any) -> None:
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        mode().__enter__()

    assert judged(filling(body)).state == "pass"
    assert judged(filling(fill_right)).state == "pass"


def test_a_kernel_wrong_on_every_second_call_is_not_repeatable_rather_than_poisoned() -> None:
    calls = itertools.count()

    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        if next(calls) % 2:
            out[0, 0] += 8

    result = judged(filling(body))
    assert (result.state, result.kind) == ("fail", "repeat")


def test_a_huge_scale_leaves_a_saturated_result_no_error() -> None:
    case = sample(**{"in": "bf16", "out": "e4m3", "sf": "huge", "data": "real"})

    def body(given: Arguments, out: Tensor) -> None:
        answered = answer(given, out).float()
        out.copy_(torch.where(answered == 448, 416.0, answered).to(out.dtype))

    result = judged(filling(body), case)
    assert (result.state, result.kind) == ("fail", "budget")
    assert judged(filling(fill_right), case).state == "pass"


def test_a_zero_weight_does_not_hide_infinity() -> None:
    case = sample(routing="shuffled", tokens=21, topk=4, data="nonfinite")

    def body(given: Arguments, out: Tensor) -> None:
        skipped = given["token_topk_to_pos"].masked_fill(given["topk_weights"] == 0, -1)
        out.copy_(right(**{**given, "token_topk_to_pos": skipped}, dtype=out.dtype))

    result = judged(filling(body), case)
    assert (result.state, result.kind) == ("fail", "nan-map")
    assert judged(filling(fill_right), case).state == "pass"


@pytest.mark.parametrize("change", [
    lambda given: given["token_topk_to_pos"].t_(), lambda given: given["x"].requires_grad_(True),
    lambda given: torch.set_autocast_enabled("cpu", True),
], ids=["transposed in place", "requires grad", "autocast left on"])
def test_what_a_kernel_does_to_its_tensors_stays_with_it(change: Callable[[Arguments], Any]) -> None:
    """It may fail for it; the next kernel on the same inputs does not."""
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        change(given)

    judge = Judge(Settings())
    judge.run(PLAIN, filling(body))
    assert judge.run(PLAIN, filling(fill_right)).state == "pass"
    assert not torch.is_autocast_enabled("cpu")


def test_a_kernel_that_writes_to_its_first_buffer_again() -> None:
    """Both runs then hold the same wrong numbers."""
    first: list[Tensor] = []

    def body(given: Arguments, out: Tensor) -> None:
        first.append(out)
        fill_right(given, out)
        if len(first) > 1:
            out += 1.0
            first[0].copy_(out)

    result = judged(filling(body))
    assert (result.state, result.kind) == ("fail", "repeat")


def test_a_kernel_that_tidies_what_no_slot_refers_to() -> None:
    """Before the next run another poison is put there, so that nothing of it is left to see at the end."""
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        given["x_sf"].nan_to_num_(nan=0.0)

    case = sample(tokens=9, topk=4, xsf="yes", routing="padding")
    result = judged(filling(body), case)
    assert (result.state, result.kind) == ("fail", "input-changed")
    assert "x_sf" in result.message


def test_inputs_of_any_size_are_looked_at_under_both_poisons() -> None:
    """Of 287 MB, a row of NaN that no slot refers to becomes zeros, before the second run puts other poison there."""
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        row = given["x"][:1]
        row[row.isnan()] = 0.0

    result = judged(filling(body), sample(tokens=3, topk=2, hidden=1024, routing="sparse"))
    assert (result.state, result.kind) == ("fail", "input-changed")
    assert "launch 1 (output pre-filled with NaN bytes): wrote to its input x" in result.message


def test_right_elements_that_look_like_poison_are_not_called_unwritten() -> None:
    """0x5A is a number of e4m3: it is right in some places, and was written there."""
    def body(given: Arguments, out: Tensor) -> None:
        fill_right(given, out)
        if seen:
            out[0, 0] = -float(out[0, 0].float()) or 1.0
        seen.append(1)

    seen: list[int] = []
    case = sample(**{"in": "bf16", "out": "e4m3", "tokens": 61, "topk": 8, "hidden": 1024, "sf": "none"})
    golden = call_of(case)[1].golden
    assert bool((golden.view(torch.uint8) == 0x5A).any())
    result = judged(filling(body, repeatable=False), case)
    assert (result.state, result.wrong) == ("fail", 1)
    assert "still hold" not in result.message
