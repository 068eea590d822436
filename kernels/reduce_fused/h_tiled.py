"""h_tiled: one block per (some tokens, tile of the hidden axis), rows of later slots loaded ahead.

Dtypes of x and out, look-ahead and tile are compiled in, on GPUs also which of weights, x_sf and sf are given; tokens,
slots and hidden size are known at the call only. The 1152 official cases run 8 specialisations on the C target and 48
on sm_90.
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
from kernels.dialect import BYTES, arch_here, form_of, fp8_of, options, target_of
from kernels.reduce_fused.launch import launch, multiprocessors
from kernels.reduce_fused.launch import prepare as prepare_spec
from kernels.reduce_fused.template import Spec, parameters, reduce_tokens
from kernels.reduce_fused.tuning import tuning_of

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {
    "block_h": ("256", "512", "1024"), "vectors": ("1", "2"), "ahead": ("1", "3", "4"), "tokens": ("1", "3", "16"),
    "fp8": ("native", "bits"),
}
CONFIGS = tuple(f"{name}:{value}" for name, values in OPTIONS.items() for value in values)
_C_BLOCK = 512  # only has to fit the first-level cache, and divides every hidden size of the official matrix
_C_TOKENS = 4
_WARP = 32
_MOST_BLOCKS = 65535  # along the second axis of a grid, on every GPU


def specialise(arch: Arch, topk: int, hidden: int, source: str, result: str, given: str = "000",
               config: str | None = None) -> Spec:
    """The specialisation that runs for a call. ``hidden``: a multiple of 256. ``given``: presence of weights, x_sf and
    sf, as "101".

    ``config`` forces options ("block_h:512-ahead:1"); a block is halved until it divides ``hidden``, and has one vector
    for each thread where it does not divide into as many as are forced. On the C target a block is one thread's, and
    presence is told at the call: its branches cost nothing there.
    """
    forced = options(config, OPTIONS)
    fp8 = forced.get("fp8", fp8_of(arch))
    if arch.language == "c":
        block = _divisor(int(forced.get("block_h", _C_BLOCK)), hidden)
        ahead = int(forced.get("ahead", 4 if topk >= 4 else 1))
        return Spec("h_tiled", "c", source, result, block, 1, ahead, fp8=fp8)
    tuning, span = tuning_of(arch.name), 16 // BYTES[source]
    tile = _divisor(int(forced["block_h"]), hidden) if "block_h" in forced else hidden
    chunks = tile // span
    vectors = int(forced.get("vectors", tuning.vectors_of(chunks // _WARP)))
    vectors = vectors if chunks % (_WARP * vectors) == 0 else 1
    threads = (chunks if tile < hidden else _divisor(tuning.threads * vectors, chunks)) // vectors
    ahead = int(forced.get("ahead", tuning.ahead_of(topk)))
    return Spec("h_tiled", arch.language, source, result, span, threads, ahead, given, fp8, vectors,
                tuning.resident(threads, span, vectors, ahead))


def tokens_of(arch: Arch, tokens: int, hidden: int, block: int, config: str | None, multiprocessors: int) -> int:
    """Tokens that a block takes: what ``config`` forces, else what the tuning says; more where the grid has no room."""
    wanted = (_C_TOKENS if arch.language == "c" else
              tuning_of(arch.name).tokens_of(tokens * (hidden // block), multiprocessors))
    return max(int(options(config, OPTIONS).get("tokens", wanted)), -(-tokens // _MOST_BLOCKS))


def _divisor(block: int, hidden: int) -> int:
    while hidden % block:
        block //= 2
    return block


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation."""
    import tilelang.language as T

    dialect, reduce, of = spec.dialect, reduce_tokens(spec), parameters(spec)

    @T.prim_func
    def h_tiled(x: of.x, positions: of.positions, weights: of.weights, x_sf: of.x_sf, sf: of.sf,
                out: of.out, has_weights: T.int32, has_x_sf: T.int32, has_sf: T.int32, each: T.int32):
        chunks = spec.threads * spec.vectors
        with dialect.launch(of.chunks // chunks, T.ceildiv(of.tokens, each), threads=spec.threads) as (tile, block):
            if spec.resident:
                T.annotate_min_blocks_per_sm(spec.resident)
            reduce(x, positions, weights, x_sf, sf, out, block * each, T.min(each, of.tokens - block * each),
                   tile * chunks + dialect.thread(), of.topk, has_weights, has_x_sf, has_sf)

    return h_tiled


def for_case(params: Mapping[str, str], arch: Arch) -> Spec:
    """The specialisation that a case with these parameters runs."""
    sf = params["out"] == "e4m3" and params.get("sf") != "none"
    given = "".join(str(int(one)) for one in (params["weights"] == "yes", params["xsf"] == "yes", sf))
    return specialise(arch, int(params["topk"]), int(params["hidden"]), params["in"], params["out"], given)


def prepare(params: Mapping[str, str], device_type: str) -> None:
    """Compile what a case with these parameters will run."""
    prepare_spec(for_case(params, arch_here(target_of(device_type))), build)


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """Path and configuration on an architecture that need not be here."""
    spec = for_case(params, arch)
    return Route(spec.path, str(spec))


def lower(params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of that configuration."""
    return tilelang_lower.lower(partial(build, for_case(params, arch)), arch)


@kernel(
    "moe_reduce_fused", promise="bit-exact", about="TileLang, one block per token and hidden tile, loads ahead",
    requires=tilelang_build.missing, prepare=prepare, configs=CONFIGS, route=route, lower=lower,
)
def h_tiled(x: "Tensor", token_topk_to_pos: "Tensor", *, topk_weights: "Tensor | None" = None,
            x_sf: "Tensor | None" = None, sf: "Tensor | None" = None, out: "Tensor", config: str | None = None) -> None:
    """Fill ``out`` [T, H]; arguments follow the operator's contract, contiguous."""
    given = "".join(str(int(one is not None)) for one in (topk_weights, x_sf, sf))
    arch, (tokens, topk), hidden = arch_here(target_of(x.device.type)), token_topk_to_pos.shape, x.shape[1]
    spec = specialise(arch, topk, hidden, form_of(x), form_of(out), given, config)
    each = tokens_of(arch, tokens, hidden, spec.block, config, multiprocessors(x.device))
    launch(spec, build, x, token_topk_to_pos, topk_weights, x_sf, sf, out, each)
