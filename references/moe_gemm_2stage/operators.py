"""What the three operators have in common: variants, cost, policies and the budget in words."""

from __future__ import annotations

from conformance.case import Case
from conformance.operator import Call, Cost, Operator
from references.moe_gemm_2stage.contract import ARGUMENTS, output, sizes_of, validate
from references.moe_gemm_2stage.faults import FAULTS
from references.moe_gemm_2stage.inputs import inputs, memory
from references.moe_gemm_2stage.reference import PUBLISHED, reference
from references.moe_gemm_2stage.sorting import routed
from references.moe_gemm_2stage.storage import STORED

_POLICIES = {
    "slots without an expert": "their rows of stage 1 and of the partials are +0, and so is a token that has no other. "
    "Published kernels never write these rows, so a caller that brings no zeroed buffer zeroes it first.",
    "atomic output": "starts from 0, which published sorts write; here the call itself starts it.",
    "expert ids": "topk_ids are global, weights and sorted_expert_ids local: masked experts are left out and the rest "
    "keeps its order.",
    "padding": "ids past num_valid_ids, weights of padding, experts without a token and rows without an expert may "
    "hold anything: selection, never multiplication by 0.",
    "rounding": "f16 to nearest even, to infinity beyond its range; bf16 to nearest, ties either way.",
    "fp8": "e4m3 as the operands' dtype says, OCP or FNUZ; re-quantisation saturates.",
    "order": "of sums within a row any; of slots in atomic mode any, each addition rounded to the output's format.",
}
_CHAIN = {
    "between the stages": "out1 is f16, then per row: fp8 and int8 with scale = largest magnitude / largest number, "
    "bf16 by a cast, fp16 as it is; int8smooth is multiplied by smooth2 before.",
    "integer quantisation": "as the argument rule says: truncate cuts towards zero, nearest rounds half to even.",
}
_WEIGHT = {"routing weight": "applied once, in stage 2, to the fp32 number before it is rounded."}
_DOWEIGHT = {"routing weight": "in stage 1 as the argument doweight says: none; after: w (silu(g) u); gate: "
             "silu(w g) u; gate-and-up: silu(w g) (w u)."}
_BUDGET = ("min(6 sqrt(n), n) u S per dot product (u = 2^-24, int32 sums exact), one u per scale and weight, through "
           "the derivative of silu, ")
_ENDS = {
    "moe_gemm1": "half an ULP of the output",
    "moe_gemm2": "half an ULP of the output; atomic: one more for each slot, in the output's format",
    "moe_gemm_2stage": "through f16 and re-quantisation by monotony (a code may move only near a decision point), k "
    "roundings in the output's format",
}


_ARITHMETIC = {"fp8": "e4m3", "fp16": "fp16", "int8": "int8", "int8smooth": "int8", "int4": "int8"}  # others: bf16


def _cost(call: Call) -> Cost:
    """Routed rows only: two operations per product, each routed expert's weights and each row once."""
    given, of = call.arguments, sizes_of(call.arguments)
    served = routed(given["topk_ids"], of["E"], given["expert_mask"])
    routes, experts = int(served.sum()), len(given["topk_ids"][served].unique())
    products = (2 * of["I"] * of["H"] if "w1" in given else 0) + (of["H"] * of["I"] if "w2" in given else 0)
    weights = sum(given[name].nbytes // of["E"] * experts for name in ("w1", "w2") if name in given)
    rows = sum(given[name].nbytes for name in ("x", "a2") if name in given)
    return Cost(2 * routes * products, weights + rows + call.output.nbytes,
                _ARITHMETIC.get(given["in_dtype"], "bf16"))


def _variant(case: Case) -> str:
    return case.get("in")


def declare(name: str, about: str) -> Operator:
    """The operator of one of `contract.ARGUMENTS`."""
    weight = _DOWEIGHT if name == "moe_gemm1" else _WEIGHT
    return Operator(
        name=name, about=about, arguments=ARGUMENTS[name], variants=STORED, variant=_variant, validate=validate,
        output=output, inputs=inputs, reference=reference, memory=memory, cost=_cost,
        policies=_POLICIES | weight | (_CHAIN if name == "moe_gemm_2stage" else {}),
        budget=_BUDGET + _ENDS[name], published=PUBLISHED[name], faults=FAULTS,
        another_expert="next-expert",
    )
