"""The Triton kernel behind `conformance.verdicts.fused`, which alone imports this module, where Triton is installed."""
# No "from __future__ import annotations" here: Triton reads the annotations of the function that it compiles.

import triton
import triton.language as tl

_EXPONENT: tl.constexpr = tl.constexpr(0x7FF0000000000000)  # of fp64


@triton.jit
def worst_of_blocks(result, value, error, worst, count, half_ulp_of_one, smallest, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """worst[b], fp64: the largest budget fraction of elements b * BLOCK to (b + 1) * BLOCK; infinite where one is NaN
    or has an infinite budget.

    result: float; value: fp64; error: fp32; [count] each. half_ulp_of_one: of the format; smallest: its smallest
    normal number; limit: where it saturates, else infinite.
    """
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    found = tl.load(result + at, mask=here, other=0.0).to(tl.float32).to(tl.float64)
    expected = tl.load(value + at, mask=here, other=0.0)
    allowed = tl.load(error + at, mask=here, other=1.0).to(tl.float64)
    low = tl.minimum(tl.maximum(expected - allowed, -limit), limit)
    high = tl.minimum(tl.maximum(expected + allowed, -limit), limit)
    expected = tl.minimum(tl.maximum(expected, -limit), limit)
    error = tl.maximum(expected - low, high - expected)  # what saturates has none left beyond the largest value
    magnitude = tl.abs(expected) + error
    power = (magnitude.to(tl.int64, bitcast=True) & _EXPONENT).to(tl.float64, bitcast=True)  # 2**floor(log2 magnitude)
    fraction = tl.abs(found - expected) / (error + tl.maximum(power, smallest) * half_ulp_of_one)
    known = (fraction == fraction) & (allowed < float("inf"))
    tl.store(worst + block, tl.max(tl.where(known, fraction, float("inf")), axis=0))
