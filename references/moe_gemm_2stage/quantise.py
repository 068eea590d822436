"""Quantisation of rows with one fp32 scale each, or one per group: scale = amax / largest, 0 counted as 1.

Policies: integers are cut towards zero ("truncate", what ``.to(int8)`` does) or rounded half to even ("nearest");
NaN counts as 0 and +-infinity as +- the format's largest value, before the largest magnitude is taken.
Source: pertoken_quant of FlyDSL 7e6dca08.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.data.arithmetic import divided
from references.moe_gemm_2stage import fp8

INTEGER_RULES = ("truncate", "nearest")


@dataclass(frozen=True)
class Target:
    """A format that rows are quantised to. ``encoding``: the 8-bit float, None for integers."""

    name: str
    largest: float
    encoding: fp8.Fp8 | None = None


TARGETS = {
    target.name: target
    for target in (Target("fp8_ocp", 448.0, fp8.OCP), Target("fp8_fnuz", 240.0, fp8.FNUZ), Target("int8", 127.0),
                   Target("int4", 7.0))
}


@dataclass(frozen=True)
class Quantised:
    """``codes`` [..., K]: uint8 patterns of a float format, or int8 integers. ``scale`` fp32 [..., K / group]."""

    codes: Tensor
    scale: Tensor
    target: Target
    group: int

    def payload(self) -> Tensor:
        """fp32 [..., K]: the codes as numbers, without their scale."""
        return self.codes.float() if self.target.encoding is None else fp8.decode(self.codes, self.target.encoding)

    def factors(self) -> Tensor:
        """fp32 [..., K]: the scale of each element."""
        return self.scale.repeat_interleave(self.group, dim=-1)


def quantise(value: Tensor, target: str, rule: str = "truncate", group: int | None = None) -> Quantised:
    """fp32 [..., K] quantised along its last axis, one scale per row, or per ``group`` elements.

    Raises ValueError for an unknown target or rule, and when the group does not divide K.
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}: one of {', '.join(TARGETS)} is required")
    if rule not in INTEGER_RULES:
        raise ValueError(f"rule is {rule!r}: one of {', '.join(INTEGER_RULES)} is required")
    into, size = TARGETS[target], group or value.shape[-1]
    if size < 1 or value.shape[-1] % size:
        raise ValueError(f"group is {size}: a divisor of K = {value.shape[-1]} is required")
    known = value.float().nan_to_num(nan=0.0, posinf=into.largest, neginf=-into.largest)
    groups = known.reshape(*known.shape[:-1], known.shape[-1] // size, size)
    scale = divided(groups.abs().amax(dim=-1), into.largest)
    scale = torch.where(scale == 0, 1.0, scale)
    ratio = (groups / scale[..., None]).view(value.shape)
    if into.encoding is not None:
        return Quantised(fp8.encode(ratio, into.encoding), scale, into, size)
    whole = torch.trunc(ratio) if rule == "truncate" else torch.round(ratio)
    return Quantised(whole.clamp(-into.largest, into.largest).to(torch.int8), scale, into, size)
