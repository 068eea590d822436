"""legacy: both stages in TileLang from the sorted lists, every dtype, no pipeline. Runs anywhere.

Where the architecture has the matrix instruction and the room it multiplies tiles, one step after the other
("legacy/tiles"), else in plain loops, a thread for each channel, with 8-bit floats converted in integer arithmetic
("legacy"). FNUZ codes are not taken. In atomic mode with three slots or more the order of additions on a GPU is not
fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformance import kernel, report_path
from conformance.arch import Arch
from kernels.dialect import arch_here, options
from kernels.gemm_2stage.ahead import Programs
from kernels.gemm_2stage.launching import Pick, both, spec_of, stage1, stage2
from kernels.gemm_2stage.legacy_template import IN_DTYPES, Spec
from kernels.gemm_2stage.tiles import Tiled, class_of, class_of_case, tiled

if TYPE_CHECKING:
    from torch import Tensor

NAME, TILES = "legacy", "legacy/tiles"
OPTIONS = {"program": ("loops", "tiles")}
CONFIGS = tuple(f"program:{value}" for value in OPTIONS["program"])
_ABOUT = "TileLang, no pipeline: tiles on tensor cores, or a thread per channel; the fallback for every dtype"
_FORMS = {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}


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
    out = _FORMS[params["out"]]
    first = spec_of(target, 1, params["in"], out if stages == (1,) else "fp16")
    both_stages = first, spec_of(target, 2, params["in"], out, params.get("mode"))
    return tuple(spec for spec in both_stages if spec.stage in stages)


def choose(arch: Arch, plain: Spec, size: str, config: str | None = None) -> Spec:
    """The program that runs on ``arch``: tiles up to the class ``size``, or ``plain``, the loops. ``config`` forces one
    ("program:loops"); tiles that cannot be have no such program, so that loops run all the same."""
    wanted = options(config, OPTIONS).get("program", "loops" if arch.language == "c" else "tiles")
    return (tiled(arch, plain, size, overlapped=False) if wanted == "tiles" else None) or plain


def path_of(spec: Spec) -> str:
    """The path that a program is reported as."""
    return TILES if isinstance(spec, Tiled) else NAME


def _pick(config: str | None) -> Pick:
    def pick(spec: Spec, block: int, slots: int, experts: int) -> Spec:
        found = choose(arch_here(spec.target), spec, class_of(block, slots, experts), config)
        report_path(path_of(found))
        return found

    return pick


def _chosen(stages: tuple[int, ...], params: Mapping[str, str], arch: Arch) -> tuple[Spec, ...]:
    """The programs that a case at official sizes runs, one for each stage."""
    return tuple(choose(arch, plain, class_of_case(params)) for plain in specs(params, arch.language, stages))


def _options(*stages: int) -> dict[str, Any]:
    return {
        "about": _ABOUT, "repeatable": repeatable, "role": "baseline", "configs": CONFIGS, "native": (NAME, TILES),
        **Programs(_chosen, path_of, (NAME, TILES), supports).options(*stages),
    }


@kernel("moe_gemm1", name=NAME, **_options(1))
def gemm1(x: Tensor, w1: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          doweight: str, out: Tensor, config: str | None = None) -> None:
    """Fill ``out`` [T k, I]; arguments follow the operator's contract, contiguous."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    shape = topk_ids.shape[0], topk_ids.shape[1]
    stage1(_pick(config), x, w1, scale_x, scale_w1, lists, block, shape, in_dtype, out, doweight)


@kernel("moe_gemm2", name=NAME, **_options(2))
def gemm2(a2: Tensor, w2: Tensor, *, scale_a2: Tensor | None = None, scale_w2: Tensor | None = None,
          sorted_token_ids: Tensor, sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor,
          topk_ids: Tensor, topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int,
          combine: str, out: Tensor, config: str | None = None) -> None:
    """Fill ``out``: [T, H] in atomic mode, [T k, H] in reduce mode."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    shape, rows = (topk_ids.shape[0], topk_ids.shape[1]), a2.view(-1, a2.shape[-1])
    stage2(_pick(config), rows, w2, scale_a2, scale_w2, lists, block, shape, in_dtype, combine, out)


@kernel("moe_gemm_2stage", name=NAME, **_options(1, 2))
def gemm_2stage(x: Tensor, w1: Tensor, w2: Tensor, *, scale_x: Tensor | None = None, scale_w1: Tensor | None = None,
                scale_w2: Tensor | None = None, smooth2: Tensor | None = None, sorted_token_ids: Tensor,
                sorted_expert_ids: Tensor, sorted_weights: Tensor, num_valid_ids: Tensor, topk_ids: Tensor,
                topk_weights: Tensor, expert_mask: Tensor | None = None, in_dtype: str, block: int, combine: str,
                rule: str, out: Tensor, config: str | None = None) -> None:
    """Fill ``out`` [T, H]: stage 1 to f16, re-quantisation and the sum of partials in PyTorch, stage 2."""
    lists = sorted_token_ids, sorted_expert_ids, sorted_weights, num_valid_ids
    both(_pick(config), x, w1, w2, scale_x, scale_w1, scale_w2, smooth2, lists, topk_ids, expert_mask, block, in_dtype,
         combine, rule, out)
