"""Shared by the tests of moe_sorting: small cases, the sort as a plain loop, and edits of what it wrote."""

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


def by_loop(ids: Tensor, weights: Tensor, experts: int, block: int, mask: list[int]) -> Lists:
    """The contract, one route at a time: (token ids, weights, experts of blocks, valid rows and tokens). Padding has
    weight 0, blocks past the valid ones have expert -1."""
    tokens, topk = ids.shape
    chosen, shares = ids.tolist(), weights.tolist()
    pad = topk * 2**24 + tokens
    token_ids, sorted_weights, of_block, local = [], [], [], 0
    for expert in range(experts):
        if not mask[expert]:
            continue
        run = [(t, s) for t in range(tokens) for s in range(topk) if chosen[t][s] == expert]
        fill = -len(run) % block
        token_ids += [s * 2**24 + t for t, s in run] + [pad] * fill
        sorted_weights += [shares[t][s] for t, s in run] + [0.0] * fill
        of_block += [local] * ((len(run) + fill) // block)
        local += 1
    valid, rows = len(token_ids), max(0, tokens * topk + experts * block - topk)
    blocks = (rows + block - 1) // block
    return (token_ids + [pad] * (rows - valid), sorted_weights + [0.0] * (rows - valid),
            of_block + [-1] * (blocks - len(of_block)), [valid, tokens])


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
# Routes in wrong places, each wrong in `sample()`; the mutants of the zoo do all else that may be wrong.
EDITS: dict[str, Edit] = {
    "routes of two experts exchanged": lambda w: w.swap(0, w.rows - w.block),
    "a route behind the valid rows": lambda w: w.swap(1, w.rows),
    "a route twice": lambda w: w.outs["sorted_token_ids"].__setitem__(0, int(w.outs["sorted_token_ids"][1])),
}
# Right results in other words.
ALLOWED: dict[str, Edit] = {
    "runs in reverse": lambda w: w.in_each_run(lambda run: run.flip(0)),
    "runs rotated": lambda w: w.in_each_run(lambda run: run.roll(1, 0)),
    "open places left": lambda w: w.open_places(),
    "both": lambda w: (w.open_places(), w.in_each_run(lambda run: run.flip(0))),
}


def loop_kernel(edit: Edit | None = None, promise: str = "within-budget", **options: Any) -> Kernel:
    """A kernel of no registry: the loop, with an ``edit`` of what it wrote."""

    def sorts(topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None, experts: int, block: int, hidden: int,
              buffer_dtype: torch.dtype, invalid: str | None, duplicates: str | None, sorted_token_ids: Tensor,
              sorted_weights: Tensor, sorted_expert_ids: Tensor, num_valid_ids: Tensor, moe_buf: Tensor) -> None:
        outs = {"sorted_token_ids": sorted_token_ids, "sorted_weights": sorted_weights,
                "sorted_expert_ids": sorted_expert_ids, "num_valid_ids": num_valid_ids, "moe_buf": moe_buf}
        before = {name: one.clone() for name, one in outs.items()}
        mask = [1] * experts if expert_mask is None else expert_mask.tolist()
        found = by_loop(topk_ids, topk_weights, experts, block, mask)
        for one, values in zip(list(outs.values())[:4], found, strict=True):
            one.copy_(torch.tensor(values, dtype=one.dtype))
        moe_buf.zero_()
        if edit is not None:
            tokens, topk = topk_ids.shape
            edit(Written(outs, before, found[3][0], block, topk * 2**24 + tokens))

    return Kernel("sorts", NAME, sorts, promise, parameters=frozenset(inspect.signature(sorts).parameters), **options)
