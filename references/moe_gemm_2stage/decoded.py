"""A call of two-stage MoE as numbers: its operands decoded from their layouts, for golden and oracle.

Rows of slots without an expert count as zeros, whatever stands there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from conformance.operator import Call, Shared
from references.moe_gemm_2stage import layouts, operands, scales, sorting
from references.moe_gemm_2stage.bounds import Arithmetic
from references.moe_gemm_2stage.contract import sizes_of
from references.moe_gemm_2stage.dtypes import MODES, Mode
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.rounding import OUTPUTS
from references.moe_gemm_2stage.stages import Routes
from references.moe_gemm_2stage.storage import ENCODINGS, read_rows, read_weight


@dataclass(frozen=True)
class Decoded:
    """A call's operands as numbers. rows: of its first stage, [T, k, K]."""

    call: Call
    mode: Mode
    routes: Routes
    rows: Operand
    w1: Operand | None
    w2: Operand | None
    out: str
    arithmetic: Arithmetic

    @property
    def combine(self) -> str:
        return str(self.call.arguments.get("combine", ""))

    @property
    def doweight(self) -> str:
        return str(self.call.arguments.get("doweight", "none"))

    def tokens(self, start: int, stop: int) -> Decoded:
        """The same of some tokens."""
        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[start:stop]

        rows = replace(self.rows, payload=self.rows.payload[start:stop], factors=cut(self.rows.factors),
                       scale=cut(self.rows.scale))
        return replace(self, routes=Routes(self.routes.ids[start:stop], self.routes.weights[start:stop]), rows=rows)


def decode(call: Call, shared: Shared | None = None) -> Decoded:
    """Read a call's arguments. Weights, which take longest, are read once for the cases that share them."""
    given = call.arguments
    mode, of = MODES[given["in_dtype"]], sizes_of(given)
    served = sorting.routed(given["topk_ids"], of["E"], given["expert_mask"])
    ids = given["topk_ids"]
    if given["expert_mask"] is not None:
        ids = sorting.local_ids(given["expert_mask"])[ids.clamp(0, of["E"] - 1).long()]
    routes = Routes(torch.where(served, ids, -1).to(torch.int32), torch.where(served, given["topk_weights"], 0.0))
    rows = _rows(call, mode)
    payload = torch.where(served[..., None], rows.payload, 0.0)
    rows = Operand(payload, None if rows.factors is None else torch.where(served[..., None], rows.factors, 1.0),
                   None if rows.scale is None else torch.where(served, rows.scale, 1.0))
    shared = shared or Shared()
    w1, w2 = (shared.latest(w, same_tensors(call), partial(_weight, call, w, mode, routes)) if w in given else None
              for w in ("w1", "w2"))
    out = next(key for key, dtype in OUTPUTS.items() if dtype == call.output.dtype)
    return Decoded(call, mode, routes, rows, w1, w2, out, mode.arithmetic)


def _rows(call: Call, mode: Mode) -> Operand:
    """Rows [T, k, K] of the first stage."""
    if mode.microscaled:
        return microscaled_rows(call)
    given, topk = call.arguments, call.arguments["topk_ids"].shape[1]
    name = "x" if "x" in given else "a2"
    rows = read_rows(given[name], given[f"scale_{name}"])
    if name == "a2":
        return Operand(rows.payload, scale=None if rows.scale is None else rows.scale.view(-1, topk))
    if mode.slot_major:
        assert rows.scale is not None
        return Operand(layouts.token_major(rows.payload, topk), scale=layouts.token_major(rows.scale, topk))
    return operands.per_slot(rows, topk)


def microscaled_rows(call: Call) -> Operand:
    """Rows [T, k, K] of the first stage, each with the scales that stand at its place in the sorted list."""
    given, of = call.arguments, sizes_of(call.arguments)
    name, ids = "x" if "x" in given else "a2", given["sorted_token_ids"]
    routes = sorting.Sorted(ids, given["sorted_weights"], given["sorted_expert_ids"], given["num_valid_ids"],
                            given["block"])
    place = sorting.positions(routes, of["T"], of["k"])
    stored, width = given[name], of["H" if name == "x" else "I"]
    if name == "x":
        stored = stored[:, None].expand(-1, of["k"], -1)
    return read_rows(stored, scales.unsort(given[f"scale_{name}"], place, len(ids), width))


def same_tensors(call: Call) -> tuple[object, ...]:
    """What calls have in common whose tensors are the same ones. They live as long as what is shared."""
    return tuple(id(value) for value in call.arguments.values() if isinstance(value, Tensor))


def _weight(call: Call, name: str, mode: Mode, routes: Routes) -> Operand:
    """A weight; scales of experts without a token, which slots without an expert are multiplied by, are 1."""
    found = read_weight(call.arguments[name], call.arguments[f"scale_{name}"], mode)
    if found.scale is None:
        return found
    used = torch.zeros(len(found.scale), dtype=torch.bool, device=found.scale.device)
    used[routes.ids[routes.valid].long()] = True
    return replace(found, scale=torch.where(used[:, None], found.scale, 1.0))


def encoding_of(call: Call) -> str:
    form = ENCODINGS.get(call.arguments["x"].dtype)
    return "ocp" if form is None else form.name
