"""Shared by the tests of the two-stage MoE operators: calls and references of cases, results of a kernel on changed
arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from conformance import Kernel
from conformance.case import Case
from conformance.operator import Call, Reference, Shared
from conformance.registry import kernels, matrix, operator
from conformance.verdicts.verdict import Verdict, judge

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
