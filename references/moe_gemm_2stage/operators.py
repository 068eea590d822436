"""What the three operators have in common: variants, policies and the budget in words."""

from __future__ import annotations

from conformance.case import Case
from conformance.operator import Excluded, Operator
from references.moe_gemm_2stage import contract, scales, storage
from references.moe_gemm_2stage.contract import ARGUMENTS, output, validate
from references.moe_gemm_2stage.cost import cost
from references.moe_gemm_2stage.faults import FAULTS
from references.moe_gemm_2stage.inputs import inputs, memory
from references.moe_gemm_2stage.reference import PUBLISHED, reference, with_fp32_sums
from references.moe_gemm_2stage.storage import STORED

_POLICIES = {
    "slots without an expert": "their rows of stage 1 and of the partials are +0, and so is a token that has no other. "
    "Published kernels never write these rows, so a caller that brings no zeroed buffer zeroes it first.",
    "atomic output": "starts from 0, which published sorts write; here the call itself starts it.",
    "expert ids": "topk_ids are global, weights and sorted_expert_ids local: masked experts are left out and the rest "
    "keeps its order.",
    "padding": "ids past num_valid_ids, weights of padding, experts without a token and rows without an expert may "
    "hold anything: selection, never multiplication by 0.",
    "expert mask": "0 masks; every other value, negative ones too, does not. FlyDSL's own callers give 0 and 1.",
    "order of rows": "of one expert any: token, slot and weight of a row are those of its place in the sorted list. "
    "Sorts that take places by atomic counters leave them in no order.",
    "routing weights": "any number: a slot whose weight is 0, below it or NaN counts like any other, and 0 times NaN "
    "or infinity is NaN.",
    "rounding": "f16 to nearest even, to infinity beyond its range, never to its largest number; bf16 to nearest, ties "
    "either way. A NaN stays one.",
    "overflow of sums": "where every order and width of a sum leaves f16's range, infinity. Where only some do, with a "
    "term or a partial sum, that infinity, NaN where both may be met, or the sum itself, as of who adds in fp32. Data "
    "for this has no published tolerance.",
    "fp8": "e4m3 as the operands' dtype says, OCP or FNUZ; re-quantisation saturates.",
    "integers": "a weight may be any code, -128 and -8 too. Rows lie from -127 to 127, as quantisation by the largest "
    "magnitude leaves them.",
    "integer sums": "of int8 rows and integer weights are exact: they are scaled afterwards. Who dequantises rows and "
    "weights before, and sums fp32 numbers, rounds where int32 does not.",
    "weights of int4_bf16 and int4_bf16_g32": "multiplied as codes, their scales applied to fp32 sums, or times their "
    "scale rounded to bf16 before, to nearest, as bf16 matrix instructions ask for. The budget holds what that very "
    "rounding moves an element by, so that neither weights that are cut to bf16 nor scales that are rounded to it "
    "pass. Data with terms of thousands has no published tolerance.",
    "e8m0": "a scale per 32 elements; byte 0 is 2^-127 and not 0, 255 is NaN, of a block's sums as well. Packed e2m1 "
    "has the even k in the low nibble. Scales of rows stand at the route's place in the sorted list.",
    "sign of scales": "fp32 scales are positive; what comes of others is open.",
    "subnormal rows": "bf16 rows are not drawn below 2^-126, and may count as 0 there.",
    "subnormal scales": "count, in e8m0 and in fp32: none is flushed to 0. CUDA and HIP keep them unless told "
    "otherwise, as by nvcc's -ftz=true, which -use_fast_math contains.",
    "order": "of sums within a row any; of slots in atomic mode any, each addition rounded to the output's format.",
}
_CHAIN = {
    "between the stages": "out1 is f16, then per row: fp8 and int8 with scale = largest magnitude / largest number, "
    "bf16 by a cast, fp16 as it is; int8smooth is multiplied by smooth2 before. fp4 and a8w4 by blocks of 32. A row's "
    "scale, 1 for a row of zeros, and ratios are fp32 quotients, or products with reciprocals: beside a decision point "
    "either code is right. "
    "Of a row that is re-quantised to fp8 or int8 and holds a NaN or an infinity, nothing is said.",
    "integer quantisation": "as the argument rule says: truncate cuts towards zero, nearest rounds to the nearest, and "
    "ties either way: whether a ratio is one hangs on how it was divided. The golden rounds them half to even. "
    "Codes lie from -127 to 127.",
    "e8m0 scale of a block": "as the argument rule says: floor, of MX 1.0; even, of the largest magnitude rounded to "
    "the element's mantissa; up, the least that does not saturate: 2^n for exactly 6 or 448 times 2^n. Elements to "
    "nearest even, saturating. A block that holds a NaN or an infinity has scale NaN.",
}
_WEIGHT = {"routing weight": "applied once, in stage 2, to the fp32 number before it is rounded."}
_DOWEIGHT = {"routing weight": "in stage 1 as the argument doweight says: none; after: w (silu(g) u); gate: "
             "silu(w g) u; gate-and-up: silu(w g) (w u)."}
_BUDGET = ("min(6 sqrt(n), n) u S per dot product (u = 2^-24, int32 sums exact), one u per scale and weight, through "
           "the derivative of silu, of int4_bf16 and int4_bf16_g32 what rounding the weights to bf16 moves, ")
_ENDS = {
    "moe_gemm1": "half an ULP of the output",
    "moe_gemm2": "half an ULP of the output; atomic: one more for each slot, in the output's format",
    "moe_gemm_2stage": "through f16 and re-quantisation by monotony (4 u for each of its divisions; a code may "
    "move only near a decision point), k roundings in the output's format",
}
_DEQUANTISED = Excluded("sum-of-dequantised", "rows and weights are dequantised before the sum, or integers are "
                        "summed in fp32: the contract sums in int32 and scales the sum", with_fp32_sums)


def _variant(case: Case) -> str:
    return case.get("in")


def declare(name: str, about: str, formula: str) -> Operator:
    """The operator of one of `contract.ARGUMENTS`. formula: what it computes, in words."""
    weight = _DOWEIGHT if name == "moe_gemm1" else _WEIGHT
    return Operator(
        name=name, about=about, arguments=ARGUMENTS[name], variants=STORED, variant=_variant, validate=validate,
        output=output, inputs=inputs, reference=reference, memory=memory, cost=cost,
        policies=_POLICIES | weight | (_CHAIN if name == "moe_gemm_2stage" else {}),
        contract="\n\n".join(map(str.strip, (formula, contract.__doc__, storage.__doc__, scales.__doc__))),
        budget=_BUDGET + _ENDS[name], published=PUBLISHED[name], faults=FAULTS,
        another_expert="next-expert",
        excluded=(_DEQUANTISED,),
    )
