"""Two-stage MoE: sorting, gate-up, down, reduction. References as pure functions; no operator is declared yet.

sorting            routes grouped by expert, packed ids, padding, expert-parallel masks; sorting_check judges a result
layouts            preshuffled weights, packed int4 and fp4, e8m0 scales, gate and up interleaved; both directions
fp8, mx, rounding  number formats from bits: e4m3 OCP and FNUZ, e2m1 with e8m0, bf16 by two rules
quantise           per-token and per-group quantisation with its policies named
dtypes             the dtypes of a two-stage MoE: what is stored, what scales it, how products are summed
operands           rows and weights as numbers, made from fp32 by a dtype's rules
bounds             fp64 values with the error that correct arithmetic may make
stages, chain      stage 1, stage 2, what passes between them, and both end to end, with bounds
golden             the same in fp32, every rounding where it is documented
verdict            the comparison by element, with figures for rows and the whole
"""
