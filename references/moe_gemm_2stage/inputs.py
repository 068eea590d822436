"""The arguments of each case: routes, operands of the stages the operator has, and where poison stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.case import Case
from conformance.data.layouts import place
from conformance.operator import Arguments, Call, Shared
from references.moe_gemm_2stage import cases, draw, layouts, nonfinite, scales, sorting
from references.moe_gemm_2stage.cases import Extents
from references.moe_gemm_2stage.contract import ARGUMENTS, output
from references.moe_gemm_2stage.dtypes import Mode
from references.moe_gemm_2stage.fp8 import FORMS
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.poison import Place, setter
from references.moe_gemm_2stage.storage import of_expert, store_rows, store_scales, store_weight, weight_scale_shape

_X, _W1, _W2, _A2, _SMOOTH, _SPOILT = 1, 1_000_003, 2_000_003, 3_000_017, 4_000_037, 5_000_011  # seeds of the operands


@dataclass(frozen=True)
class _Drawn:
    """What the cases of one group share: tensors by argument name, places for poison, and which poison stands."""

    data: str
    arguments: Arguments
    places: list[Place]
    routes: sorting.Sorted
    state: dict[str, int]


@dataclass(frozen=True)
class _Point:
    """One draw: what every operand's generation needs to know. local: expert of each slot, -1 = none here. place: its
    row in the sorted list, of microscaled dtypes."""

    operator: str
    of: Extents
    mode: Mode
    data: str
    encoding: str
    seed: int
    local: Tensor
    place: Tensor | None
    entries: int

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def chained(self) -> bool:
        return {"w1", "w2"} <= set(ARGUMENTS[self.operator])

    def spoilt(self, rows: Operand) -> Operand:
        """The rows, NaN in some of their scales where the data asks for it."""
        lost = self.data == "nan_blocks" and self.chained  # between the stages infinity makes a block NaN as well
        if self.data not in ("nonfinite", "nan_blocks") or lost:
            return rows
        return nonfinite.in_rows(rows, self.mode, self.seed + _SPOILT)

    def spoilt_weight(self, one: Operand, name: str, expert: int) -> Operand:
        """One expert's weights, NaN in some of their channels where the data asks for it."""
        lost = False
        if name == "w1" and self.chained:  # what a row with a NaN is re-quantised to is unspecified; as of rows
            lost = self.mode.microscaled if self.data == "nan_blocks" else self.mode.row_quantised
        if self.data not in ("nan_weights", "nan_blocks") or lost:
            return one
        return nonfinite.in_channels(one, name, expert, self.mode, self.chained, self.seed + _SPOILT)

    def spoil(self, stored: Tensor, *formats: str) -> None:
        """Put NaN and infinities into stored rows of these formats, where the data asks for it."""
        if self.data == "nonfinite" and self.mode.activation in formats:
            nonfinite.spoil(stored, self.seed + _SPOILT)


def placed(value: Tensor) -> Tensor:
    """A copy inside a larger storage that holds NaN (integers: 0) before and behind it."""
    raw = value.view(torch.uint8) if value.dtype in {form.dtype for form in FORMS.values()} else value
    inner = place(tuple(raw.shape), raw.dtype, value.device).copy_(raw)
    return inner.view(value.dtype)


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    """The call of a case. Raises ConformanceError for a parameter that does not fit."""
    cases.mode_of(case)
    cases.choice(case, "encoding", tuple(FORMS), "ocp")
    seed = cases.data_seed(case)
    drawn = shared.get(("drawn", case.operator, seed, sizes), lambda: _draw(case, sizes, device, seed))
    arguments: Arguments = dict.fromkeys(ARGUMENTS[case.operator]) | drawn.arguments
    if "combine" in arguments:
        arguments["combine"] = cases.choice(case, "mode", ("atomic", "reduce"), "atomic")
    if "rule" in arguments:
        rules = cases.mode_of(case).rules
        arguments["rule"] = cases.choice(case, "rule", rules, rules[0])
    if "doweight" in arguments:
        arguments["doweight"] = cases.DOWEIGHT[cases.choice(case, "doweight", tuple(cases.DOWEIGHT), "none")]
    of = cases.extents(case, sizes)
    form = output(arguments, cases.output_dtype(case))
    served = sorting.routed(arguments["topk_ids"], of.experts, arguments["expert_mask"])
    fixed = ~(served.flatten() if form.shape[0] == served.numel() else served.any(dim=1))
    # Sums of coded integers are exact in fp32. A 16-bit output rounds them; f16 in one way, where slots are not added.
    alone = form.dtype == torch.float16 and arguments.get("combine") == "reduce"
    exact = drawn.data == "coded" and (form.dtype == torch.float32 or alone)
    return Call(case, arguments, form, setter(drawn.places, drawn.routes, of.tokens, of.topk, drawn.state),
                "exact" if exact else "real", fixed)


def _draw(case: Case, sizes: str, device: torch.device, seed: int) -> _Drawn:
    of, mode = cases.extents(case, sizes), cases.mode_of(case)
    data = cases.data_of(case)
    routing = cases.choice(case, "routing", cases.ROUTINGS, "skewed")
    mask = draw.expert_mask(of, cases.choice(case, "mask", cases.MASKS, "no"), case.get("values", "one"), seed, device)
    ids = draw.experts_of(of, routing, seed, device, mask)
    signs = cases.choice(case, "weights", cases.WEIGHTS, "share")
    weights = draw.routing_weights(of, data, signs, seed, device)
    found = sorting.sort(ids, weights, of.experts, of.block, mask)
    if cases.choice(case, "runs", cases.RUNS, "by_token") == "shuffled":
        found = draw.shuffled_runs(found, of.tokens, seed)
    routes = sorting.Sorted(placed(found.token_ids), placed(found.weights), placed(found.expert_ids), found.num_valid,
                            of.block)
    arguments: Arguments = {
        "sorted_token_ids": routes.token_ids, "sorted_weights": routes.weights, "sorted_expert_ids": routes.expert_ids,
        "num_valid_ids": placed(routes.num_valid[:1]), "topk_ids": placed(ids), "topk_weights": placed(weights),
        "expert_mask": None if mask is None else placed(mask), "in_dtype": mode.name, "block": of.block,
    }
    served = sorting.routed(ids, of.experts, mask)
    numbering = torch.arange(of.experts, device=device) if mask is None else sorting.local_ids(mask)
    local = torch.where(served, numbering[ids.long()], -1).to(torch.int32)
    place = sorting.positions(found, of.tokens, of.topk) if mode.microscaled else None
    point = _Point(case.operator, of, mode, data, case.get("encoding", "ocp"), seed, local, place, len(found.token_ids))
    places = [Place(arguments["topk_weights"], ~served)]
    here = ARGUMENTS[case.operator]
    if "x" in here:
        _add_x(point, arguments, places)
    if "a2" in here:
        _add_a2(point, arguments, places)
    if "w1" in here:
        _add_weight("w1", 2 * of.inter, of.hidden, _W1, point, arguments, places)
    if "w2" in here:
        _add_weight("w2", of.hidden, of.inter, _W2, point, arguments, places)
    if "smooth2" in here and mode.slot_major:
        count = of.experts if mask is None else int((mask != 0).sum())
        arguments["smooth2"] = placed(draw.smoothing(count, of.inter, seed + _SMOOTH, device))
    return _Drawn(data, arguments, places, routes, {})


def _add_x(point: _Point, arguments: Arguments, places: list[Place]) -> None:
    of, mode, local = point.of, point.mode, point.local
    if mode.slot_major:
        rows = draw.smoothed_rows(of.tokens, of.hidden, mode, point.data, point.encoding, point.seed + _X, local,
                                  of.experts)
        rows = point.spoilt(rows)
        stored, unused = layouts.slot_major(store_rows(rows, mode, point.encoding)), (local < 0).T.flatten()
        scale = None if rows.scale is None else layouts.slot_major(rows.scale)
    else:
        rows = draw.rows_of(of.tokens, of.hidden, mode, point.data, point.encoding, point.seed + _X, point.device)
        rows = point.spoilt(rows)
        stored, unused, scale = store_rows(rows, mode, point.encoding), (local < 0).all(dim=1), rows.scale
        point.spoil(stored, "f16", "bf16")
    _keep("x", stored, scale, unused, arguments, places)
    if mode.microscaled:
        codes = store_scales(rows)
        _keep_blocks("scale_x", codes[:, None].expand(-1, of.topk, -1), of.hidden, point, arguments, places)


def _add_a2(point: _Point, arguments: Arguments, places: list[Place]) -> None:
    of = point.of
    count = of.tokens * of.topk
    rows = draw.rows_of(count, of.inter, point.mode, point.data, point.encoding, point.seed + _A2, point.device)
    rows = rows if point.mode.activation == "fp8" else point.spoilt(rows)
    scale = None if rows.scale is None else rows.scale.flatten()
    stored = store_rows(rows, point.mode, point.encoding)
    if point.mode.microscaled:
        codes = store_scales(rows)
        _keep_blocks("scale_a2", codes.view(of.tokens, of.topk, codes.shape[-1]), of.inter, point, arguments, places)
    else:
        point.spoil(stored, "fp8", "f16", "bf16")
    _keep("a2", stored, scale, (point.local < 0).flatten(), arguments, places)
    arguments["a2"] = arguments["a2"].view(of.tokens, of.topk, stored.shape[-1])


def _keep_blocks(name: str, codes: Tensor, width: int, point: _Point, arguments: Arguments, places: list[Place]
                 ) -> None:
    """e8m0 scales of rows, uint8 [T, k, K/32], at their places in the sorted list."""
    assert point.place is not None
    arguments[name] = placed(scales.sort(codes, point.place, point.entries))
    places.append(Place(arguments[name], scales.unused_rows(point.place, point.entries, width), e8m0=True))


def _keep(name: str, stored: Tensor, scale: Tensor | None, unused: Tensor, arguments: Arguments,
          places: list[Place]) -> None:
    arguments[name] = placed(stored)
    places.append(Place(arguments[name], unused))
    if scale is not None:
        arguments[f"scale_{name}"] = placed(scale.flatten())
        places.append(Place(arguments[f"scale_{name}"], unused))


def _add_weight(name: str, rows: int, width: int, seed: int, point: _Point, arguments: Arguments,
                places: list[Place]) -> None:
    """Expert by expert, so that fp32 values of one expert at a time are held; experts without a token get poison."""
    of, mode, device = point.of, point.mode, point.device
    in_stage_1 = point.data in ("scales", "subnormal_channels", "subnormal_rows")
    data = "real" if name == "w2" and point.chained and in_stage_1 else point.data
    used = torch.zeros(of.experts, dtype=torch.bool, device=device)
    used[point.local[point.local >= 0].long()] = True
    stored: Tensor | None = None
    shape = weight_scale_shape(mode, of.experts, rows, width)
    kept: Tensor | None = None
    for expert in used.nonzero().flatten().tolist() or [0]:
        one: Operand = draw.weight_of(expert, rows, width, mode, data, point.encoding, point.seed + seed, name == "w1",
                                      device)
        value, scale = store_weight(point.spoilt_weight(one, name, expert), mode, point.encoding)
        if stored is None:
            stored = placed(value.new_zeros((of.experts, *value.shape[1:]), dtype=value.dtype))
            kept = None if scale is None or shape is None else placed(scale.new_zeros(shape))
        _raw(stored)[expert] = _raw(value)[0]
        if kept is not None and scale is not None:
            of_expert(kept, expert, rows, mode).copy_(of_expert(scale, 0, rows, mode))
    assert stored is not None
    arguments[name] = stored
    places.append(Place(stored, ~used))
    if kept is not None:
        arguments[f"scale_{name}"] = kept
        e8m0 = mode.weight == "mxfp4"
        places.append(Place(kept, scales.unused_channels(~used, rows, width) if e8m0 else ~used, e8m0))


def _raw(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.element_size() == 1 else value


def memory(case: Case, sizes: str) -> int:
    """Peak bytes of one case: weights, as stored, once more on the way and decoded to fp32; rows; per output element
    golden, two outputs and copies; and the temporaries of chunks, of one expert's fp64 weights and of a PyTorch
    kernel."""
    of = cases.extents(case, sizes)
    width = 2 if case.get("in") in ("fp16", "bf16") else 1
    slots, expert = of.tokens * of.topk, 3 * of.inter * of.hidden
    rows = slots * (of.hidden + 3 * of.inter) * (width + 10)
    small = slots * max(of.hidden, 2 * of.inter) < 1 << 20
    return of.experts * expert * (2 * width + 4) + expert * 48 + rows + (64 << 20 if small else 6 << 30)
