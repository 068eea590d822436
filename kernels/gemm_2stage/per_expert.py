"""per_expert: gather the rows of one expert, one matrix product, scatter; then the next expert. Plain PyTorch.

It takes the unsorted routes and every dtype. Experts come one after another, and a token has distinct ones, so that
additions to the output are ordered and repeatable in atomic mode too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.route import Route
from kernels.gemm_2stage import microscaled
from kernels.gemm_2stage.between import add_slots, local_experts, requantise
from kernels.gemm_2stage.unpack import product, weight_matrix

if TYPE_CHECKING:
    from torch import Tensor

NAME = "per_expert"
_INTEGER = ("int8", "int8smooth", "int4")
_ABOUT = "PyTorch, expert after expert: gather, matrix product, scatter"


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """The one path, wherever PyTorch runs; nothing is compiled."""
    return Route(NAME)


def _experts(local: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, tokens, slots) of each local expert that has any; waits for the device to know which have."""
    for expert in range(len(weights)):
        token, slot = (local == expert).nonzero().unbind(1)
        if len(token):
            yield expert, token, slot


def _sums(rows: Tensor, row: Tensor, scale_rows: Tensor | None, w: Tensor, scale_w: Tensor | None, expert: int,
          in_dtype: str) -> Tensor:
    """fp32 [M, N]: rows[row] times the expert's weights, scaled by channel and by row."""
    if in_dtype in microscaled.WEIGHTS and scale_w is not None:
        return microscaled.product(rows[row], microscaled.channel_matrix(w[expert], scale_w, expert))
    grouped = in_dtype == "int4_bf16_g32" and scale_w is not None
    acc = product(rows[row], weight_matrix(w[expert]), in_dtype in _INTEGER,
                  scale_w[expert] if grouped and scale_w is not None else None)
    if scale_w is not None and not grouped:
        acc = acc * scale_w[expert]
    return acc if scale_rows is None else acc * scale_rows[row][:, None]


def _stage1(x: Tensor, w1: Tensor, scale_x: Tensor | None, scale_w1: Tensor | None, local: Tensor, weights: Tensor,
            in_dtype: str, doweight: str, out: Tensor) -> None:
    import torch

    tokens, topk = local.shape
    out.zero_()
    for expert, token, slot in _experts(local, w1):
        row = slot * tokens + token if in_dtype == "int8smooth" else token
        row = token * topk + slot if in_dtype in microscaled.ACTIVATIONS else row
        gate, up = _sums(x, row, scale_x, w1, scale_w1, expert, in_dtype).chunk(2, dim=1)
        factor = weights[token, slot][:, None]
        gate = gate * factor if doweight in ("gate", "gate-and-up") else gate
        up = up * factor if doweight == "gate-and-up" else up
        y = torch.nn.functional.silu(gate) * up
        out[token * topk + slot] = (y * factor if doweight == "after" else y).to(out.dtype)


def _stage2(a2: Tensor, w2: Tensor, scale_a2: Tensor | None, scale_w2: Tensor | None, local: Tensor, weights: Tensor,
            in_dtype: str, atomic: bool, out: Tensor) -> None:
    topk = local.shape[1]
    rows = a2.view(-1, a2.shape[-1])
    out.zero_()
    for expert, token, slot in _experts(local, w2):
        row = token * topk + slot
        z = _sums(rows, row, scale_a2, w2, scale_w2, expert, in_dtype) * weights[token, slot][:, None]
        if atomic:
            out[token] = out[token] + z.to(out.dtype)
        else:
            out[row] = z.to(out.dtype)


@kernel("moe_gemm1", name=NAME, about=_ABOUT, route=route, graph_safe=False, role="pytorch")
def gemm1(x: Tensor, w1: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          doweight: str, out: Tensor) -> None:
    """Fill ``out`` [T k, I]; arguments follow the operator's contract."""
    report_path(NAME)
    if in_dtype in microscaled.ACTIVATIONS and scale_x is not None:
        x = microscaled.row_matrix(x, scale_x, sorted_token_ids, num_valid_ids, topk_ids.shape)
        scale_x = None
    _stage1(x, w1, scale_x, scale_w1, local_experts(topk_ids, expert_mask), topk_weights, in_dtype, doweight, out)


@kernel("moe_gemm2", name=NAME, about=_ABOUT, route=route, graph_safe=False, role="pytorch")
def gemm2(a2: Tensor, w2: Tensor, *, scale_a2: Tensor | None = None, scale_w2: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          combine: str, out: Tensor) -> None:
    """Fill ``out``: [T, H] in atomic mode, [T k, H] in reduce mode."""
    report_path(NAME)
    if in_dtype in microscaled.ACTIVATIONS and scale_a2 is not None:
        a2 = microscaled.row_matrix(a2, scale_a2, sorted_token_ids, num_valid_ids, topk_ids.shape)
        scale_a2 = None
    _stage2(a2, w2, scale_a2, scale_w2, local_experts(topk_ids, expert_mask), topk_weights, in_dtype,
            combine == "atomic", out)


@kernel("moe_gemm_2stage", name=NAME, about=_ABOUT, route=route, graph_safe=False, role="pytorch")
def gemm_2stage(x: Tensor, w1: Tensor, w2: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
                scale_w2: Tensor | None = None, smooth2: Tensor | None = None, sorted_token_ids: Tensor,
                sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor, topk_ids: Tensor,
                topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int, combine: str,
                rule: str, out: Tensor) -> None:
    """Fill ``out`` [T, H]: both stages, f16 between them."""
    import torch

    report_path(NAME)
    local = local_experts(topk_ids, expert_mask)
    scaled_blocks = in_dtype in microscaled.ACTIVATIONS
    if scaled_blocks and scale_x is not None:
        x = microscaled.row_matrix(x, scale_x, sorted_token_ids, num_valid_ids, topk_ids.shape)
        scale_x = None
    slots, inter = local.numel(), w1.shape[1] // 2
    out1 = torch.empty((slots, inter), dtype=torch.float16, device=x.device)
    _stage1(x, w1, scale_x, scale_w1, local, topk_weights, in_dtype, "none", out1)
    a2, scale_a2 = ((microscaled.requantised(out1, in_dtype, rule), None) if scaled_blocks
                    else requantise(out1, x, smooth2, local, rule))
    if combine == "atomic":
        _stage2(a2, w2, scale_a2, scale_w2, local, topk_weights, in_dtype, True, out)
        return
    partials = torch.empty((slots, w2.shape[1]), dtype=out.dtype, device=x.device)
    _stage2(a2, w2, scale_a2, scale_w2, local, topk_weights, in_dtype, False, partials)
    add_slots(partials, out, local)
