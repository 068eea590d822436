"""Shared by the tests of moe_sorting: small cases, the sort as a plain loop, and the same loop with a fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.case import Case
from conformance.kernel import Kernel
from conformance.operator import Call, References, Shared
from conformance.registry import operator

NAME = "moe_sorting"
CPU = torch.device("cpu")
Lists = tuple[list[int], list[float], list[int], list[int]]


def sample(**params: Any) -> Case:
    """A small case of no tier; ``params`` replace."""
    standard = {"tokens": 45, "topk": 3, "experts": 7, "block": 16, "hidden": 8, "out": "bf16", "mask": "none",
                "routing": "skewed", "ids": "plain", "data": "coded"}
    return Case(NAME, {key: str(value) for key, value in (standard | params).items()})


def call_of(case: Case, poison: int = 0) -> tuple[Call, References]:
    """The call of a case, poison in place, and its references."""
    contract, shared = operator(NAME), Shared()
    call = contract.inputs(case, "reduced", CPU, shared)
    call.set_poison(poison)
    return call, References.made_of(contract.reference(call, shared))


def routes(tokens: int, topk: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Distinct experts per token, and distinct weights."""
    generator = np.random.default_rng(seed)
    ids = np.argsort(generator.random((tokens, experts)), axis=1)[:, :topk].astype(np.int32)
    return torch.from_numpy(ids.copy()), torch.arange(1.0, tokens * topk + 1).view(tokens, topk)


def by_loop(ids: Tensor, weights: Tensor, experts: int, block: int, mask: list[int], fault: str = "") -> Lists:
    """The contract, one route at a time: (token ids, weights, experts of blocks, valid rows and tokens). ``fault``
    names what is done wrong, see FAULTS; padding has weight 0, blocks past the valid ones have expert -1."""
    tokens, topk = ids.shape
    chosen, shares = ids.tolist(), weights.tolist()
    pad = {"sentinel without slot": tokens, "sentinel is the last route": (topk - 1) * 2**24 + tokens - 1,
           "sentinel is token 0": 0, "sentinel is -1": -1}.get(fault, topk * 2**24 + tokens)
    packed: Callable[[int, int], int] = {
        "slot in bits 16 to 23": lambda t, s: s * 2**16 + t, "slot lost": lambda t, s: t,
        "slot counted from 1": lambda t, s: (s + 1) * 2**24 + t, "token and slot exchanged": lambda t, s: t * 2**24 + s,
    }.get(fault, lambda t, s: s * 2**24 + t)
    share: Callable[[int, int], float] = {
        "weight of the next slot": lambda t, s: shares[t][(s + 1) % topk],
        "weight of token 0": lambda t, s: shares[0][s],
        "weight of the next token": lambda t, s: shares[(t + 1) % tokens][s],
    }.get(fault, lambda t, s: shares[t][s])
    if fault in ("-1 is expert 0", "-1 is the last expert"):
        chosen = [[(0 if fault == "-1 is expert 0" else experts - 1) if e == -1 else e for e in row] for row in chosen]
    token_ids, sorted_weights, of_block, local, used = [], [], [], 0, 0
    for expert in range(experts)[:: -1 if fault == "experts descend" else 1]:
        if not (mask[expert] == 1 if fault == "only 1 is true" else mask[expert]) and fault != "masked expert kept":
            continue
        slots = range(topk - 1 if fault == "last slot dropped" else topk)
        run = [(t, s) for t in range(tokens) for s in slots if chosen[t][s] == expert]
        if fault == "duplicate lost":
            run = [(t, s) for t, s in run if chosen[t].index(expert) == s]
        if fault == "route over a full block lost":
            run = run[: max(block, len(run) // block * block)]
        used += len(run)
        fill = -len(run) % block
        if fault == "a block too many where runs are full" and run and fill == 0:
            fill = block
        if fault == "a block for no token" and not run:
            fill = block
        token_ids += [packed(t, s) for t, s in run] + [pad] * fill
        sorted_weights += [share(t, s) for t, s in run] + [0.0] * fill
        of_block += [expert if fault == "global expert ids" else local] * ((len(run) + fill) // block)
        local += fault != "experts with no token are not counted" or bool(run)
    valid, rows = len(token_ids), max(0, tokens * topk + experts * block - topk)
    blocks = (rows + block - 1) // block
    if fault == "expert of the next block":
        of_block = [*of_block[1:], -1]
    counted = {"valid rows not padded": used, "valid rows of the whole list": rows, "valid blocks": valid // block}
    behind = {"tail is 0": 0, "tail is token T": tokens}.get(fault, pad)
    return ((token_ids + [behind] * (rows - valid))[:rows], (sorted_weights + [0.0] * (rows - valid))[:rows],
            (of_block + [-1] * (blocks - len(of_block)))[:blocks],
            [counted.get(fault, valid), tokens + block - tokens % block if fault == "tokens padded" else tokens])


# Each fault with a case that has what it acts on.
FAULTS: dict[str, dict[str, Any]] = {
    "sentinel without slot": {}, "sentinel is the last route": {}, "sentinel is token 0": {}, "sentinel is -1": {},
    "slot in bits 16 to 23": {}, "slot lost": {}, "slot counted from 1": {}, "token and slot exchanged": {},
    "weight of the next slot": {}, "weight of token 0": {}, "weight of the next token": {},
    "-1 is expert 0": {"ids": "holes"}, "-1 is the last expert": {"ids": "holes"},
    "experts descend": {}, "masked expert kept": {"mask": "half"}, "only 1 is true": {"mask": "all"},
    "last slot dropped": {}, "duplicate lost": {"ids": "duplicates"}, "route over a full block lost": {},
    "a block too many where runs are full": {"topk": 1, "routing": "block_tails"},
    "a block for no token": {"topk": 1, "routing": "block_tails"},
    "global expert ids": {"mask": "half"},
    "experts with no token are not counted": {"topk": 1, "routing": "block_tails"},
    "expert of the next block": {}, "valid rows not padded": {}, "valid rows of the whole list": {},
    "valid blocks": {}, "tail is 0": {}, "tail is token T": {}, "tokens padded": {},
}


@dataclass(frozen=True)
class Written:
    """What a right sort has written, what stood there before, valid rows, rows of a block, and the sentinel."""

    outs: dict[str, Tensor]
    before: dict[str, Tensor]
    rows: int
    block: int
    pad: int

    def undo(self, name: str, start: int | None = None, stop: int | None = None) -> None:
        self.outs[name][start:stop] = self.before[name][start:stop]

    def in_each_run(self, moved: Callable[[Tensor], Tensor], names: tuple[str, ...] = ("sorted_token_ids",
                                                                                      "sorted_weights")) -> None:
        """Put the rows of each expert's run, padding included, where ``moved`` says."""
        owner = self.outs["sorted_expert_ids"].repeat_interleave(self.block)[: self.rows]
        for expert in owner.unique().tolist():
            here = (owner == expert).nonzero().flatten()
            for name in names:
                self.outs[name][here] = self.outs[name][moved(here)]

    def swap(self, one: int, two: int) -> None:
        for name in ("sorted_token_ids", "sorted_weights"):
            self.outs[name][[one, two]] = self.outs[name][[two, one]]

    def open_places(self) -> None:
        """Undo what the contract leaves open."""
        padding = self.outs["sorted_token_ids"] == self.pad
        self.outs["sorted_weights"][padding] = self.before["sorted_weights"][padding]
        self.undo("sorted_expert_ids", self.rows // self.block)


Edit = Callable[[Written], object]
# Faults of what is written, or of where; each is wrong in `sample()`.
EDITS: dict[str, Edit] = {
    "buffer not zeroed": lambda w: w.undo("moe_buf"),
    "last row of the buffer not zeroed": lambda w: w.undo("moe_buf", -1),
    "buffer is -0": lambda w: w.outs["moe_buf"].neg_(),
    "stale tail": lambda w: w.undo("sorted_token_ids", w.rows),
    "last id not written": lambda w: w.undo("sorted_token_ids", -1),
    "first expert not written": lambda w: w.undo("sorted_expert_ids", 0, 1),
    "tokens not written": lambda w: w.undo("num_valid_ids", 1),
    "routes of two experts exchanged": lambda w: w.swap(0, w.rows - w.block),
    "a route behind the valid rows": lambda w: w.swap(0, w.rows),
    "ids reversed, weights not": lambda w: w.in_each_run(lambda run: run.flip(0), ("sorted_token_ids",)),
    "a route twice": lambda w: w.outs["sorted_token_ids"].__setitem__(0, int(w.outs["sorted_token_ids"][1])),
}
# Right results in other words.
ALLOWED: dict[str, Edit] = {
    "runs in reverse": lambda w: w.in_each_run(lambda run: run.flip(0)),
    "runs rotated": lambda w: w.in_each_run(lambda run: run.roll(1, 0)),
    "open places left": lambda w: w.open_places(),
    "both": lambda w: (w.open_places(), w.in_each_run(lambda run: run.flip(0))),
}


def loop_kernel(fault: str = "", edit: Edit | None = None, promise: str = "within-budget", **options: Any) -> Kernel:
    """A kernel of no registry: the loop, with a fault, or with an ``edit`` of what it wrote."""

    def sorts(topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None, experts: int, block: int, hidden: int,
              buffer_dtype: torch.dtype, invalid: str | None, duplicates: str | None, sorted_token_ids: Tensor,
              sorted_weights: Tensor, sorted_expert_ids: Tensor, num_valid_ids: Tensor, moe_buf: Tensor) -> None:
        outs = {"sorted_token_ids": sorted_token_ids, "sorted_weights": sorted_weights,
                "sorted_expert_ids": sorted_expert_ids, "num_valid_ids": num_valid_ids, "moe_buf": moe_buf}
        before = {name: one.clone() for name, one in outs.items()}
        mask = [1] * experts if expert_mask is None else expert_mask.tolist()
        found = by_loop(topk_ids, topk_weights, experts, block, mask, fault)
        for one, values in zip(list(outs.values())[:4], found, strict=True):
            one.copy_(torch.tensor(values, dtype=one.dtype))
        moe_buf.zero_()
        if edit is not None:
            tokens, topk = topk_ids.shape
            edit(Written(outs, before, found[3][0], block, topk * 2**24 + tokens))

    return Kernel("sorts", NAME, sorts, promise, parameters=frozenset(inspect.signature(sorts).parameters), **options)
