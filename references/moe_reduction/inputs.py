"""The arguments of each case of moe_reduction: valid slots, how that is said, rows, and where poison stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.case import Case, data_seed
from conformance.data import routing, values
from conformance.data.generate import integers
from conformance.data.layouts import GAP, place
from conformance.errors import ConformanceError
from conformance.formats import FORMATS
from conformance.operator import Arguments, Call, Shared
from references.moe_reduction.contract import MASKS, SOURCES, output, valid_slots

_WIDE = {"fp32": 40, "bf16": 40, "fp16": 8}  # exponents that the rows of one token are moved apart by
_REDUCED_TOKENS = 61  # in the tens, and no multiple of 32
_POISON = (float("nan"), 30000.0)  # one that spreads and one that is finite in every format
_MANY = 1027  # local experts, and as many others, of ids:many
_OUTSIDE = (-1, -2, -3, -(1 << 31), (1 << 31) - 1)  # ids of masked slots that are no index


def tokens_expected(case: Case, sizes: str) -> int:
    """T of a case: the published and model shapes are cut for a CPU, edge families are meant as they are."""
    tokens = case.number("tokens")
    return min(tokens, _REDUCED_TOKENS) if sizes == "reduced" and not case.family else tokens


def memory(case: Case, sizes: str) -> int:
    """Peak bytes of one case: part; per output element accumulator, fp64 sums, golden, two outputs, copies (40); and
    the temporaries of chunks and of a PyTorch kernel."""
    tokens, topk, hidden = tokens_expected(case, sizes), case.number("topk"), case.number("hidden")
    part = tokens * topk * hidden * SOURCES[case.get("in")].itemsize
    return part + tokens * hidden * 40 + (6 << 30 if tokens * hidden > 1 << 24 else 64 << 20)


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    """The arguments of a case. The seed leaves out how validity is said, so that the cases which differ only in that
    share rows and validity. Raises ConformanceError for a parameter that does not fit."""
    source, mask = case.get("in"), case.get("mask", "none")
    if source not in SOURCES or case.get("out", source) != source:
        raise ConformanceError(f"case {case.id}: in:{source} out:{case.get('out')} is no dtype of the contract")
    if mask not in MASKS:
        raise ConformanceError(f"case {case.id}: mask:{mask} is none of {', '.join(MASKS)}")
    tokens, topk, hidden = tokens_expected(case, sizes), case.number("topk"), case.number("hidden")
    data, layout = case.get("data", "real"), case.get("layout", "contiguous")
    all_strided = layout == "strided_all"
    seed = data_seed(case, ("mask", "ids", "values", "launch", "model"))
    masked = mask != "none"
    pattern = case.get("routing", "padding") if masked else "complete"  # "complete": every slot is valid

    def build_part() -> tuple[Tensor, Tensor]:
        drawn, _ = routing.pattern(pattern, tokens, topk, seed, device)
        valid = drawn >= 0
        slots = torch.arange(tokens * topk, device=device).view(tokens, topk)
        return valid, _rows(source, data, torch.where(valid, slots, -1), hidden, layout, seed)

    valid, part = shared.get(("part", seed, sizes, masked), build_part)

    def placed(value: Tensor) -> Tensor:
        return place(tuple(value.shape), value.dtype, device, "strided" if all_strided else "contiguous").copy_(value)

    arguments: Arguments = {"part": part, "valid_mask": None, "topk_ids": None, "expert_mask": None}
    kind = case.get("values", "one")
    if mask == "valid":
        arguments["valid_mask"] = placed(routing.as_mask(valid, torch.uint8, kind, seed + 5))
    elif mask == "expert":
        ids, local = _experts(valid, case.get("ids", "inside"), seed)
        known = routing.as_mask(local, torch.int32, kind, seed + 5)
        arguments["topk_ids"] = placed(ids)
        arguments["expert_mask"] = placed(known[:, None])[:, 0] if all_strided else placed(known)
    found = valid_slots(arguments)
    assert not masked or (found is not None and torch.equal(found, valid)), f"{case.id}: the mask says something else"
    form = replace(output(arguments, FORMATS[source].dtype), gap=GAP if all_strided else 0)
    state = shared.get(("poison", seed, sizes, masked), dict[str, int])
    regime = "exact" if data in values.EXACT else "real"
    return Call(case, arguments, form, _poison(part, ~valid, state), regime, ~valid.any(dim=1))


def _rows(source: str, data: str, slots: Tensor, hidden: int, layout: str, seed: int) -> Tensor:
    """part [T, k, H] with its values, laid out as ``layout`` says. ``slots`` [T, k] are row numbers, -1 = masked."""
    (tokens, topk), device = slots.shape, slots.device
    part = place((tokens, topk, hidden), SOURCES[source], device, "strided" if layout == "strided_all" else layout)
    flat = part if part.is_contiguous() else torch.full_like(part, _POISON[0], memory_format=torch.contiguous_format)
    rows = flat.view(tokens * topk, hidden)
    values.fill(rows, data, slots, seed)
    if data == "wide":
        wide = integers((tokens * topk,), -_WIDE[source], _WIDE[source] + 1, seed + 7, device)
        rows *= torch.exp2(wide.float()).to(rows.dtype)[:, None]
    if data == "nonfinite" and topk > 1:  # +inf and -inf in one sum, which is NaN
        first_two = torch.sort(slots < 0, dim=1, stable=True).indices[::3, :2]
        pair = slots[::3].gather(1, first_two)
        pair = pair[(pair >= 0).all(dim=1)].long()
        rows[pair[:, 0], 1], rows[pair[:, 1], 1] = torch.inf, -torch.inf
    return part if flat is part else part.copy_(flat)


def _experts(valid: Tensor, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """(topk_ids int32 [T, k], which experts are local, bool [E]) whose gather gives ``valid``.

    ``kind``: "inside", distinct local experts for valid slots and distinct others for invalid ones, the last expert
    local; "outside", ids of invalid slots lie outside [0, E), half of them where counting from the end, or modulo E,
    leads to a local expert; "same", all valid slots of a token take one expert; "one", E is 1, its expert local, and
    invalid slots have ids outside; "many", inside, of so many experts that no small table holds them; "all", inside,
    but every expert is local where every slot is valid.
    """
    (tokens, topk), device = valid.shape, valid.device
    if kind == "one":
        local = torch.ones(1, dtype=torch.bool, device=device)
        return torch.where(valid, 0, _outside(valid.shape, local, seed)).to(torch.int32), local
    half = _MANY if kind == "many" else topk + 3
    local = torch.zeros(2 * half, dtype=torch.bool, device=device)
    order = torch.argsort(integers((2 * half - 1,), 0, 1 << 24, seed + 11, device), stable=True)
    local[order[: half - 1]] = True
    local[-1] = True
    if kind == "all" and bool(valid.all()):
        local[:] = True
    shift = integers((tokens, 1), 0, half, seed + 12, device)
    step = {"same": 0, "many": half // topk}.get(kind, 1)
    pick = (torch.arange(topk, device=device) * step + shift) % half
    ids = local.nonzero().flatten()[pick]
    if not bool(local.all()):
        ids = torch.where(valid, ids, (~local).nonzero().flatten()[pick])
    if kind == "outside":
        ids = torch.where(valid, ids, _outside(valid.shape, local, seed))
    elif kind not in ("inside", "same", "many", "all"):
        raise ConformanceError(f"ids:{kind} is none of inside, outside, same, one, many, all")
    return ids.to(torch.int32), local


def _outside(shape: torch.Size, local: Tensor, seed: int) -> Tensor:
    """int64 ids of ``shape``, none of them in [0, E), E = len(local)."""
    device, experts = local.device, len(local)
    here = local.nonzero().flatten()
    fixed = torch.tensor((*_OUTSIDE, experts, experts + 1), device=device)
    known = torch.cat([fixed, here[: len(fixed)] - experts, here[: len(fixed)] + experts])
    return known[integers(tuple(shape), 0, len(known), seed + 13, device)]


def _poison(part: Tensor, masked: Tensor, state: dict[str, int]) -> Callable[[int], None]:
    """The call's ``set_poison``: the rows of masked slots, which no kernel of stage 2 has written.

    ``state`` tells, over all calls that share part, which poison stands there. What stands already is not written
    again, so that a kernel's own writes to these rows show in the checksum.
    """

    def set_poison(which: int) -> None:
        if state.get("now") == which:
            return
        if which == 2:  # for diagnosis: finite, and tells rows apart
            numbers = torch.arange(int(masked.sum()), device=part.device) % 101
            part[masked] = (numbers[:, None].float() / 8 + 1).to(part.dtype).expand(-1, part.shape[2])
        else:
            part[masked] = _POISON[which]
        state["now"] = which

    return set_poison
