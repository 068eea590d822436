"""moe_sorting: the routes of all tokens grouped by expert, each expert's run padded to whole blocks of rows.

    topk_ids int32 [T, k], topk_weights fp32 [T, k]     ->  sorted_token_ids int32 [P]     slot << 24 | token
    expert_mask int32 [E] or None: 0 = lives elsewhere      sorted_weights fp32 [P]        the routing weight of each id
    experts = E, block = BM, hidden = H                     sorted_expert_ids int32 [B]    local expert of each block
    buffer_dtype: fp16, bf16 or fp32                        num_valid_ids int32 [2]        padded rows in use, and T
    invalid, duplicates: policies, None = reject            moe_buf [T, H]                 zeros: stage 2 adds to it

P = T k + E BM - k, B = ceil(P / BM), T < 2^24, k <= min(E, 127), BM a multiple of 16 up to 256. Experts ascend; the
padding of each run, and all ids past the valid rows, are the sentinel k << 24 | T. With a mask, local experts are
numbered by their order. Golden: `references.moe_gemm_2stage.sorting`.
"""

from conformance.operator import Operator
from references.moe_sorting.contract import ARGUMENTS, OUTPUTS, VARIANTS, cost, output, validate, variant
from references.moe_sorting.faults import FAULTS
from references.moe_sorting.inputs import inputs, memory, tokens_expected
from references.moe_sorting.reference import golden, reference

__all__ = ["ARGUMENTS", "OPERATOR", "OUTPUTS", "VARIANTS", "cost", "golden", "inputs", "memory", "output", "reference",
           "tokens_expected", "validate", "variant"]

OPERATOR = Operator(
    name="moe_sorting",
    about="routes grouped by expert and padded to blocks, with packed ids, weights, experts of blocks, zeroed buffer",
    contract=__doc__,
    arguments=ARGUMENTS,
    variants=VARIANTS,
    variant=variant,
    validate=validate,
    output=output,
    inputs=inputs,
    reference=reference,
    memory=memory,
    cost=cost,
    outputs=OUTPUTS,
    faulty_outputs=FAULTS,
    another_expert="next-block",
    policies={
        "order": "of the routes in one expert's run any, its padding included, each weight beside its id. A kernel "
        "that promises 'bit-exact' is stable: by token, then the padding.",
        "left open": "weights of padding, and experts of the blocks past the valid ones.",
        "tail": "every id past num_valid_ids[0] is the sentinel: kernels that launch all blocks read them.",
        "invalid ids": "outside [0, E), negative ones other than -1 too: refused, or with invalid='skip' no route "
        "and no weight is read; none counts from the end. Sorts of "
        "FlyDSL and aiter of 2026-08 do neither.",
        "duplicates": "an expert twice in a token: refused, or with duplicates='keep' two routes. The GPU sorts of "
        "FlyDSL and aiter lose one.",
        "expert mask": "0 masks; every other value does not. Masked experts have no blocks and no number.",
        "weights": "are copied bit by bit, infinities, -0 and the payload of NaN too; those of slots without a local "
        "expert are not read.",
        "buffer": "every byte of moe_buf is 0, -0 is wrong.",
    },
    budget="none: every output is exact",
)
