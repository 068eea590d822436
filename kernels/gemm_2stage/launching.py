"""Launches of the TileLang kernels: a stage, or both with what PyTorch does between them.

``pick`` says which program runs: it is given what `legacy` would run, and the call's block, routes and experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from kernels import tilelang_build
from kernels.dialect import form_of, target_of
from kernels.gemm_2stage.between import add_slots, local_experts, requantise
from kernels.gemm_2stage.legacy_template import AFTER, GATE, GATE_AND_UP, NONE, Spec, stored_dtype

if TYPE_CHECKING:
    from torch import Tensor

Pick = Callable[[Spec, int, int, int], Spec]
Lists = tuple["Tensor", "Tensor", "Tensor", "Tensor"]  # sorted ids, experts of blocks, sorted weights, valid rows
_DOWEIGHT = {"none": NONE, "after": AFTER, "gate": GATE, "gate-and-up": GATE_AND_UP}


def spec_of(target: str, stage: int, in_dtype: str, result: str, combine: str | None = None) -> Spec:
    """What legacy would run. int8smooth differs from int8 in its rows only, which is known at the call."""
    how = "add" if combine == "atomic" else "store"
    return Spec(target, stage, "int8" if in_dtype == "int8smooth" else in_dtype, result, how)


@functools.lru_cache(maxsize=8)
def _absent(device: str) -> Tensor:
    """Stands for a scale that is not given, which the kernel does not read."""
    import torch

    return torch.zeros(1, dtype=torch.float32, device=device)


def _stored(tensor: Tensor, form: str, spec: Spec) -> Tensor:
    """The tensor as bit patterns where the target has no such type."""
    import torch

    name = stored_dtype(spec, form)
    return tensor if name is None else tensor.view(getattr(torch, name))


def launch(spec: Spec, rows: Tensor, w: Tensor, scale_rows: Tensor | None, scale_w: Tensor | None,
           lists: Lists, block: int, shape: tuple[int, int], out: Tensor,
           doweight: str = "none") -> None:
    """One stage. rows [R, K]; lists: sorted ids, experts of blocks, sorted weights, valid rows; shape: (T, k)."""
    import torch

    out.zero_()
    if out.numel() == 0:
        return
    absent = _absent(str(out.device))
    x = _stored(rows, spec.activation, spec)
    experts, channels = w.shape[0], w.shape[1]
    chunks = rows.shape[1] // spec.width
    ids, of_block, shares, valid = lists
    if scale_w is not None and scale_w.dim() == 2:
        scale_w = scale_w[:, None]
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        compiled = tilelang_build.load(str(spec), spec.target, spec.program, passes=spec.passes)
        assert compiled is not None
        compiled(
            ids, of_block, shares, valid, x.view(len(x), chunks, spec.width),
            _stored(w, spec.weight, spec).view(experts, channels // 16, chunks, 16, -1),
            absent if scale_rows is None else scale_rows, absent[None, None] if scale_w is None else scale_w,
            _stored(out, spec.result, spec).view(len(out), -1, 16), *shape, block,
            int(spec.stage == 1 and len(rows) != shape[0]),  # slot-major rows: T k instead of T
            int(scale_rows is not None), int(scale_w is not None), _DOWEIGHT[doweight],
        )


def stage1(pick: Pick, x: Tensor, w1: Tensor, scale_x: Tensor | None, scale_w1: Tensor | None, lists: Lists, block: int,
           shape: tuple[int, int], in_dtype: str, out: Tensor, doweight: str = "none") -> None:
    """Fill ``out`` [T k, I]."""
    spec = spec_of(target_of(x.device.type), 1, in_dtype, form_of(out))
    spec = pick(spec, block, shape[0] * shape[1], len(w1))
    launch(spec, x, w1, scale_x, scale_w1, lists, block, shape, out, doweight)


def stage2(pick: Pick, a2: Tensor, w2: Tensor, scale_a2: Tensor | None, scale_w2: Tensor | None, lists: Lists,
           block: int, shape: tuple[int, int], in_dtype: str, combine: str, out: Tensor) -> None:
    """Fill ``out`` from a2 [T k, I]: [T, H] in atomic mode, [T k, H] in reduce mode."""
    spec = spec_of(target_of(a2.device.type), 2, in_dtype, form_of(out), combine)
    spec = pick(spec, block, shape[0] * shape[1], len(w2))
    launch(spec, a2, w2, scale_a2, scale_w2, lists, block, shape, out)


def both(pick: Pick, x: Tensor, w1: Tensor, w2: Tensor, scale_x: Tensor | None, scale_w1: Tensor | None,
         scale_w2: Tensor | None, smooth2: Tensor | None, lists: Lists, topk_ids: Tensor, expert_mask: Tensor | None,
         block: int, in_dtype: str, combine: str, rule: str, out: Tensor) -> None:
    """Fill ``out`` [T, H]: stage 1 to f16, re-quantisation and the sum of partials in PyTorch, stage 2."""
    import torch

    shape = tokens, topk = topk_ids.shape[0], topk_ids.shape[1]
    local = local_experts(topk_ids, expert_mask)
    out1 = torch.empty((tokens * topk, w1.shape[1] // 2), dtype=torch.float16, device=x.device)
    stage1(pick, x, w1, scale_x, scale_w1, lists, block, shape, in_dtype, out1)
    a2, scale_a2 = requantise(out1, x, smooth2, local, rule)
    result = out if combine == "atomic" else torch.empty((tokens * topk, w2.shape[1]), dtype=out.dtype, device=x.device)
    stage2(pick, a2, w2, scale_a2, scale_w2, lists, block, shape, in_dtype, combine, result)
    if combine == "reduce":
        add_slots(result, out, local)
