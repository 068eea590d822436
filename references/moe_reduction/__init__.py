"""moe_reduction: the reduction over slots that ends stage 2 of a two-stage MoE in reduce mode.

    out[t, n] = cast(sum_s fp32(part[t, s, n]))      over the slots s of token t that are valid

part [T, k, H] fp16 | bf16 | fp32, 1 <= k <= 127, any H >= 1. Output [T, H] in part's dtype. Which slots are valid is
said in one of three ways, as the two published interfaces do:

- base: nothing is given, every slot is valid;
- valid_mask: uint8 [T, k], 0 = masked, every other value = valid (FlyDSL 7e6dca08);
- expert_mask: topk_ids int32 [T, k] and expert_mask int32 [E]; slot s is valid where expert_mask[topk_ids[t, s]] is
  not 0 (FlyDSL 11c4174d). An id outside [0, E) makes its slot invalid and is never used as an index.

Golden: fp32 accumulator from +0, valid slots ascending, one fp32 addition each, then one cast. The row of an invalid
slot is not read: nobody has written it.
"""

from conformance.operator import Operator
from references.moe_reduction.contract import VARIANTS, cost, output, valid_slots, validate, variant
from references.moe_reduction.faults import FAULTS
from references.moe_reduction.inputs import inputs, memory, tokens_expected
from references.moe_reduction.reference import accumulate, golden, oracle, reference

__all__ = [
    "OPERATOR",
    "VARIANTS",
    "accumulate",
    "cost",
    "golden",
    "inputs",
    "memory",
    "oracle",
    "output",
    "reference",
    "tokens_expected",
    "valid_slots",
    "validate",
    "variant",
]

OPERATOR = Operator(
    name="moe_reduction",
    about="masked sum of the expert outputs of each token's slots (stage 2, reduce mode)",
    contract=__doc__,
    arguments=("part", "valid_mask", "topk_ids", "expert_mask"),
    variants=VARIANTS,
    variant=variant,
    validate=validate,
    output=output,
    inputs=inputs,
    reference=reference,
    memory=memory,
    cost=cost,
    policies={
        "masked slot": "adds nothing, by selection: its row may hold NaN or infinity, because nothing wrote it. "
        "Multiplying by a mask of 0 is wrong.",
        "mask values": "0 masks; every other value, negative ones and multiples of 256 too, does not.",
        "expert ids": "an id outside [0, E), every negative one and every one from E on, makes its slot invalid: none "
        "counts from the end, none wraps. FlyDSL's kernels of both snapshots leave that undefined and read expert_mask "
        "there.",
        "zero": "a token with only invalid slots is +0. Elsewhere the sign of a zero counts for bit-exactness only.",
        "rounding": "to nearest even in every output format; fp16 and bf16 overflow to infinity. A kernel that "
        "rounds bf16 half away from zero stays within the budget on real data and fails on exact data.",
        "NaN": "stays NaN; compared by position, not by payload or sign.",
        "order": "slots ascending; another order may promise 'within-budget'. On exact data every order must agree.",
    },
    budget="n u S / (1 - n u) + half an ULP of the output format; n = valid slots - 1, u = 2^-24, S = sum |terms|",
    workloads={
        "deepseek_v3_decode": (512, 8, 7168),
        "deepseek_v3_prefill": (4096, 8, 7168),
        "ep_k6_prefill": (1666, 6, 5120),
        "qwen3_30b": (512, 8, 3072),
        "tiny": (32, 2, 256),
    },
    faults=FAULTS,
    another_expert="slot-0-everywhere",
)
