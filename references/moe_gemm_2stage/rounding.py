"""The last rounding of a stage, fp32 to its output format. For bf16 two rules are in use."""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUTS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
BF16_RULES = ("half-even", "half-away")


def bf16_half_away(value: Tensor) -> Tensor:
    """fp32 to bf16 as FlyDSL's epilogues do: add half a unit to the magnitude's bits and cut.

    It differs from rounding to even by one unit on ties whose lower neighbour is even. A NaN keeps its upper bits, so
    that one whose mantissa is all ones (0x7FFFFFFF) becomes -0.
    """
    pattern = value.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    upper = ((pattern + 0x8000) >> 16) & 0xFFFF
    return torch.where(upper >= 0x8000, upper - 0x10000, upper).to(torch.int16).view(torch.bfloat16)


def round_out(value: Tensor, out: str, bf16_rule: str = "half-even") -> Tensor:
    """fp32 to an output format of `OUTPUTS`. f16 and bf16 overflow to infinity. Raises ValueError for unknown names."""
    if out not in OUTPUTS:
        raise ValueError(f"out is {out!r}: one of {', '.join(OUTPUTS)} is required")
    if bf16_rule not in BF16_RULES:
        raise ValueError(f"bf16_rule is {bf16_rule!r}: one of {', '.join(BF16_RULES)} is required")
    if out == "bf16" and bf16_rule == "half-away":
        return bf16_half_away(value)
    return value.to(OUTPUTS[out])
