"""Wrong results for outputs whose bits are fixed, to be put to the verdict: see `conformance.judging.vacuity`.

All changes are made to bit patterns, so that they are as small as can be, and mean the same for every dtype. Where an
order is left open, a result counts as wrong only when no order of its elements makes the right one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.formats import bits
from conformance.registry import operator
from conformance.verdicts.joint import Joint


def accepted(joint: Joint, name: str, before: Tensor | None = None) -> tuple[set[str], set[str]]:
    """Which wrong results of one output were tried, all others being right, and which of them the case accepts.
    before: that output of another case."""
    reference = joint.references.of[name]
    goldens = {other: known.golden for other, known in joint.references.of.items()}
    fixed = (torch.ones_like(bits(reference.golden), dtype=torch.bool) if reference.open is None else ~reference.open)
    tried: set[str] = set()
    taken: set[str] = set()
    results = {"the previous case's output": _earlier(reference.golden, before),
               "another expert's block": _foreign(joint, name)}
    for label, change in _CHANGES.items():
        results[label] = reference.golden.clone()
        change(bits(results[label]), fixed)
    for label, result in results.items():
        if _wrong(bits(result)[fixed], bits(reference.golden)[fixed], joint.references.settle is not None):
            tried.add(label)
            if joint.judge(goldens | {name: result}, "within-budget")[0].passed:
                taken.add(label)
    return tried, taken


def _earlier(golden: Tensor, before: Tensor | None) -> Tensor:
    """The golden, over which as much of another case's output is written as fits."""
    result = golden.clone()
    if before is not None and before.dtype == golden.dtype:
        count = min(before.numel(), golden.numel())
        bits(result).view(-1)[:count] = bits(before).reshape(-1)[:count].to(golden.device)
    return result


def _foreign(joint: Joint, name: str) -> Tensor:
    """The output as the operator's fault makes it that takes another expert; the golden where it has none."""
    of = operator(joint.call.case.operator)
    faults = (fault for fault in of.faulty_outputs if fault.key == of.another_expert)
    found = next((one for fault in faults if (one := fault.predict(joint.call)) is not None), None)
    return joint.references.of[name].golden.clone() if found is None else found[name]


def _wrong(found: Tensor, right: Tensor, any_order: bool) -> bool:
    if any_order:
        found, right = found.sort().values, right.sort().values
    return not torch.equal(found, right)


def _one(which: Callable[[int], int]) -> Callable[[Tensor, Tensor], object]:
    """Change the last bit of one element that is not left open: number ``which(count)`` of them."""

    def change(raw: Tensor, fixed: Tensor) -> None:
        places = fixed.nonzero()
        if len(places):
            raw[tuple(places[which(len(places))].tolist())] ^= 1

    return change


def _sign(raw: Tensor) -> int:
    return 1 << 7 if raw.dtype == torch.uint8 else torch.iinfo(raw.dtype).min


# Each changes the bit patterns of an output in place; ``fixed`` masks what is not left open.
_CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "zeros": lambda raw, fixed: raw.zero_(),
    "a constant": lambda raw, fixed: raw.fill_(1),
    "every element one more": lambda raw, fixed: raw.add_(1),
    "every bit inverted": lambda raw, fixed: raw.bitwise_not_(),
    "every sign inverted": lambda raw, fixed: raw.bitwise_xor_(_sign(raw)),
    "in reverse": lambda raw, fixed: raw.copy_(raw.flip(0)),
    "shifted by one": lambda raw, fixed: raw.copy_(raw.roll(1, 0)),
    "its last elements at zero": lambda raw, fixed: raw[-8:].zero_(),
    "its first element changed": _one(lambda count: 0),
    "one element changed": _one(lambda count: count // 2),
    "its last element changed": _one(lambda count: count - 1),
}
