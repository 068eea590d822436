"""vectorised: gather the rows of all slots as [tokens, K, H] in fp32, scale, sum over the slots. Plain PyTorch.

Each product is rounded before it is added and the order of the sum is torch's, so the result is within the error
budget of the golden, not bit-exact. Every step works on any strides and waits for no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.route import Route

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def tokens_per_chunk(topk: int, hidden: int, itemsize: int, limit: int) -> int:
    """How many tokens' gathered rows (``itemsize`` bytes an element, and fp32) fit in ``limit`` bytes; at least 1."""
    return max(1, limit // (topk * hidden * (4 if itemsize == 4 else 4 + itemsize)))


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """The one path, wherever PyTorch runs; nothing is compiled."""
    return Route("vectorised")


@kernel(
    "moe_reduce_fused", promise="within-budget", about="PyTorch, gather [T, K, H] and reduce", strided=True,
    route=route, role="pytorch",
)
def vectorised(x: Tensor, token_topk_to_pos: Tensor, *, topk_weights: Tensor | None = None,
               x_sf: Tensor | None = None, sf: Tensor | None = None, out: Tensor) -> None:
    """Fill ``out`` [T, H], chunk by chunk of tokens so that temporaries stay below ``TEMPORARY_BYTES``."""
    report_path("vectorised")
    if len(x) == 0:  # no rows: every slot is padding
        out.zero_()
        return
    tokens, topk = token_topk_to_pos.shape
    step = tokens_per_chunk(topk, x.shape[1], x.element_size(), TEMPORARY_BYTES[x.device.type])
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        weights = None if topk_weights is None else topk_weights[chunk]
        _reduce(x, token_topk_to_pos[chunk], weights, x_sf, sf, out[chunk])


def _reduce(x: Tensor, positions: Tensor, weights: Tensor | None, x_sf: Tensor | None, sf: Tensor | None,
            out: Tensor) -> None:
    import torch

    padding = positions < 0
    index = positions.clamp(min=0).reshape(-1)  # padding slots gather row 0, which is replaced below
    rows = x.index_select(0, index).float().view(*positions.shape, x.shape[1])
    scale = weights
    if x_sf is not None:
        row_scale = x_sf.index_select(0, index).view(positions.shape)
        scale = row_scale if scale is None else scale * row_scale
    if scale is not None:
        rows.mul_(scale[..., None])
    # By selection, not by a zero weight: row 0 or a padding slot's weight may be NaN.
    total = rows.masked_fill_(padding[..., None], 0.0).sum(dim=1)
    if sf is not None:
        total.mul_(sf).masked_fill_(padding.all(dim=1)[:, None], 0.0)
    if out.dtype == torch.float8_e4m3fn:
        total.clamp_(-448.0, 448.0)  # saturate; clamp keeps NaN
    out.copy_(total.to(out.dtype))
