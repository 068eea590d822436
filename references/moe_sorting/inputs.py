"""The arguments of each case of moe_sorting: routes, weights that tell slots apart, masks, and where poison stands.

    tokens, topk, experts, block, hidden    T, k, E, BM, H        out      dtype of the buffer
    routing  how tokens choose experts: `ROUTINGS`                mask     which experts are local: `MASKS`
    ids      plain, or what breaks a precondition: `IDS`          data     of weights: real, coded, exact, special
    layout   of the two [T, k] tensors and, strided_all, of the buffer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.case import Case, data_seed
from conformance.data.generate import integers, uniform
from conformance.data.layouts import GAP, place
from conformance.data.routing import as_mask
from conformance.errors import ConformanceError, unknown_name
from conformance.operator import Arguments, Call, Shared
from references.moe_gemm_2stage.sorting import routed
from references.moe_sorting.contract import ARGUMENTS, BUFFERS, output

ROUTINGS = ("even", "skewed", "one_expert", "last", "cycle", "block_tails")
MASKS = ("none", "all", "third", "half", "most", "one_left", "none_left")
IDS = ("plain", "holes", "all_holes", "wild", "duplicates")
DATA = ("real", "coded", "exact", "special")
_LOCAL_IN_TEN = {"third": 7, "half": 5, "most": 3}  # of ten experts, by which share of them is masked
_REDUCED_TOKENS, _REDUCED_HIDDEN = 97, 256
_POISON = (float("nan"), 30000.0)  # weights of slots without a route
_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, -1e-39, 3.4e38)
_NANS = (0x7FC12345, -0x3EDCBB, 0x7F800001, -1)  # bits of others: with a payload, of the other sign, signalling


def tokens_expected(case: Case, sizes: str) -> int:
    """T of a case: the published shapes are cut for a CPU, edge families are meant as they are."""
    tokens = case.number("tokens")
    return min(tokens, _REDUCED_TOKENS + tokens % 8) if sizes == "reduced" and not case.family else tokens


def _hidden(case: Case, sizes: str) -> int:
    hidden = case.number("hidden")
    return min(hidden, _REDUCED_HIDDEN) if sizes == "reduced" and not case.family else hidden


def memory(case: Case, sizes: str) -> int:
    """Peak bytes of one case: scores of all experts, the routes with their sorts, the buffer with golden and copies."""
    tokens, topk, experts = tokens_expected(case, sizes), case.number("topk"), case.number("experts")
    entries = tokens * topk + experts * case.number("block")
    return tokens * experts * 24 + entries * 120 + tokens * _hidden(case, sizes) * 4 * 6 + (64 << 20)


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    """The call of a case. Raises ConformanceError for a parameter that does not fit."""
    for name, known, default in (("routing", ROUTINGS, "skewed"), ("mask", MASKS, "none"), ("ids", IDS, "plain"),
                                 ("data", DATA, "real"), ("out", tuple(BUFFERS), "bf16")):
        if case.get(name, default) not in known:
            raise unknown_name(f"value of {name} in case {case.id}:", case.get(name), known)
    seed = data_seed(case, ("hidden", "out", "launch", "model"))
    drawn, served, state = shared.get(("routes", seed, sizes), lambda: _draw(case, sizes, device, seed))
    arguments: Arguments = dict.fromkeys(ARGUMENTS) | drawn
    arguments |= {"experts": case.number("experts"), "block": case.number("block"), "hidden": _hidden(case, sizes),
                  "buffer_dtype": BUFFERS[case.get("out", "bf16")]}
    if case.get("ids", "plain") == "duplicates":
        arguments["duplicates"] = "keep"
    elif case.get("ids", "plain") != "plain":
        arguments["invalid"] = "skip"
    forms = output(arguments, None)
    if case.get("layout") == "strided_all":
        forms["moe_buf"] = replace(forms["moe_buf"], gap=GAP)
    return Call(case, arguments, forms, _poison(arguments["topk_weights"], ~served, state))


def _draw(case: Case, sizes: str, device: torch.device, seed: int) -> tuple[Arguments, Tensor, dict[str, int]]:
    """Tensors by argument name, which slots have a route, and which poison stands."""
    tokens, topk, experts = tokens_expected(case, sizes), case.number("topk"), case.number("experts")
    if topk > experts:
        raise ConformanceError(f"case {case.id}: topk:{topk} is more than experts:{experts}")
    mask = _mask(case.get("mask", "none"), experts, seed, device)
    ids = _experts(case, tokens, topk, experts, seed, device)
    ids = _unruly(ids, case.get("ids", "plain"), experts, seed)
    weights = _weights(case.get("data", "real"), (tokens, topk), seed, device)
    layout = case.get("layout", "contiguous")
    layout = "strided" if layout == "strided_all" else layout
    drawn: Arguments = {"topk_ids": ids, "topk_weights": weights, "expert_mask": mask}
    for name, value in drawn.items():
        if value is not None:
            how = layout if value.dim() == 2 else "contiguous"
            drawn[name] = place(tuple(value.shape), value.dtype, device, how).copy_(value)
    return drawn, routed(ids, experts, mask), {}


def _experts(case: Case, tokens: int, topk: int, experts: int, seed: int, device: torch.device) -> Tensor:
    """int32 [T, k], distinct experts per token.

    even: hashed scores. skewed: some experts are popular, one in the middle is never chosen (where E allows it), token
    0 has expert 0 in slot 0, so that packed id 0 exists, and the last token the last expert. one_expert: every token
    makes the same choice, in descending order. last: only the last experts. cycle: token t begins at expert t + 1.
    block_tails: of one slot; experts get 0, 1, BM - 1, BM, BM + 1, 2 BM - 1 tokens in turn, tokens in no order.
    """
    how, expert = case.get("routing", "skewed"), torch.arange(experts, device=device)
    if how == "cycle":
        token, slot = torch.arange(tokens, device=device)[:, None], torch.arange(topk, device=device)[None]
        return ((token + 1 + slot) % experts).to(torch.int32)
    if how == "block_tails":
        return _block_tails(case, tokens, topk, experts, seed, device)
    score = uniform((tokens, experts), seed + 1, device)
    if how == "one_expert":
        score = expert.float().expand(tokens, experts)
    elif how == "last":
        score[:, : max(0, experts - topk - 1)] -= 2.0
    elif how == "skewed":
        score += uniform((experts,), seed + 2, device)[None] * 0.9
        if experts > topk + 1 and experts > 2:
            score[:, experts // 2] = -1.0
        score[:1, 0] = 9.0
        score[1:][-1:, -1] = 8.0
    return score.argsort(dim=1, descending=True, stable=True)[:, :topk].to(torch.int32)


def _block_tails(case: Case, tokens: int, topk: int, experts: int, seed: int, device: torch.device) -> Tensor:
    if topk != 1:
        raise ConformanceError(f"case {case.id}: routing:block_tails needs topk:1")
    block = case.number("block")
    loads = torch.tensor([0, 1, block - 1, block, block + 1, 2 * block - 1], device=device)
    which = torch.arange(experts, device=device)
    chosen = torch.repeat_interleave(which, loads[which % len(loads)])[:tokens]
    rest = torch.full((tokens - len(chosen),), experts - 1, device=device)
    order = torch.argsort(integers((tokens,), 0, 1 << 24, seed + 3, device), stable=True)
    return torch.cat([chosen, rest])[order][:, None].to(torch.int32)


def _unruly(ids: Tensor, kind: str, experts: int, seed: int) -> Tensor:
    """holes: -1 in a fifth of the slots, and one token with nothing else. wild: all kinds of ids outside [0, E), among
    them such as are an expert's in their low 8, 16 or 24 bits.
    duplicates: in every other token the last slot repeats the first."""
    ids = ids.clone()
    if kind in ("holes", "wild"):
        wild = [-1, -2, -experts, -experts - 1, -(1 << 31), experts, experts + 7, (1 << 31) - 1]
        wild += [part for bits in (8, 16, 24) for part in (1 << bits, (1 << bits) + experts - 1, -(1 << bits))
                 if not 0 <= part < experts]
        outside = [-1] if kind == "holes" else wild
        known = torch.tensor(outside, dtype=ids.dtype, device=ids.device)
        bad = integers(tuple(ids.shape), 0, 5, seed + 4, ids.device) == 0
        bad[len(ids) // 2 : len(ids) // 2 + 1] = True
        ids = torch.where(bad, known[integers(tuple(ids.shape), 0, len(known), seed + 5, ids.device)], ids)
    elif kind == "all_holes":
        ids.fill_(-1)
    elif kind == "duplicates":
        ids[::2, -1] = ids[::2, 0]
    return ids


def _mask(kind: str, experts: int, seed: int, device: torch.device) -> Tensor | None:
    """int32 [E], 0 for experts that live elsewhere; the others have one of several values that are as true as 1."""
    if kind == "none":
        return None
    rank = torch.argsort(torch.argsort(integers((experts,), 0, 1 << 24, seed + 7, device), stable=True))
    count = {"all": experts, "one_left": 1, "none_left": 0}.get(kind)
    if count is None:
        count = max(1, experts * _LOCAL_IN_TEN[kind] // 10)
    return as_mask(rank < count, torch.int32, "any", seed + 6)


def _weights(kind: str, shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """fp32 [T, k]. real: strongly uneven; coded, exact: another number for every slot; special: all kinds of bits."""
    if kind == "real":
        share = uniform(shape, seed + 8, device)
        return share * share + 0.02
    slot = torch.arange(shape[0] * shape[1], device=device).view(shape)
    coded = (slot + 1).float() * 2.0**-10
    if kind != "special":
        return coded
    nans = torch.tensor(_NANS, dtype=torch.int32, device=device).view(torch.float32)
    known = torch.cat([torch.tensor(_SPECIAL, device=device), nans])
    return torch.where(slot % 3 == 1, known[slot // 3 % len(known)], coded)


def _poison(weights: Tensor, unserved: Tensor, state: dict[str, int]) -> Callable[[int], None]:
    """The call's ``set_poison``: weights of slots without a local expert. ``state`` tells, over all calls that share
    the weights, which poison stands there; what stands already is not written again."""

    def set_poison(which: int) -> None:
        if state.get("now") != which:
            weights[unserved] = _POISON[which]
            state["now"] = which

    return set_poison
