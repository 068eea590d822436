"""moe_gemm_2stage: both stages of a two-stage MoE with re-quantisation between them, judged end to end.

    out[t] = sum_s w[t, s] (w2[e] . q(silu(x . gate[e]) (x . up[e])))      e = local expert of (t, s)

Output [T, H] f16, bf16 or f32 (f32 in atomic mode only). The reference never sees a kernel's intermediate. The stages
by themselves are the operators moe_gemm1 and moe_gemm2.

All three share these modules:

sorting            routes grouped by expert, packed ids, padding, expert-parallel masks (moe_sorting is its operator)
scales             e8m0 scales in the order of the sorted list and of the experts
layouts            preshuffled weights, packed int4 and fp4, e8m0 scales, gate and up interleaved; both directions
fp8, mx, rounding  number formats from bits: e4m3 OCP and FNUZ, e2m1 with e8m0, bf16 by two rules
quantise           per-token and per-group quantisation with its policies named
dtypes             the dtypes of a two-stage MoE: what is stored, what scales it, how products are summed
operands           rows and weights as numbers, made from fp32 by a dtype's rules
bounds             fp64 values with the error that correct arithmetic may make
stages, chain      stage 1, stage 2, what passes between them, and both end to end, with bounds
golden             the same in fp32, every rounding where it is documented
storage, contract  the arguments of the operators and their forms; cases: the parameters of a case
draw, nonfinite    data of a case, and NaN and infinity in it
poison, inputs     what no result may depend on, and all arguments put together
reference          golden and oracle of a call, read from its arguments; operators: the declarations
"""

from references.moe_gemm_2stage.operators import declare

__all__ = ["OPERATOR"]

OPERATOR = declare("moe_gemm_2stage", "two-stage MoE end to end: gate and up, SiLU, re-quantisation, down, combination",
                   __doc__.partition("All three")[0])
