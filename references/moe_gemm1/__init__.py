"""moe_gemm1: stage 1 of a two-stage MoE, gate and up projection with SiLU, judged on its own inputs.

    out[t k + s, i] = cast(silu(g[i]) u[i]),  g, u = (x . w1[e]) scale_w1[e] scale_x,  e = local expert of (t, s)

Output [T k, I] f16 or bf16.
"""

from references.moe_gemm_2stage.operators import declare

__all__ = ["OPERATOR"]

OPERATOR = declare("moe_gemm1", "stage 1 of a two-stage MoE: silu(x gate) * (x up) of each routed slot", __doc__)
