"""moe_reduce_fused: the weighted reduction of expert outputs.

    out[t] = cast(sf * sum_j x[p(t, j)] * w(t, j) * x_sf[p(t, j)])      over slots j with p(t, j) >= 0

x [E, H] fp32 | bf16 | fp16, token_topk_to_pos int32 [T, K] (-1 = padding slot), topk_weights fp32 [T, K] or none
(= 1), x_sf fp32 [E] or none, sf fp32 [1] or none. Output [T, H] in x's dtype, or e4m3. H % 256 == 0.

Golden: fp32 accumulator from +0, slots ascending, s = weight * x_sf[p] (one fp32 product), acc = fma(x, s, acc),
then acc * sf, then one cast. Source of the semantics: TileKernels' reduce_fused (commit 36d9e45).
"""

from conformance.operator import Operator
from references.moe_reduce_fused.contract import VARIANTS, cost, output, validate, variant
from references.moe_reduce_fused.faults import FAULTS
from references.moe_reduce_fused.inputs import inputs, memory, tokens_expected
from references.moe_reduce_fused.reference import accumulate, finish, golden, oracle, reference

__all__ = [
    "OPERATOR",
    "VARIANTS",
    "accumulate",
    "cost",
    "finish",
    "golden",
    "inputs",
    "memory",
    "oracle",
    "output",
    "reference",
    "tokens_expected",
    "validate",
    "variant",
]

OPERATOR = Operator(
    name="moe_reduce_fused",
    about="weighted reduction of expert outputs over each token's slots",
    contract=__doc__,
    arguments=("x", "token_topk_to_pos", "topk_weights", "x_sf", "sf"),
    variants=VARIANTS,
    variant=variant,
    validate=validate,
    output=output,
    inputs=inputs,
    reference=reference,
    memory=memory,
    cost=cost,
    policies={
        "e4m3 overflow": "saturates to +-448 (byte 0x7e), infinity too. Upstream's kernel does the same; upstream's "
        "PyTorch reference gives NaN (0x7f) under torch 2.11 and saturates in newer ones. Clamped explicitly here.",
        "NaN": "stays NaN; compared by position, not by payload or sign.",
        "zero": "a token with only padding slots is +0 (where sf is negative, -0 is accepted from kernels that do not "
        "promise bit-exactness, and NaN where sf is NaN or infinite: upstream multiplies its accumulator, 0, by sf for "
        "every token). Elsewhere the sign of a zero counts for bit-exactness only.",
        "subnormal numbers": "count, in x, weights, scales and sf: none is flushed to 0.",
        "padding slot": "adds nothing, by selection: rows, scales and weights of a padding slot may hold NaN. A weight "
        "or scale of 0 is no padding: 0 times NaN or infinity is NaN.",
        "order": "slots ascending; another order may promise 'within-budget'. On exact data every order must agree.",
    },
    budget="n u S / (1 - n u) + half an ULP of the output format; n = valid slots + 2, u = 2^-24, S = sum |terms|",
    faults=FAULTS,
    another_expert="slot-0-everywhere",
    workloads={
        "deepseek_v3_decode": (512, 8, 7168),
        "deepseek_v3_prefill": (4096, 8, 7168),
        "qwen3_235b": (512, 8, 7168),
        "qwen3_30b": (512, 8, 3072),
        "kimi_k2": (512, 8, 7168),
        "tiny": (32, 2, 256),
    },
)
