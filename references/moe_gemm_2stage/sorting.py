"""moe_sorting: routes (token, slot) grouped by expert, each expert's run padded to whole blocks of rows.

Contract shared by aiter, CK and FlyDSL (FlyDSL 11c4174d, aiter e4048607). With T tokens, k slots, E experts and
blocks of BM rows, P = T k + E BM - k and B = ceil(P / BM):

- token_ids int32 [P]: packed ids, slot << 24 | token; experts ascending, inside an expert by token. Padding, inside
  partial blocks and past the valid rows, is the sentinel k << 24 | T: both fields one past their end.
- weights fp32 [P]: the routing weight of each id; of padding, nothing is promised.
- expert_ids int32 [B]: the local expert of each block; past the valid blocks, nothing is promised.
- num_valid int32 [2]: padded rows in use, and T.

Order inside an expert's run is a bag unless a kernel promises to be stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKEN_BITS = 24
MOST_TOKENS = (1 << TOKEN_BITS) - 1  # T itself must fit beside the slot: it is the sentinel's token
MOST_SLOTS = 127  # the slot is decoded with an arithmetic shift of a signed int32
INVALID = ("reject", "skip")  # ids outside [0, E): ValueError, or no route (aiter#5295)
DUPLICATES = ("reject", "keep")  # an expert twice in a token: ValueError, or two routes
_TAIL_EXPERT = -1


@dataclass(frozen=True)
class Sorted:
    """Result of a sort; shapes as above. ``block`` is BM."""

    token_ids: Tensor
    weights: Tensor
    expert_ids: Tensor
    num_valid: Tensor
    block: int

    @property
    def valid_rows(self) -> int:
        return int(self.num_valid[0])


def pack(token: Tensor, slot: Tensor) -> Tensor:
    """int32 ids slot << 24 | token of any shape."""
    return (slot.to(torch.int64) << TOKEN_BITS | token.to(torch.int64)).to(torch.int32)


def unpack(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(token, slot) int32 of packed ids, as kernels decode them: a mask and an arithmetic shift."""
    return ids & MOST_TOKENS, ids >> TOKEN_BITS


def sentinel(tokens: int, topk: int) -> int:
    return topk << TOKEN_BITS | tokens


def capacity(tokens: int, topk: int, experts: int, block: int) -> tuple[int, int]:
    """(P, B): entries of the id list, and blocks. ``experts`` counts all of them, masked ones too."""
    rows = tokens * topk + experts * block - topk
    return rows, -(-rows // block)


def local_ids(expert_mask: Tensor) -> Tensor:
    """int32 [E]: the number of local experts before each local one, -1 for masked experts. expert_mask int32 [E]."""
    local = expert_mask != 0
    return torch.where(local, local.cumsum(0) - 1, -1).to(torch.int32)


def routed(topk_ids: Tensor, experts: int, expert_mask: Tensor | None = None) -> Tensor:
    """bool [T, k]: which slots have a local expert. An id outside [0, E) has none."""
    inside = (topk_ids >= 0) & (topk_ids < experts)
    if expert_mask is None:
        return inside
    return inside & (expert_mask[torch.where(inside, topk_ids, 0).long()] != 0)


def check(topk_ids: Tensor, topk_weights: Tensor, experts: int, block: int, expert_mask: Tensor | None = None,
          invalid: str = "reject", duplicates: str = "reject") -> None:
    """Raise TypeError or ValueError where the preconditions or the stated policies are not met.

    topk_ids int32 [T, k], topk_weights fp32 [T, k], expert_mask int32 [E] or None. T < 2^24, 1 <= k <= 127, BM a
    positive multiple of 16 up to 256.
    """
    for name, value, known in (("invalid", invalid, INVALID), ("duplicates", duplicates, DUPLICATES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: one of {', '.join(known)} is required")
    for name, tensor, dtype in (("topk_ids", topk_ids, torch.int32), ("topk_weights", topk_weights, torch.float32),
                                ("expert_mask", expert_mask, torch.int32)):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}: {dtype} is required")
    if topk_ids.dim() != 2 or topk_weights.shape != topk_ids.shape:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}: "
                         "both must be [T, k]")
    tokens, topk = topk_ids.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"T is {tokens}: at most 2^24 - 1 = {MOST_TOKENS} tokens fit in a packed id")
    if not 1 <= topk <= MOST_SLOTS:
        raise ValueError(f"k is {topk}: 1 to {MOST_SLOTS} slots fit in a packed id")
    if experts < 1 or (expert_mask is not None and tuple(expert_mask.shape) != (experts,)):
        shape = None if expert_mask is None else tuple(expert_mask.shape)
        raise ValueError(f"E is {experts} and expert_mask has shape {shape}: E >= 1 and [E] are required")
    if not 16 <= block <= 256 or block % 16:
        raise ValueError(f"BM is {block}: a multiple of 16 from 16 to 256 is required")
    if topk > experts:
        raise ValueError(f"k is {topk} and E is {experts}: k <= E is required, or the padded routes may not fit")
    check_ids(topk_ids, experts, invalid, duplicates)


def check_ids(topk_ids: Tensor, experts: int, invalid: str, duplicates: str) -> None:
    """Raise ValueError where the ids break a precondition that no policy lifts."""
    inside = (topk_ids >= 0) & (topk_ids < experts)
    if invalid == "reject" and not bool(inside.all()):
        place = (~inside).nonzero()[0].tolist()
        raise ValueError(f"topk_ids{place} is {int(topk_ids[tuple(place)])}: [0, {experts}) is required "
                         "(invalid='skip' drops such routes)")
    if duplicates == "reject":
        ordered = torch.where(inside, topk_ids, -1).sort(dim=1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)
        if bool(twice.any()):
            token = int(twice.nonzero()[0])
            raise ValueError(f"token {token} lists an expert twice, {topk_ids[token].tolist()}: distinct experts are "
                             "required (duplicates='keep' makes two routes)")


def sort(topk_ids: Tensor, topk_weights: Tensor, experts: int, block: int, expert_mask: Tensor | None = None,
         invalid: str = "reject", duplicates: str = "reject", padding_weight: float = 0.0) -> Sorted:
    """The sorted routes, stable. Raises as ``check`` does.

    Padding weights are ``padding_weight`` (a kernel may leave anything there), expert ids past the valid blocks -1.
    """
    check(topk_ids, topk_weights, experts, block, expert_mask, invalid, duplicates)
    (tokens, topk), device = topk_ids.shape, topk_ids.device
    rows, blocks = capacity(tokens, topk, experts, block)
    kept = routed(topk_ids, experts, expert_mask)
    local = local_ids(torch.ones(experts, dtype=torch.int32, device=device) if expert_mask is None else expert_mask)
    token, slot = kept.nonzero().unbind(1)  # by token, then by slot
    expert = local[topk_ids[token, slot].long()].long()
    order = torch.argsort(expert, stable=True)
    token, slot, expert = token[order], slot[order], expert[order]
    counts = torch.bincount(expert, minlength=experts)
    padded = (counts + block - 1) // block * block
    starts = padded.cumsum(0) - padded
    row = starts[expert] + torch.arange(len(expert), device=device) - (counts.cumsum(0) - counts)[expert]

    ids = torch.full((rows,), sentinel(tokens, topk), dtype=torch.int32, device=device)
    ids[row] = pack(token, slot)
    weights = torch.full((rows,), padding_weight, dtype=torch.float32, device=device)
    weights[row] = topk_weights[token, slot]
    of_block = torch.repeat_interleave(torch.arange(experts, device=device), padded // block)
    expert_ids = torch.full((blocks,), _TAIL_EXPERT, dtype=torch.int32, device=device)
    expert_ids[: len(of_block)] = of_block.to(torch.int32)
    num_valid = torch.tensor([int(padded.sum()), tokens], dtype=torch.int32, device=device)
    return Sorted(ids, weights, expert_ids, num_valid, block)


def positions(result: Sorted, tokens: int, topk: int) -> Tensor:
    """int32 [T, k]: the row of each route in the sorted list, -1 where it has none. Inverse of ``token_ids``.

    Raises ValueError when an id is out of range or stands twice.
    """
    row = (result.token_ids[: result.valid_rows] != sentinel(tokens, topk)).nonzero().flatten()
    token, slot = unpack(result.token_ids[row])
    if bool(((token >= tokens) | (slot < 0) | (slot >= topk)).any()):
        raise ValueError("an id that is not the sentinel has a token or slot out of range")
    flat = token.long() * topk + slot
    if len(flat.unique()) != len(flat):
        raise ValueError("an id stands twice")
    found = torch.full((tokens * topk,), -1, dtype=torch.int32, device=row.device)
    found[flat] = row.to(torch.int32)
    return found.view(tokens, topk)


def path(tokens: int, topk: int, experts: int, shared_bytes: int) -> str:
    """Which of FlyDSL's sorts runs (11c4174d): "oneshot", "two_kernels" or "four_kernels".

    One shot keeps a mesh of (experts + 1) columns of tokens in shared memory, so the same shape takes different
    paths on architectures of different ``shared_bytes``.
    """
    rows = shared_bytes // 4 // 2 // (experts + 1)
    fitting = 0 if rows < 10 else (rows - 2) // 8 * 8
    if tokens <= min(fitting, max(16, 256 // max(topk, experts // 8))):
        return "oneshot"
    return "two_kernels" if tokens <= 2048 else "four_kernels"
