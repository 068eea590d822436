"""What a call costs at least: operations and bytes of the roofline, counting routed slots only."""

from __future__ import annotations

from torch import Tensor

from conformance.operator import Call, Cost
from references.moe_gemm_2stage.contract import sizes_of
from references.moe_gemm_2stage.sorting import routed

# Others: bf16. No dense product of 4-bit floats is timed: fp4 is held to that of e4m3.
_ARITHMETIC = {"fp8": "e4m3", "fp16": "fp16", "int8": "int8", "int8smooth": "int8", "int4": "int8", "fp4": "e4m3",
               "a8w4": "e4m3"}


def cost(call: Call) -> Cost:
    """Two operations per product of a routed slot. Bytes, each once: weights of experts that have a slot, rows of slots
    (of tokens, where the slots of a token share one), the scales of both, the lists that say where they go, and the
    whole output."""
    given, of = call.arguments, sizes_of(call.arguments)
    served = routed(given["topk_ids"], of["E"], given["expert_mask"])
    routes, tokens = int(served.sum()), int(served.any(dim=1).sum())
    experts = len(given["topk_ids"][served].unique())
    products = (2 * of["I"] * of["H"] if "w1" in given else 0) + (of["H"] * of["I"] if "w2" in given else 0)
    weights = sum(_share(given.get(name), of["E"]) * experts for name in ("w1", "w2", "scale_w1", "scale_w2"))
    if (smooth := given.get("smooth2")) is not None:
        weights += _share(smooth, smooth.shape[0]) * experts
    rows = 0
    if "x" in given:
        count = given["x"].shape[0]
        per_slot = count != of["T"] or of["k"] == 1
        rows += sum(_share(given[name], count) * (routes if per_slot else tokens) for name in ("x", "scale_x"))
    if "a2" in given:
        rows += sum(_share(given[name], of["T"] * of["k"]) * routes for name in ("a2", "scale_a2"))
    weighed = given.get("doweight", "after") != "none"
    padded = int(given["num_valid_ids"][0])
    lists = 4 * (padded + padded // given["block"] + weighed * routes + 1)  # ids, experts of blocks, weights, the count
    return Cost(2 * routes * products, weights + rows + lists + call.output.nbytes,
                _ARITHMETIC.get(given["in_dtype"], "bf16"))


def _share(value: Tensor | None, parts: int) -> int:
    """Bytes of one of the equal parts that a tensor has; 0 without one."""
    return 0 if value is None else value.nbytes // parts
