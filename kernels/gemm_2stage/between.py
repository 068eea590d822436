"""From stage 1's output to stage 2's input, in PyTorch: smoothing, a cast, or quantisation with one scale per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def local_experts(topk_ids: Tensor, expert_mask: Tensor | None) -> Tensor:
    """int64 [T, k]: local number of each slot's expert, -1 where it is elsewhere. Waits for no device."""
    if expert_mask is None:
        return topk_ids.long()
    here = expert_mask != 0
    return (here.cumsum(0) - 1).masked_fill(~here, -1)[topk_ids.long()]


def requantise(out1: Tensor, x: Tensor, smooth2: Tensor | None, local: Tensor, rule: str
               ) -> tuple[Tensor, Tensor | None]:
    """(a2 [T k, I] in x's dtype, its scales fp32 [T k] or None) of out1 f16 [T k, I]. Rows without an expert are 0."""
    import torch

    if x.dtype in (torch.float16, torch.bfloat16):
        return out1.to(x.dtype), None
    value = out1.float()
    if smooth2 is not None and len(smooth2):  # it has no rows where no expert is local
        value = value * smooth2[local.clamp(min=0).flatten()]
    largest = 127.0 if x.dtype == torch.int8 else torch.finfo(x.dtype).max
    scale = value.abs().amax(dim=1) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    ratio = value / scale[:, None]
    if x.dtype == torch.int8:
        ratio = ratio.trunc() if rule == "truncate" else ratio.round()
    elif x.dtype == torch.float8_e4m3fnuz:
        ratio = ratio + 0.0  # no -0: its byte is NaN
    return ratio.clamp(-largest, largest).to(x.dtype), scale


def add_slots(partials: Tensor, out: Tensor, local: Tensor) -> None:
    """out [T, H] = sum over slots with an expert of partials [T k, H], in fp32, ascending."""
    import torch

    tokens, topk = local.shape
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    parts = partials.view(tokens, topk, partials.shape[1])
    for slot in range(topk):
        total += parts[:, slot].float().masked_fill(local[:, slot, None] < 0, 0.0)
    out.copy_(total)
