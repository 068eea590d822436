"""pipelined: both stages in TileLang with tiles in shared memory, a software pipeline and tensor cores.

A router chooses, by dtype, result, tile and the architecture's facts, which program runs, and reports it: "pipelined"
on tensor cores; "pipelined/loops", the same program in plain loops, on the C target; "legacy" where an architecture
has no matrix instruction for the dtype, or no room in shared memory for any tile. FNUZ codes are not taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformance import kernel, report_path
from conformance.arch import Arch
from kernels.dialect import arch_here
from kernels.gemm_2stage import legacy
from kernels.gemm_2stage.ahead import Programs
from kernels.gemm_2stage.launching import both, stage1, stage2
from kernels.gemm_2stage.legacy_template import Spec
from kernels.gemm_2stage.tiles import Tiled, class_of, class_of_case, tiled

if TYPE_CHECKING:
    from torch import Tensor

NAME, LOOPS = "pipelined", "pipelined/loops"
_ABOUT = "TileLang, tiles in shared memory, asynchronous copies of the next step, tensor cores"


def choose(arch: Arch, plain: Spec, size: str) -> Spec:
    """The program that runs on ``arch`` what ``plain`` would: itself where pipelined cannot. size: the tile's class."""
    return tiled(arch, plain, size, overlapped=True) or plain


def path_of(spec: Spec) -> str:
    """The path that a program is reported as."""
    if not isinstance(spec, Tiled):
        return legacy.NAME
    return NAME if spec.dialect.gpu else LOOPS


def specs(stages: tuple[int, ...], params: Mapping[str, str], arch: Arch) -> tuple[Spec, ...]:
    """The programs that a case at official sizes runs, one for each stage."""
    size = class_of_case(params)
    return tuple(choose(arch, plain, size) for plain in legacy.specs(params, arch.language, stages))


def _pick(spec: Spec, block: int, slots: int, experts: int) -> Spec:
    found = choose(arch_here(spec.target), spec, class_of(block, slots, experts))
    report_path(path_of(found))
    return found


def _options(*stages: int) -> dict[str, Any]:
    programs = Programs(specs, path_of, (legacy.NAME, LOOPS, NAME), legacy.supports)
    return {"about": _ABOUT, "repeatable": legacy.repeatable, **programs.options(*stages)}


@kernel("moe_gemm1", name=NAME, **_options(1))
def gemm1(x: Tensor, w1: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          doweight: str, out: Tensor) -> None:
    """Fill ``out`` [T k, I]; arguments follow the operator's contract, contiguous."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    shape = topk_ids.shape[0], topk_ids.shape[1]
    stage1(_pick, x, w1, scale_x, scale_w1, lists, block, shape, in_dtype, out, doweight)


@kernel("moe_gemm2", name=NAME, **_options(2))
def gemm2(a2: Tensor, w2: Tensor, *, scale_a2: Tensor | None = None, scale_w2: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          combine: str, out: Tensor) -> None:
    """Fill ``out``: [T, H] in atomic mode, [T k, H] in reduce mode."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    shape, rows = (topk_ids.shape[0], topk_ids.shape[1]), a2.view(-1, a2.shape[-1])
    stage2(_pick, rows, w2, scale_a2, scale_w2, lists, block, shape, in_dtype, combine, out)


@kernel("moe_gemm_2stage", name=NAME, **_options(1, 2))
def gemm_2stage(x: Tensor, w1: Tensor, w2: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
                scale_w2: Tensor | None = None, smooth2: Tensor | None = None, sorted_token_ids: Tensor,
                sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor, topk_ids: Tensor,
                topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int, combine: str,
                rule: str, out: Tensor) -> None:
    """Fill ``out`` [T, H]: stage 1 to f16, re-quantisation and the sum of partials in PyTorch, stage 2."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    both(_pick, x, w1, w2, scale_x, scale_w1, scale_w2, smooth2, lists, topk_ids, expert_mask, block, in_dtype,
         combine, rule, out)
