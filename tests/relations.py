"""Shared by the metamorphic tests: the kernels that run here, how hypothesis searches, and sums of budgets.

Deterministic; CONFORMANCE_EXAMPLES sets how many examples each relation tries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings, target
from torch import Tensor

from conformance.formats import BY_DTYPE, bits
from conformance.kernel import Kernel
from conformance.operator import Call, Reference, References
from conformance.registry import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = int(os.environ.get("CONFORMANCE_EXAMPLES", "12"))
PHASES = (Phase.explicit, Phase.generate, Phase.target, Phase.shrink)  # "explain" takes longer than it helps


def tries(examples: int = EXAMPLES) -> settings:
    return settings(max_examples=max(1, examples), derandomize=True, deadline=None, database=None, phases=PHASES,
                    report_multiple_bugs=False)


def kernels_here(operator: str) -> list[Kernel]:
    return [kernel for kernel in kernels(operator) if DEVICE.type in kernel.devices
            and not kernel.lacks(DEVICE.type)]


def every_kernel(operator: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", kernels_here(operator), ids=lambda kernel: kernel.name)


def handed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with contiguous, aligned copies of their tensors on the device."""
    return {name: value.clone(memory_format=torch.contiguous_format).to(DEVICE) if isinstance(value, Tensor) else value
            for name, value in arguments.items()}


def equal(one: Tensor, other: Tensor) -> bool:
    """The same bits, but +0 is -0: cancelled sums have either sign, by the order."""
    return torch.equal(bits(one + 0.0), bits(other + 0.0))


@dataclass(frozen=True)
class Answer:
    """A result [rows, columns] as fp64, and the error that it may have, the cast included."""

    value: Tensor
    budget: Tensor

    @classmethod
    def of(cls, result: Tensor, reference: Reference | References) -> Answer:
        (one,) = References.made_of(reference).of.values()
        half_ulp = BY_DTYPE[result.dtype].half_ulp
        budget = torch.zeros(result.shape, dtype=torch.float64, device=result.device)
        for rows in one.oracle():
            budget[rows.start : rows.stop] = rows.error.double() + half_ulp(rows.value.abs())
        return cls(result.double(), budget)

    def __getitem__(self, rows: Tensor | slice) -> Answer:
        return Answer(self.value[rows], self.budget[rows])

    def __add__(self, other: Answer) -> Answer:
        return Answer(self.value + other.value, self.budget + other.budget)

    def times(self, factor: float) -> Answer:
        return Answer(self.value * factor, self.budget * abs(factor))


def agree(one: Answer, other: Answer, label: str = "") -> None:
    """Two answers to one question lie within the sum of their budgets; the search goes to where little is left.
    ``label``: where a test asks more than once."""
    allowed = one.budget + other.budget
    off = (one.value - other.value).abs()
    fraction = float(torch.where(off == 0, 0.0, off / allowed).max()) if off.numel() else 0.0
    target(min(fraction, 2.0), label=label)
    assert fraction <= 1, f"{fraction:.3g} of the sum of both budgets"


def output_of(kernel: Kernel, call: Call) -> Tensor:
    """What a validated call returns."""
    found: Tensor = kernel(**call.arguments, out_dtype=call.output.dtype)
    return found
