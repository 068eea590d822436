"""moe_gemm2: stage 2 of a two-stage MoE, down projection, judged on its own inputs, which differ per slot.

    z[t, s, n] = (a2[t, s] . w2[e, n]) scale_w2[e, n] scale_a2[t k + s] topk_weights[t, s],  e = local expert of (t, s)
    atomic: out[t, n] += cast(z), from 0; [T, H] f16, bf16 or f32
    reduce: out[t k + s, n] = cast(z); [T k, H] f16 or bf16 (`moe_reduction` adds them)
"""

from references.moe_gemm_2stage.operators import declare

__all__ = ["OPERATOR"]

OPERATOR = declare("moe_gemm2", "stage 2 of a two-stage MoE: weighted down projection, added or as partials",
                   __doc__)
