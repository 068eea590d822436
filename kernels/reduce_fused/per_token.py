"""per_token: one block per token that loops over the hidden axis. The baseline: no tiling to choose, no row ahead.

The 1152 official cases run 4 specialisations, one for each pair of dtypes.
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
from kernels.dialect import BYTES, form_of, fp8_here, fp8_of, target_of
from kernels.reduce_fused.launch import launch
from kernels.reduce_fused.launch import prepare as prepare_spec
from kernels.reduce_fused.template import Spec, parameters, reduce_tokens

if TYPE_CHECKING:
    from torch import Tensor


def specialise(target: str, source: str, result: str, fp8: str = "native") -> Spec:
    """The specialisation that runs: 256 threads with one 16-byte vector each, or 256 elements at a time in C.
    ``fp8``: how e4m3 is converted on the architecture."""
    span, threads = (16 // BYTES[source], 256) if target != "c" else (256, 1)
    return Spec("per_token", target, source, result, span, threads, fp8=fp8)


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation."""
    import tilelang.language as T

    dialect, tokens, of = spec.dialect, reduce_tokens(spec), parameters(spec)

    @T.prim_func
    def per_token(x: of.x, positions: of.positions, weights: of.weights, x_sf: of.x_sf, sf: of.sf,
                  out: of.out, has_weights: T.int32, has_x_sf: T.int32, has_sf: T.int32):
        with dialect.launch(of.tokens, threads=spec.threads) as token:
            for step in T.serial(T.ceildiv(of.chunks, spec.threads)):
                chunk = step * spec.threads + dialect.thread()
                if chunk < of.chunks:
                    tokens(x, positions, weights, x_sf, sf, out, token, 1, chunk, of.topk,
                           has_weights, has_x_sf, has_sf)

    return per_token


def prepare(params: Mapping[str, str], device_type: str) -> None:
    """Compile what a case with these parameters will run."""
    prepare_spec(specialise(target_of(device_type), params["in"], params["out"], fp8_here(device_type)), build)


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """Path and configuration on an architecture that need not be here."""
    spec = specialise(arch.language, params["in"], params["out"], fp8_of(arch))
    return Route(spec.path, str(spec))


def lower(params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of that configuration."""
    spec = specialise(arch.language, params["in"], params["out"], fp8_of(arch))
    return tilelang_lower.lower(partial(build, spec), arch)


@kernel(
    "moe_reduce_fused", promise="bit-exact", about="TileLang, one block per token, the baseline",
    requires=tilelang_build.missing, prepare=prepare, route=route, lower=lower, role="baseline",
)
def per_token(x: "Tensor", token_topk_to_pos: "Tensor", *, topk_weights: "Tensor | None" = None,
              x_sf: "Tensor | None" = None, sf: "Tensor | None" = None, out: "Tensor") -> None:
    """Fill ``out`` [T, H]; arguments follow the operator's contract, contiguous."""
    spec = specialise(target_of(x.device.type), form_of(x), form_of(out), fp8_here(x.device.type))
    launch(spec, build, x, token_topk_to_pos, topk_weights, x_sf, sf, out)
