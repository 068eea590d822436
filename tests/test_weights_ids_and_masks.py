"""Wrong kernels that passed until cases were made for them: sizes of routing weights, low bits of ids, kept masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.registry import kernels, matrix
from conformance.result import Settings


def states(operator: str, family: str, wrong: Kernel) -> set[str]:
    cases = [case for case in matrix(operator).cases("edge") if case.family == family]
    judge = Judge(Settings())
    return {judge.run(case, wrong).state for case in cases}


def around(operator: str, name: str, argument: str, change: Callable[[Tensor], Tensor | None]) -> Kernel:
    """The PyTorch kernel of an operator with one argument changed before it."""
    (sound,) = kernels(operator, [name])

    def wrong(**given: Any) -> Any:
        value = given[argument]
        return sound.function(**{**given, argument: value if value is None else change(value)})

    return replace(sound, name="wrong", function=wrong)


def clamped(weights: Tensor) -> Tensor:
    return weights.clamp(-1, 1)


def flushed(weights: Tensor) -> Tensor:
    return torch.where(weights.abs() < 2.0**-126, weights * 0, weights)


@pytest.mark.parametrize(("operator", "change"), [
    ("moe_gemm1", clamped), ("moe_gemm2", clamped), ("moe_gemm_2stage", clamped),
    ("moe_gemm2", flushed), ("moe_gemm_2stage", flushed),
])
def test_routing_weights_of_any_size_count(operator: str, change: Callable[[Tensor], Tensor]) -> None:
    assert "fail" in states(operator, "F18-weight-size", around(operator, "per_expert", "topk_weights", change))


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_ids_outside_are_outside_in_all_their_bits(bits: int) -> None:
    def narrow(ids: Tensor) -> Tensor:
        return torch.where(ids >= 0, ids & ((1 << bits) - 1), ids)

    wrong = around("moe_sorting", "sort_torch", "topk_ids", narrow)
    cases = [case for case in matrix("moe_sorting").cases("edge")
             if case.get("ids") == "wild" and 2 <= case.number("experts") <= 1 << bits]
    judge = Judge(Settings())
    assert "fail" in {judge.run(case, wrong).state for case in cases[:12]}


def test_that_all_experts_are_local_is_not_remembered() -> None:
    kept: dict[int, bool] = {}

    def remembered(mask: Tensor) -> Tensor:
        if mask.data_ptr() not in kept:
            kept.clear()
            kept[mask.data_ptr()] = bool((mask != 0).all())
        return torch.ones_like(mask) if kept[mask.data_ptr()] else mask

    assert "fail" in states("moe_reduction", "F34-local-experts",
                            around("moe_reduction", "reduction_torch", "expert_mask", remembered))


def test_columns_of_any_number_are_written() -> None:
    (sound,) = kernels("moe_reduction", ["reduction_torch"])

    def wrong(*, out: Tensor, **given: Any) -> None:
        sound.function(out=out, **given)
        out[:, 16384:] = 0

    assert "fail" in states("moe_reduction", "F27-extents", replace(sound, name="wrong", function=wrong))
