"""h_tiled: one block per (token, tile of the hidden axis), rows of later slots loaded ahead.

The 1152 official cases run 8 specialisations on the C target and 16 on CUDA: dtypes of x and out, look-ahead and tile
are compiled in, everything else (tokens, slots, hidden size, which scales are given) is known at the call only.
"""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import kernel
from conformance.arch import Arch
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import BYTES, form_of, fp8_here, fp8_of, options, target_of
from kernels.reduce_fused.launch import launch
from kernels.reduce_fused.launch import prepare as prepare_spec
from kernels.reduce_fused.template import Spec, parameters, reduce_chunk

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {"block_h": ("256", "512", "1024"), "ahead": ("1", "4"), "fp8": ("native", "bits")}
CONFIGS = tuple(f"{name}:{value}" for name, values in OPTIONS.items() for value in values)
_ENOUGH_BLOCKS = 1024  # about two waves of a large GPU; with fewer, smaller tiles fill it better


def choose(target: str, tokens: int, topk: int, hidden: int) -> tuple[int, int]:
    """(block_h, ahead) for a workload. block_h divides ``hidden``, a multiple of 256.

    Loading ahead starts at four slots: with fewer, all rows are in flight anyway. On the C target the tile only
    has to fit the first-level cache, and 512 divides every hidden size of the official matrix.
    """
    ahead = 4 if topk >= 4 else 1
    for block in (1024, 512) if target != "c" else (512,):
        if hidden % block == 0 and (target == "c" or tokens * (hidden // block) >= _ENOUGH_BLOCKS):
            return block, ahead
    return 256, ahead


def specialise(target: str, tokens: int, topk: int, hidden: int, source: str, result: str,
               config: str | None = None, fp8: str = "native") -> Spec:
    """The specialisation that runs for a call. ``fp8``: how e4m3 is converted on the architecture.

    ``config`` forces options ("block_h:512-ahead:1"); a forced block_h is halved until it divides ``hidden``.
    """
    forced = options(config, OPTIONS)
    block, ahead = choose(target, tokens, topk, hidden)
    block, ahead = int(forced.get("block_h", block)), int(forced.get("ahead", ahead))
    while hidden % block:
        block //= 2
    span = 16 // BYTES[source] if target != "c" else block
    return Spec("h_tiled", target, source, result, span, block // span, ahead, fp8=forced.get("fp8", fp8))


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation."""
    import tilelang.language as T

    dialect, chunk_of_token, of = spec.dialect, reduce_chunk(spec), parameters(spec)

    @T.prim_func
    def h_tiled(x: of.x, positions: of.positions, weights: of.weights, x_sf: of.x_sf, sf: of.sf,
                out: of.out, has_weights: T.int32, has_x_sf: T.int32, has_sf: T.int32):
        with dialect.launch(of.tokens, of.chunks // spec.threads, threads=spec.threads) as (token, tile):
            chunk_of_token(x, positions, weights, x_sf, sf, out, token, tile * spec.threads + dialect.thread(), of.topk,
                           has_weights, has_x_sf, has_sf)

    return h_tiled


def for_case(params: Mapping[str, str], target: str, fp8: str) -> Spec:
    """The specialisation that a case with these parameters runs."""
    tokens = int(params.get("tokens", params.get("send", "0")))
    return specialise(target, tokens, int(params["topk"]), int(params["hidden"]), params["in"], params["out"], fp8=fp8)


def prepare(params: Mapping[str, str], device_type: str) -> None:
    """Compile what a case with these parameters will run."""
    prepare_spec(for_case(params, target_of(device_type), fp8_here(device_type)), build)


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """Path and configuration on an architecture that need not be here."""
    spec = for_case(params, arch.language, fp8_of(arch))
    return Route(spec.path, str(spec))


def lower(params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of that configuration."""
    return tilelang_lower.lower(partial(build, for_case(params, arch.language, fp8_of(arch))), arch)


@kernel(
    "moe_reduce_fused", promise="bit-exact", about="TileLang, one block per token and hidden tile, loads ahead",
    requires=tilelang_build.missing, prepare=prepare, configs=CONFIGS, route=route, lower=lower,
)
def h_tiled(x: "Tensor", token_topk_to_pos: "Tensor", *, topk_weights: "Tensor | None" = None,
            x_sf: "Tensor | None" = None, sf: "Tensor | None" = None, out: "Tensor", config: str | None = None) -> None:
    """Fill ``out`` [T, H]; arguments follow the operator's contract, contiguous."""
    tokens, topk = token_topk_to_pos.shape
    spec = specialise(target_of(x.device.type), tokens, topk, x.shape[1], form_of(x), form_of(out), config,
                      fp8_here(x.device.type))
    launch(spec, build, x, token_topk_to_pos, topk_weights, x_sf, sf, out)
