"""A second formulation of each oracle, in numpy and fp64: other loops, sums from the other end, storage read by its
published addresses. It shares no code with the references, and what it finds is within their budgets, or exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_samples import CPU
from engine_samples import one_thread as one_thread
from numpy.typing import NDArray

from conformance.case import Case
from conformance.formats import bits, cast
from conformance.operator import Call, References, Shared
from conformance.registry import matrices, matrix, operator
from conformance.verdicts.verdict import judge

Array = NDArray[Any]
GROUP = 32
MICROSCALED = ("fp4", "a8w4", "a16w4")
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def array(tensor: torch.Tensor | None) -> Any:
    """numpy's view of a tensor: bf16 and fp8 by their bits."""
    if tensor is None:
        return None
    raw = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e4m3fnuz: torch.uint8}
    value = tensor.view(raw[tensor.dtype]) if tensor.dtype in raw else tensor
    found = value.contiguous().numpy()
    return found.view(np.uint16) if tensor.dtype == torch.bfloat16 else found


def numbers(tensor: torch.Tensor) -> Array:
    """fp64 values, decoded from bits."""
    raw = array(tensor)
    if tensor.dtype == torch.bfloat16:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return _e4m3(tensor.dtype == torch.float8_e4m3fnuz)[raw]
    return np.asarray(raw, dtype=np.float64)


def _e4m3(fnuz: bool) -> Array:
    """The value of each code: sign, 4 bits of exponent with bias 7 (FNUZ: 8), 3 bits of mantissa."""
    table = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        bias = 8 if fnuz else 7
        size = (8 + mantissa) * 2.0 ** (exponent - bias - 3) if exponent else mantissa * 2.0 ** (1 - bias - 3)
        nan = code == 0x80 if fnuz else code & 0x7F == 0x7F
        table[code] = np.nan if nan else -size if sign else size
    return table


# ---- one operator after the other: the outputs by name, as fp64 or as bits ------------------------------------------


def reduce_fused(given: dict[str, Any], call: Call) -> Array:
    x, where = numbers(given["x"]), array(given["token_topk_to_pos"])
    total = np.zeros((len(where), x.shape[1]))
    for slot in reversed(range(where.shape[1])):
        for token in np.nonzero(where[:, slot] >= 0)[0]:
            row = where[token, slot]
            factor = 1.0 if given["topk_weights"] is None else float(given["topk_weights"][token, slot])
            total[token] += x[row] * (factor * (1.0 if given["x_sf"] is None else float(given["x_sf"][row])))
    served = (where >= 0).any(axis=1)
    return np.where(served[:, None], total * (1.0 if given["sf"] is None else float(given["sf"])), 0.0)


def reduction(given: dict[str, Any], call: Call) -> Array:
    part = numbers(given["part"])
    valid = np.ones(part.shape[:2], dtype=bool)
    if given["valid_mask"] is not None:
        valid = array(given["valid_mask"]) != 0
    elif given["expert_mask"] is not None:
        ids, mask = array(given["topk_ids"]), array(given["expert_mask"])
        known = [0 <= one < len(mask) and mask[one] != 0 for one in ids.ravel()]
        valid = np.array(known, dtype=bool).reshape(ids.shape)
    total = np.zeros((part.shape[0], part.shape[2]))
    for slot in reversed(range(part.shape[1])):
        total[valid[:, slot]] += part[valid[:, slot], slot]
    return total


def local_experts(given: dict[str, Any]) -> Array:
    ids, mask = array(given["topk_ids"]), array(given["expert_mask"])
    if mask is None:
        return ids
    number = {expert: place for place, expert in enumerate(np.nonzero(mask)[0].tolist())}
    return np.array([number.get(one, -1) for one in ids.ravel().tolist()], dtype=np.int64).reshape(ids.shape)


def e2m1(nibble: Array) -> Array:
    """Bit 3 is the sign."""
    return E2M1[nibble & 7] * np.where(nibble & 8, -1.0, 1.0)


def e8m0(stored: torch.Tensor, row: Array, column: Array) -> Array:
    """fp64 scales at (row, column), of bytes in memory order [rows/32, columns/8, 4, 16, 2, 2]: a column modulo 4, a
    row modulo 16, a column's half of 8, a row's half of 32. 2^(byte - 127), and 255 is NaN."""
    tile = row // 32 * (stored.shape[1] // 8) + column // 8
    byte = array(stored).reshape(-1)[tile * 256 + column % 4 * 64 + row % 16 * 4 + column % 8 // 4 * 2 + row % 32 // 16]
    return np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127))


def microscaled_rows(given: dict[str, Any], name: str, shape: tuple[int, int]) -> Array:
    """fp64 [T k, K] of x [T, ...] or a2 [T, k, ...]: a route's scales stand at its place in the sorted list."""
    stored, (tokens, topk) = given[name], shape
    value = numbers(stored)
    if stored.dtype == torch.uint8:
        raw = array(stored)
        value = np.stack([e2m1(raw & 15), e2m1(raw >> 4)], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    found, k = np.zeros((tokens * topk, value.shape[-1])), np.arange(value.shape[-1])
    for place in range(int(given["num_valid_ids"][0])):
        packed = int(given["sorted_token_ids"][place])
        token, slot = packed & 0xFFFFFF, packed >> 24
        if token < tokens:
            element = value[token] if value.ndim == 2 else value[token, slot]
            found[token * topk + slot] = element * e8m0(given[f"scale_{name}"], np.array(place), k // GROUP)
    return found


def weight(given: dict[str, Any], name: str, expert: int, width: int) -> Array:
    """fp64 [N, K]; see ``plain_weight``. A packed e2m1 weight is preshuffled as bytes, which hold k and k + 1; the
    scales of experts follow one another."""
    if given["in_dtype"] not in MICROSCALED:
        return plain_weight(given, name, expert, width)
    stored, half = given[name][expert], width // 2
    n, k = np.arange(len(stored))[:, None], np.arange(width)[None]
    place = n // 16 * 16 * half + k // 2 // 16 * 256 + n % 16 * 16 + k // 2 % 16
    nibble = array(stored).reshape(-1)[place] >> 4 * (k % 2) & 15
    return e2m1(nibble) * e8m0(given[f"scale_{name}"], expert * len(stored) + n, k // GROUP)


def plain_weight(given: dict[str, Any], name: str, expert: int, width: int) -> Array:
    """fp64 [N, K]: element (n, k) of a preshuffled weight lies at (n / 16) 16 K + (k / V) 16 V + (n % 16) V + k % V,
    V elements being 16 bytes; of int4 that is the place before 8 numbers were packed into 4 bytes."""
    stored, scale = given[name][expert], given[f"scale_{name}"]
    packed, rows = given["in_dtype"].startswith("int4"), len(stored)
    step = 16 if packed else 16 // stored.element_size()
    n, k = np.arange(rows)[:, None], np.arange(width)[None]
    place = n // 16 * 16 * width + k // step * 16 * step + n % 16 * step + k % step
    if packed:
        byte = array(stored).reshape(-1)[place // 8 * 4 + place % 4].astype(np.int64)
        nibble = np.where(place % 8 >= 4, byte >> 4, byte & 15)
        value = np.where(nibble >= 8, nibble - 16, nibble).astype(np.float64)
    else:
        value = numbers(stored).reshape(-1)[place]
    if scale is None:
        return value
    factor = array(scale[expert]).astype(np.float64)
    return value * (np.repeat(factor, GROUP, axis=0).T if factor.ndim == 2 else factor[:, None])


def gate_up(given: dict[str, Any], local: Array) -> Array:
    """fp64 [T, k, I] of stage 1."""
    (tokens, topk), inter, blocks = local.shape, given["w1"].shape[1] // 2, given["in_dtype"] in MICROSCALED[:2]
    x = microscaled_rows(given, "x", (tokens, topk)) if blocks else numbers(given["x"])
    shares = array(given["topk_weights"]).astype(np.float64)
    found, how = np.zeros((tokens, topk, inter)), given.get("doweight", "none")
    for expert in sorted({*local.flatten().tolist()} - {-1}, reverse=True):
        w1 = weight(given, "w1", expert, x.shape[1])[:, ::-1]
        for token, slot in zip(*np.nonzero(local == expert), strict=True):
            row = slot * tokens + token if given["in_dtype"] == "int8smooth" else token
            row = token * topk + slot if blocks else row
            scale = 1.0 if given["scale_x"] is None or blocks else float(given["scale_x"][row])
            sums, share = w1 @ x[row, ::-1] * scale, shares[token, slot]
            gate = sums[:inter] * (share if how in ("gate", "gate-and-up") else 1.0)
            y = gate / (1 + np.exp(-gate)) * sums[inter:] * (share if how == "gate-and-up" else 1.0)
            found[token, slot] = y * (share if how == "after" else 1.0)
    return found


def down(given: dict[str, Any], local: Array, a2: Array, scale: Array | None) -> Array:
    """fp64 [T, k, H] of stage 2, weighted."""
    shares = array(given["topk_weights"]).astype(np.float64)
    found = np.zeros((*local.shape, given["w2"].shape[1]))
    for expert in sorted({*local.flatten().tolist()} - {-1}, reverse=True):
        w2 = weight(given, "w2", expert, a2.shape[2])[:, ::-1]
        for token, slot in zip(*np.nonzero(local == expert), strict=True):
            factor = shares[token, slot] * (1.0 if scale is None else scale[token, slot])
            found[token, slot] = w2 @ a2[token, slot, ::-1] * factor
    return found


def gemm1(given: dict[str, Any], call: Call) -> Array:
    found = gate_up(given, local_experts(given))
    return found.reshape(-1, found.shape[2])


def gemm2(given: dict[str, Any], call: Call) -> Array:
    local, scale = local_experts(given), array(given["scale_a2"])
    if given["in_dtype"] in MICROSCALED[:2]:
        a2, scale = microscaled_rows(given, "a2", local.shape), None
        a2 = a2.reshape(*local.shape, a2.shape[1])
    else:
        a2 = numbers(given["a2"])
    found = down(given, local, a2, None if scale is None else scale.reshape(local.shape))
    return found.reshape(-1, found.shape[2]) if given["combine"] == "reduce" else found.sum(axis=1)


def block_power(largest: float, rule: str, top: float, mantissa: int) -> int:
    """Exponent of a block's scale by the rule; ``top``: the format's largest number, of so many bits of mantissa."""
    exponent = math.floor(math.log2(top))
    if rule == "up":
        power = -127
        while largest > top * 2.0**power:
            power += 1
        return power
    if rule == "even":
        unit = 2.0 ** (math.frexp(largest)[1] - 1 - mantissa)
        largest = math.floor(largest / unit + 0.5) * unit
    return max(-127, math.frexp(largest)[1] - 1 - exponent)


def in_blocks(value: Array, dtype: str, rule: str) -> Array:
    """fp64 of fp32 [T, k, I]: blocks of 32 in e2m1 or e4m3, to nearest, ties to the even code, saturating."""
    table = E2M1 if dtype == "fp4" else _e4m3(False)[:127]
    found = np.zeros(value.shape)
    for place in np.ndindex(*value.shape[:2], value.shape[2] // GROUP):
        here = (*place[:2], slice(place[2] * GROUP, (place[2] + 1) * GROUP))
        block = value[here].astype(np.float64)
        if not block.any():
            continue
        scale = 2.0 ** block_power(float(np.abs(block).max()), rule, float(table[-1]), 1 if dtype == "fp4" else 3)
        distance = np.abs(np.abs(block)[:, None] / scale - table)
        codes = np.arange(len(table))
        best = np.lexsort((np.broadcast_to(codes % 2, distance.shape), distance), axis=-1)[:, 0]
        found[here] = np.copysign(table[best], block) * scale
    return found


def gemm_2stage(given: dict[str, Any], call: Call) -> Array:
    """f16 between the stages, then one scale per row in fp32, or a power of two per block, as the contract says."""
    local = local_experts(given)
    with np.errstate(over="ignore"):
        value = gate_up(given, local).astype(np.float16).astype(np.float32)
    if given["in_dtype"] in MICROSCALED[:2]:
        return down(given, local, in_blocks(value, given["in_dtype"], given["rule"]), None).sum(axis=1)
    if given["smooth2"] is not None:
        value *= array(given["smooth2"])[np.maximum(local, 0)]
    if given["x"].dtype in (torch.float16, torch.bfloat16):
        between = numbers(torch.from_numpy(value).to(given["x"].dtype))
        return down(given, local, between, None).sum(axis=1)
    largest = np.float32({torch.int8: 127, torch.float8_e4m3fn: 448, torch.float8_e4m3fnuz: 240}[given["x"].dtype])
    scale = np.abs(value).max(axis=2) / largest
    scale = np.where(scale == 0, np.float32(1), scale)
    ratio = value / scale[..., None]
    if given["x"].dtype == torch.int8:
        code = np.trunc(ratio) if given["rule"] == "truncate" else np.rint(ratio)
    else:
        code = numbers(torch.from_numpy(np.clip(ratio, -largest, largest) + np.float32(0)).to(given["x"].dtype))
    return down(given, local, code.astype(np.float64), scale.astype(np.float64)).sum(axis=1)


def sorting(given: dict[str, Any], call: Call) -> dict[str, Array]:
    ids, experts, block = array(given["topk_ids"]), given["experts"], given["block"]
    (tokens, topk), mask = ids.shape, array(given["expert_mask"])
    local = np.where((ids < 0) | (ids >= experts), -1, ids)
    here = np.ones(experts, dtype=bool) if mask is None else mask != 0
    number = np.where(here, np.cumsum(here) - 1, -1)
    local = np.where(local < 0, -1, number[np.maximum(local, 0)])
    slot, token = np.meshgrid(np.arange(topk), np.arange(tokens))
    order = np.lexsort((slot.ravel(), token.ravel(), local.ravel()))
    order = order[local.ravel()[order] >= 0]
    rows = tokens * topk + experts * block - topk
    found = {"sorted_token_ids": np.full(rows, topk << 24 | tokens, np.int32),
             "sorted_weights": np.zeros(rows, np.float32),
             "sorted_expert_ids": np.full(-(-rows // block), -1, np.int32),
             "moe_buf": np.zeros(call.outputs["moe_buf"].shape)}
    start = 0
    for expert in range(int(here.sum())):
        run = order[local.ravel()[order] == expert]
        found["sorted_token_ids"][start : start + len(run)] = slot.ravel()[run] << 24 | token.ravel()[run]
        found["sorted_weights"].view(np.int32)[start : start + len(run)] = array(
            given["topk_weights"].contiguous()).view(np.int32).ravel()[run]
        end = start + -(-len(run) // block) * block
        found["sorted_expert_ids"][start // block : end // block] = expert
        start = end
    return found | {"num_valid_ids": np.array([start, tokens], np.int32)}


FORMULATIONS: dict[str, Callable[[dict[str, Any], Call], Any]] = {
    "moe_reduce_fused": reduce_fused, "moe_reduction": reduction, "moe_gemm1": gemm1, "moe_gemm2": gemm2,
    "moe_gemm_2stage": gemm_2stage, "moe_sorting": sorting,
}


def cases(name: str) -> list[Case]:
    """Small edge cases with finite data, one of each family, input dtype, mode and rule."""
    of, found = matrix(name), {}
    for case in of.cases("edge"):
        small = case.number("tokens") <= 64 if "tokens" in case.params else False
        known = ("real", "exact", "coded", "zero_rows", "scales")
        usual = case.get("data", "real") in known and "poison" not in case.params
        if small and usual and not of.devices(case) and int(case.get("hidden", "0")) <= 512:
            key = case.family, *(case.get(axis, "") for axis in ("in", "mode", "rule"))
            found.setdefault(key, case)
    blocks = [case for case in found.values() if case.get("in", "") in MICROSCALED]
    others = [case for case in found.values() if case.get("in", "") not in MICROSCALED]
    return [*others[:: 1 if name == "moe_sorting" else 2], *blocks]


def test_every_operator_has_one():
    assert set(FORMULATIONS) == set(matrices())


@pytest.mark.parametrize("name", FORMULATIONS)
def test_the_second_formulation_is_within_the_budget_of_the_first(name):
    chosen = cases(name)
    if name.startswith("moe_gemm"):
        assert set(MICROSCALED) < {case.get("in") for case in chosen}
    assert len(chosen) >= 6 and len({case.get("in", "") for case in chosen}) >= min(
        3, len({case.get("in", "") for case in matrix(name).cases("edge")}))
    for case in chosen:
        of, shared = operator(name), Shared()
        call = of.inputs(case, "reduced", CPU, shared)
        call.set_poison(1)
        references = References.made_of(of.reference(call, shared))
        found = FORMULATIONS[name](dict.fromkeys(of.arguments) | dict(call.arguments), call)
        for output, one in references.of.items():
            value = found[output] if isinstance(found, dict) else found
            if one.exact:
                right = torch.from_numpy(value).to(one.golden.dtype)
                differs = bits(right) != bits(one.golden)
                assert not bool((differs if one.open is None else differs & ~one.open).any()), (case.id, output)
                continue
            verdict = judge(cast(torch.from_numpy(value).float(), one.golden.dtype), call.part(output), one,
                            "within-budget", 0.0)
            assert verdict.passed, f"{case.id}: {verdict.message}"
