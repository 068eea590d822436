"""A kernel that lives outside the conformance suite: the weighted reduction of expert outputs in plain PyTorch."""

import torch

from conformance import kernel


@kernel("moe_reduce_fused", promise="within-budget", about="example: gather, scale, sum")
def reduce_of_a_package(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    """Fill ``out`` [T, H] with the sum over slots of x[position] * weight * x_sf[position], times sf."""
    if len(x) == 0:  # then every slot is padding
        return out.zero_()
    padding, rows = token_topk_to_pos < 0, token_topk_to_pos.clamp(min=0).long()
    terms = x[rows].float()  # [T, K, H]
    for factor in (topk_weights, None if x_sf is None else x_sf[rows]):
        terms = terms if factor is None else terms * factor[..., None]
    total = terms.masked_fill(padding[..., None], 0.0).sum(dim=1)  # x[0] may be NaN: select, do not multiply by 0
    total = total if sf is None else total * sf
    out.copy_(total.clamp(-448, 448) if out.dtype == torch.float8_e4m3fn else total)
