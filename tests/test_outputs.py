"""Operators with several outputs: each is held to its own form, guards and reference, and the result names it.

The operator here is made for the tests: of rows x [R, C] it gives their halves in bf16, within an error bound, and the
int32 id of each row's largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance import Kernel, registry
from conformance.case import Case
from conformance.cases.matrix import load_matrix
from conformance.data.generate import fill_rows
from conformance.judging import pins, vacuity
from conformance.judging.judge import Judge
from conformance.operator import Arguments, Call, Cost, Operator, OracleRows, Output, Reference, References, Shared
from conformance.result import Result, Settings
from conformance.verdicts.joint import Joint
from conformance.verdicts.orders import in_order_of

NAME, OUTS = "halves_and_ids", ("halves", "ids")
CASE = Case(NAME, {"rows": "6", "columns": "32"})


def output(arguments: Arguments, dtype: torch.dtype | None) -> dict[str, Output]:
    rows, columns = arguments["x"].shape
    return {"halves": Output((rows, columns), torch.bfloat16), "ids": Output((rows,), torch.int32)}


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    x = fill_rows(torch.empty((case.number("rows"), case.number("columns"))), "real", case.seed & 0xFFFF)
    return Call(case, {"x": x}, output({"x": x}, None), lambda which: None)


def reference(call: Call, shared: Shared) -> References:
    x = call.arguments["x"]

    def oracle():
        yield OracleRows(0, len(x), x.double() / 2, torch.zeros_like(x) + 1e-6)

    return References({"halves": Reference((x / 2).bfloat16(), oracle),
                       "ids": Reference(x.argmax(dim=1).to(torch.int32))})


def validate(arguments: Arguments, out: Any, strided: bool) -> None:
    if not isinstance(arguments["x"], Tensor):
        raise TypeError("x: a tensor is required")


OPERATOR = Operator(NAME, "halves and ids", ("x",), ("base",), lambda case: "base", validate, output, inputs, reference,
                    lambda case, sizes: 1 << 20, lambda call: Cost(0, 0), outputs=OUTS)


@pytest.fixture(autouse=True)
def known(monkeypatch, tmp_path):
    file = tmp_path / f"{NAME}.toml"
    file.write_text(f'operator = "{NAME}"\n[tier.smoke]\nexpand = [{{ rows = 6, columns = 32 }}]\n', encoding="utf-8")
    monkeypatch.setattr(registry, "operators", lambda: {NAME: OPERATOR})
    monkeypatch.setattr(registry, "matrices", lambda: {NAME: load_matrix(file)})


def right(x: Tensor) -> dict[str, Tensor]:
    return {"halves": (x * 0.5).bfloat16(), "ids": x.argmax(dim=1).to(torch.int32)}


def kernel(function: Callable[..., Any], parameters: tuple[str, ...] = ("x", *OUTS), **options: Any) -> Kernel:
    return Kernel("subject", NAME, function, "within-budget", parameters=frozenset(parameters), **options)


def filling(edit: Callable[[dict[str, Tensor]], object] = lambda outs: None) -> Kernel:
    """A kernel that fills its outputs rightly and edits them afterwards."""

    def fills(x: Tensor, **outs: Tensor) -> None:
        for name, value in right(x).items():
            outs[name].copy_(value)
        edit(outs)

    return kernel(fills)


def returning(change: Callable[[dict[str, Tensor]], Any]) -> Kernel:
    return kernel(lambda x: change(right(x)), ("x",))


def judged(subject: Kernel, vacuous: str = "off", case: Case = CASE) -> Result:
    return Judge(Settings(), vacuous).run(case, subject)


def test_outputs_are_filled_by_name_or_returned_by_name_or_in_order() -> None:
    for subject in (filling(), returning(lambda outs: outs), returning(lambda outs: tuple(outs.values())),
                    returning(lambda outs: dict(reversed(outs.items())))):
        found = judged(subject)
        assert (found.state, found.level) == ("pass", "bit-exact"), found.message
        assert found.elements == 6 * 32 + 6


def test_the_weakest_output_counts_and_budgets_belong_to_their_output() -> None:
    def one_step(outs: dict[str, Tensor]) -> None:
        outs["halves"].view(torch.int16)[2, 3] += 1

    found = judged(filling(one_step))
    assert (found.state, found.kind, found.first["output"]) == ("fail", "budget", "halves")
    found = judged(filling())
    assert found.budget_fraction is not None and 0 < found.budget_fraction <= 1


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda outs: outs["halves"], "returned one value; halves, ids are required, by name or in this order"),
    (lambda outs: None, "returned one value; halves, ids are required"),
    (lambda outs: (outs["halves"],), "returned one value; halves, ids are required"),
    (lambda outs: {"halves": outs["halves"]}, "returned halves; halves, ids are required"),
    (lambda outs: {}, "returned no output; halves, ids are required"),
    (lambda outs: outs | {"more": outs["ids"]}, "returned halves, ids, more; halves, ids are required"),
    (lambda outs: outs | {"ids": outs["ids"].long()}, "ids: dtype is torch.int64, torch.int32 is required"),
    (lambda outs: outs | {"ids": outs["ids"][:, None]}, r"ids: shape is (6, 1), (6,) is required"),
    (lambda outs: outs | {"ids": outs["ids"].tolist()}, "ids: returned list instead of a tensor"),
    (lambda outs: (outs["ids"], outs["halves"]), "halves: dtype is torch.int32, torch.bfloat16 is required"),
])
def test_the_form_of_each_output(change, sentence) -> None:
    found = judged(returning(change))
    assert (found.state, found.kind) == ("fail", "form")
    assert sentence in found.message


def test_an_output_that_is_an_input() -> None:
    def shares(x: Tensor) -> dict[str, Tensor]:
        return right(x) | {"ids": x.view(torch.int32)[0, :6]}

    found = judged(kernel(shares, ("x",)))
    assert found.kind == "form" and "ids: the result is a view of the input x" in found.message


def test_some_outputs_and_not_all_are_refused() -> None:
    found = judged(kernel(lambda x, halves: halves, ("x", "halves")))
    assert found.state == "error"
    assert "has parameters for the outputs halves and none for ids: fill all of them or return all" in found.message


def test_each_output_has_bands_and_poison() -> None:
    def beyond(outs: dict[str, Tensor]) -> None:
        outs["ids"].as_strided((7,), (1,))[6] = 5

    found = judged(filling(beyond))
    assert found.kind == "guard" and "ids: 4 bytes changed after the output" in found.message

    def one_left(x: Tensor, halves: Tensor, ids: Tensor) -> None:
        halves.copy_(right(x)["halves"])
        ids[1:] = right(x)["ids"][1:]

    found = judged(kernel(one_left))
    assert (found.kind, found.first["output"], found.wrong) == ("exact", "ids", 1)
    assert "1 elements still hold what the output was pre-filled with, first at [0]" in found.message


def test_a_nan_in_one_output_and_what_else_is_wrong() -> None:
    def both(outs: dict[str, Tensor]) -> None:
        outs["halves"][1, 1] = float("nan")
        outs["ids"][3] += 1

    found = judged(filling(both))
    assert (found.kind, found.first["output"]) == ("nan-map", "halves")
    assert "; ids too is wrong" in found.message
    assert "diagnosis" in (found.details or {})  # an output [rows, columns] with an oracle is diagnosed


def test_integers_keep_all_their_digits() -> None:
    found = judged(filling(lambda outs: outs["ids"].__setitem__(0, 2**31 - 1)))
    assert found.first["actual"] == 2147483647 and "got 2147483647" in found.message


def test_what_differs_between_runs_names_the_output() -> None:
    calls: list[int] = []

    def every_other(outs: dict[str, Tensor]) -> None:
        calls.append(1)
        outs["ids"][5] -= 1 - len(calls) % 2

    found = judged(filling(every_other))
    assert (found.state, found.kind) == ("fail", "repeat")
    assert "ids of the result is not repeatable: 1 elements differ between 'launch 1 (" in found.message
    assert found.first["output"] == "ids"


def test_redrawn_inputs_and_results_kept_from_earlier_calls() -> None:
    case = Case(NAME, {**CASE.params, "launch": "redraw"})
    assert judged(returning(lambda outs: outs), case=case).state == "pass"
    kept: dict[str, Tensor] = {}

    def reuses(outs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not kept:
            kept.update(outs)
        kept["ids"].copy_(outs["ids"])
        return outs | {"ids": kept["ids"]}

    found = judged(returning(reuses), case=case)
    assert "a result returned earlier was overwritten" in found.message


def test_a_kernel_is_a_function_too() -> None:
    x = inputs(CASE, "reduced", torch.device("cpu"), Shared()).arguments["x"]
    for subject in (filling(), returning(lambda outs: outs)):
        found = subject(x)
        assert all(torch.equal(found[name], value) for name, value in right(x).items())


def test_every_output_is_proved_and_pinned() -> None:
    call = inputs(CASE, "reduced", torch.device("cpu"), Shared())
    references = References.made_of(reference(call, Shared()))
    assert vacuity.accepted(call, references) is None
    assert judged(filling(), "all").state == "pass"
    lax = References(references.of, lambda results: {
        **references.of, "ids": Reference(results["ids"])})
    assert "ids: zeros" in (vacuity.accepted(call, lax) or "")
    first = pins.digest(references)
    other = {**references.of, "ids": Reference(references.of["ids"].golden + 1)}
    assert pins.digest(References(other)) != first == pins.digest(References(dict(references.of)))
    assert pins.digest(References.made_of(references.of["ids"])) == pins.digest(references.of["ids"].golden)


def test_joint_of_one_output_is_that_output() -> None:
    call = inputs(CASE, "reduced", torch.device("cpu"), Shared()).part("ids")
    golden = reference(call, Shared()).of["ids"]
    joint = Joint.of(call, golden)
    assert list(joint.references.of) == ["out"]
    verdict, name = joint.judge({"out": golden.golden + 1}, "within-budget")
    assert name == "out" and verdict.message.startswith("6 of 6 elements differ where the contract fixes every bit")


# ---- orders ---------------------------------------------------------------------------------------------------------


def ordered(found: list[int], golden: list[int], groups: list[int]) -> list[int]:
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (found, golden))
    order = in_order_of(*tensors, torch.tensor(groups, dtype=torch.int64))
    assert sorted(order.tolist()) == list(range(len(found)))
    return [golden[index] for index in order.tolist()]


def test_entries_change_places_within_their_group_only() -> None:
    groups = [0, 0, 0, 1, 1]
    assert ordered([3, 1, 2, 5, 4], [1, 2, 3, 4, 5], groups) == [3, 1, 2, 5, 4]
    assert ordered([4, 1, 2, 5, 3], [1, 2, 3, 4, 5], groups) == [3, 1, 2, 5, 4]  # 4 and 3 stand in the wrong group
    assert ordered([7, 7, 2, 4, 4], [7, 7, 2, 4, 5], groups) == [7, 7, 2, 4, 5]
    assert ordered([2, 2, 3], [1, 2, 3], [0, 0, 0]) == [1, 2, 3]  # the one in its place is right, the other is not
    assert ordered([], [], []) == []
    assert ordered([-1, -(2**31)], [-(2**31), -1], [0, 0]) == [-1, -(2**31)]


def test_as_few_places_differ_as_can_be() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        golden = torch.randint(0, 9, (40,), generator=generator).tolist()
        groups = sorted(torch.randint(0, 5, (40,), generator=generator).tolist())
        found = torch.randint(0, 9, (40,), generator=generator).tolist()
        matches = 0
        for group in set(groups):
            here = [i for i, of in enumerate(groups) if of == group]
            left = [golden[i] for i in here]
            for i in here:
                if found[i] in left:
                    left.remove(found[i])
                    matches += 1
        right_places = ordered(found, golden, groups)
        assert sum(a == b for a, b in zip(found, right_places, strict=True)) == matches
