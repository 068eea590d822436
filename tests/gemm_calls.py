"""Shared by the tests of the two-stage MoE operators: calls and references of cases, results of a kernel on changed
arguments, and the mutations of table 3.3 (../shared/flydsl.md) as changes of what a kernel is given or gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from gemm_mutations import MUTATIONS
from torch import Tensor

from conformance import Kernel
from conformance.case import Case
from conformance.operator import Arguments, Call, Reference, Shared
from conformance.registry import kernels, matrix, operator
from conformance.verdict import Verdict, judge

CPU = torch.device("cpu")
OPERATORS = ("moe_gemm1", "moe_gemm2", "moe_gemm_2stage")
SHAPES = ("S", "M", "L", "FP4_S", "FP4_M", "FP4_L")


def official(name: str, **params: str) -> list[Case]:
    """Official cases of an operator with these parameter values."""
    return [case for case in matrix(name).cases("official") if params.items() <= case.params.items()]


@functools.lru_cache(maxsize=32)
def prepared(case_id: str) -> tuple[Call, Reference]:
    """Call (reduced sizes, poison 1) and reference; kept for the next caller."""
    from conformance.case import parse_case

    case, shared = parse_case(case_id), Shared()
    contract = operator(case.operator)
    call = contract.inputs(case, "reduced", CPU, shared)
    call.set_poison(1)
    return call, contract.reference(call, shared)


def per_expert(name: str) -> Kernel:
    return kernels(name, ["per_expert"])[0]


def result(kernel: Kernel, call: Call, **changes: Any) -> Tensor:
    """What the kernel makes of the call with some arguments replaced, without validation."""
    out = torch.full(call.output.shape, float("nan"), dtype=call.output.dtype)
    kernel.function(**(call.arguments | changes), out=out)
    return out


def verdict(found: Tensor, call: Call, reference: Reference) -> Verdict:
    return judge(found, call, reference, "within-budget", 0.0)


# ---- mutations ------------------------------------------------------------------------------------------------------

Change = Callable[[Arguments], "Arguments | None"]


def _roll_gate(given: Arguments) -> Arguments | None:
    """Preshuffled rows lie in tiles of 16, so that half of them can be moved as they are."""
    if "w1" not in given:
        return None
    half, scale = given["w1"].shape[1] // 2, given["scale_w1"]
    w1 = _bytes(given["w1"]).roll(half, dims=1).view(given["w1"].dtype)
    return {"w1": w1, "scale_w1": None if scale is None else scale.roll(half, dims=2 if scale.dim() == 3 else 1)}


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.element_size() == 1 else value


def _swap_nibbles(given: Arguments) -> Arguments:
    """4-bit weights with low and high nibbles exchanged; others with the same neighbours exchanged."""
    name = "w2" if "w2" in given else "w1"
    stored = given[name]
    if given["in_dtype"].startswith("int4"):
        return {name: stored << 4 | stored >> 4}
    return {name: _bytes(stored).unflatten(-1, (-1, 2, 4)).flip(-2).flatten(-3).view(stored.dtype)}


def _slot_0(given: Arguments) -> Arguments:
    """Stage 2 reads slot 0's row for every slot; where there is no a2 to change, slot 0's expert."""
    if "a2" not in given:
        return {"topk_ids": given["topk_ids"][:, :1].expand_as(given["topk_ids"]).contiguous()}
    a2, scale = given["a2"], given["scale_a2"]
    tokens, topk, _ = a2.shape
    first = _bytes(a2)[:, :1].expand_as(a2).contiguous().view(a2.dtype)
    if scale is not None:
        scale = scale.view(tokens, topk)[:, :1].repeat(1, topk).flatten()
    return {"a2": first, "scale_a2": scale}


def _first_scale(given: Arguments) -> Arguments | None:
    name = "scale_x" if "scale_x" in given else "scale_a2"
    scale = given[name]
    return None if scale is None else {name: scale[:1].expand_as(scale).contiguous()}


def _next_expert(given: Arguments) -> Arguments:
    experts = len(given["w2" if "w2" in given else "w1"])
    return {"topk_ids": (given["topk_ids"] + 1) % experts}


def _without_last_slot(given: Arguments) -> Arguments:
    ids = given["topk_ids"].clone()
    ids[:, -1] = 1 << 20  # no expert
    return {"topk_ids": ids}


def _weights(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda given: None if "w2" not in given else {"topk_weights": change(given["topk_weights"])}


CHANGES: dict[str, Change] = {
    "slot-0 gather": _slot_0,
    "wrong expert": _next_expert,
    "gate and up swapped": _roll_gate,
    "nibble halves swapped": _swap_nibbles,
    "last slot dropped": _without_last_slot,
    "routing weights ignored": _weights(lambda weights: torch.full_like(weights, 1 / weights.shape[1])),
    "routing weights twice": _weights(lambda weights: weights**2),
    "scale of token 0 for all": _first_scale,
}
AFTER = {mutation.name: mutation.after for mutation in MUTATIONS if mutation.after is not None}
assert {mutation.name for mutation in MUTATIONS} == {*CHANGES, *AFTER}


def mutants(call: Call) -> dict[str, Tensor]:
    """Outputs of per_expert under each mutation that the call has room for."""
    kernel = per_expert(call.case.operator)
    right = result(kernel, call)
    found = {name: after(right) for name, after in AFTER.items()}
    for name, change in CHANGES.items():
        changed = change(call.arguments)
        if changed is not None:
            found[name] = result(kernel, call, **changed)
    return found
