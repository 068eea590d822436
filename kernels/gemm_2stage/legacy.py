"""legacy: both stages in TileLang from the sorted lists, every dtype, no tiles in shared memory and no pipeline.

8-bit floats are converted in integer arithmetic on every target, so that it is the one path that runs anywhere; FNUZ
codes are not taken. In atomic mode with three slots or more the order of additions on a GPU is not fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.errors import NotSupported
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import form_of, target_of
from kernels.gemm_2stage.between import add_slots, local_experts, requantise
from kernels.gemm_2stage.legacy_template import (
    AFTER,
    GATE,
    GATE_AND_UP,
    IN_DTYPES,
    NONE,
    Spec,
    build,
    stored_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

NAME = "legacy"
_ABOUT = "TileLang, a thread per channel walks the sorted rows of a block; the fallback for every dtype"
_FORMS = {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}
_DOWEIGHT = {"none": NONE, "after": AFTER, "gate": GATE, "gate-and-up": GATE_AND_UP}


def supports(params: Mapping[str, str]) -> str | None:
    """None, or why a case is not taken."""
    if params["in"] not in IN_DTYPES:
        return f"in:{params['in']} has no TileLang program; known: {', '.join(IN_DTYPES)}"
    return "FNUZ codes are not converted" if params.get("encoding") == "fnuz" else None


def repeatable(params: Mapping[str, str]) -> bool:
    """0 + a is exact and a + b commutes: with two slots every order of additions gives the same bits."""
    return params.get("mode") != "atomic" or int(params["topk"]) <= 2


def specs(params: Mapping[str, str], target: str, stages: tuple[int, ...]) -> tuple[Spec, ...]:
    """The specialisations that a case runs, one for each stage."""
    out, how = _FORMS[params["out"]], "add" if params.get("mode") == "atomic" else "store"
    first = _spec(target, 1, params["in"], out if stages == (1,) else "fp16")
    return tuple(spec for spec in (first, _spec(target, 2, params["in"], out, how)) if spec.stage in stages)


def _spec(target: str, stage: int, in_dtype: str, result: str, how: str = "store") -> Spec:
    """int8smooth differs from int8 in its rows only, which is known at the call."""
    return Spec(target, stage, "int8" if in_dtype == "int8smooth" else in_dtype, result, how)


def _prepare(stages: tuple[int, ...], params: Mapping[str, str], device_type: str) -> None:
    for spec in specs(params, target_of(device_type), stages):
        tilelang_build.load(str(spec), spec.target, partial(build, spec), wait=False)


def _route(stages: tuple[int, ...], params: Mapping[str, str], arch: Arch) -> Route:
    if (reason := supports(params)) is not None:
        raise NotSupported(reason)
    return Route(NAME, " + ".join(map(str, specs(params, arch.language, stages))))


def _lower(stages: tuple[int, ...], params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of the last stage; the first one of a chain is lowered by moe_gemm1's own cases."""
    return tilelang_lower.lower(partial(build, specs(params, arch.language, stages)[-1]), arch)


def _options(*stages: int) -> dict[str, Any]:
    return {
        "about": _ABOUT, "supports": supports, "requires": tilelang_build.missing,
        "prepare": partial(_prepare, stages), "route": partial(_route, stages), "lower": partial(_lower, stages),
        "repeatable": repeatable, "role": "baseline",
    }


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
           lists: tuple[Tensor, Tensor, Tensor, Tensor], block: int, shape: tuple[int, int], out: Tensor,
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
        compiled = tilelang_build.load(str(spec), spec.target, partial(build, spec))
        assert compiled is not None
        compiled(
            ids, of_block, shares, valid, x.view(len(x), chunks, spec.width),
            _stored(w, spec.weight, spec).view(experts, channels // 16, chunks, 16, -1),
            absent if scale_rows is None else scale_rows, absent[None, None] if scale_w is None else scale_w,
            _stored(out, spec.result, spec), *shape, block,
            int(spec.stage == 1 and len(rows) != shape[0]),  # slot-major rows: T k instead of T
            int(scale_rows is not None), int(scale_w is not None), _DOWEIGHT[doweight],
        )


@kernel("moe_gemm1", name=NAME, **_options(1))
def gemm1(x: Tensor, w1: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          doweight: str, out: Tensor) -> None:
    """Fill ``out`` [T k, I]; arguments follow the operator's contract, contiguous."""
    report_path(NAME)
    spec = _spec(target_of(x.device.type), 1, in_dtype, form_of(out))
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    launch(spec, x, w1, scale_x, scale_w1, lists, block, (topk_ids.shape[0], topk_ids.shape[1]), out,
           doweight)


@kernel("moe_gemm2", name=NAME, **_options(2))
def gemm2(a2: Tensor, w2: Tensor, *, scale_a2: Tensor | None = None, scale_w2: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          combine: str, out: Tensor) -> None:
    """Fill ``out``: [T, H] in atomic mode, [T k, H] in reduce mode."""
    report_path(NAME)
    how = "add" if combine == "atomic" else "store"
    spec = _spec(target_of(a2.device.type), 2, in_dtype, form_of(out), how)
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    launch(spec, a2.view(-1, a2.shape[-1]), w2, scale_a2, scale_w2, lists, block,
           (topk_ids.shape[0], topk_ids.shape[1]), out)


@kernel("moe_gemm_2stage", name=NAME, **_options(1, 2))
def gemm_2stage(x: Tensor, w1: Tensor, w2: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
                scale_w2: Tensor | None = None, smooth2: Tensor | None = None, sorted_token_ids: Tensor,
                sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor, topk_ids: Tensor,
                topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int, combine: str,
                rule: str, out: Tensor) -> None:
    """Fill ``out`` [T, H]: stage 1 to f16, re-quantisation and the sum of partials in PyTorch, stage 2."""
    import torch

    report_path(NAME)
    target, (tokens, topk) = target_of(x.device.type), topk_ids.shape
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    local = local_experts(topk_ids, expert_mask)
    out1 = torch.empty((tokens * topk, w1.shape[1] // 2), dtype=torch.float16, device=x.device)
    launch(_spec(target, 1, in_dtype, "fp16"), x, w1, scale_x, scale_w1, lists, block, (tokens, topk), out1)
    a2, scale_a2 = requantise(out1, x, smooth2, local, rule)
    spec = _spec(target, 2, in_dtype, form_of(out), "add" if combine == "atomic" else "store")
    result = out if combine == "atomic" else torch.empty((tokens * topk, w2.shape[1]), dtype=out.dtype, device=x.device)
    launch(spec, a2, w2, scale_a2, scale_w2, lists, block, (tokens, topk), result)
    if combine == "reduce":
        add_slots(result, out, local)
