"""reduction_torch: slot after slot, each for many tokens at once. Plain PyTorch, any strides, waits for no device.

A masked slot adds +0 by selection. That changes no bit: an accumulator that starts at +0 is never -0, so adding +0
leaves it as it is, and the result is the golden's bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.route import Route

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """The one path, wherever PyTorch runs; nothing is compiled."""
    return Route("reduction_torch")


@kernel(
    "moe_reduction", promise="bit-exact", about="PyTorch, slot after slot, masks by selection", strided=True,
    route=route, role="pytorch",
)
def reduction_torch(part: Tensor, *, valid_mask: Tensor | None = None, topk_ids: Tensor | None = None,
                    expert_mask: Tensor | None = None, out: Tensor) -> None:
    """Fill ``out`` [T, H], chunk by chunk of tokens so that temporaries stay near ``TEMPORARY_BYTES``."""
    report_path("reduction_torch")
    tokens, _, hidden = part.shape
    step = max(1, TEMPORARY_BYTES[part.device.type] // (8 * hidden))
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        if valid_mask is not None:
            masked = valid_mask[chunk] == 0
        elif topk_ids is not None and expert_mask is not None:
            masked = _foreign(topk_ids[chunk], expert_mask)
        else:
            masked = None
        _reduce(part[chunk], masked, out[chunk])


def _foreign(ids: Tensor, expert_mask: Tensor) -> Tensor:
    """bool [T, k]: slots whose expert is not local, or is none."""
    nearest = ids.clamp(0, len(expert_mask) - 1)  # never used as a result, only as an index that exists
    return (nearest != ids) | (expert_mask[nearest.long()] == 0)


def _reduce(part: Tensor, masked: Tensor | None, out: Tensor) -> None:
    import torch

    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(part.shape[1]):
        rows = part[:, slot].float()
        total += rows if masked is None else rows.masked_fill(masked[:, slot, None], 0.0)
    out.copy_(total)
