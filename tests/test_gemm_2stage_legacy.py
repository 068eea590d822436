"""The TileLang kernel of two-stage MoE: on the CPU through the engine, elsewhere by the code that is generated."""

from __future__ import annotations

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, official

from conformance import Kernel
from conformance.case import parse_case
from conformance.errors import NotSupported
from conformance.judging.judge import Judge
from conformance.registry import arch, kernels
from conformance.result import Settings
from kernels import bits, tilelang_build
from kernels.gemm_2stage.launching import spec_of
from kernels.gemm_2stage.legacy import choose, path_of
from kernels.gemm_2stage.tiles import LARGE

MISSING = tilelang_build.missing("cpu")
needs_tilelang = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
POINT = "{}/F/tokens:21-hidden:96-inter:64-experts:6-topk:3-bm:16-in:{}-mode:{}-out:{}-mask:{}"
PARAMS = {"tokens": "64", "hidden": "256", "inter": "128", "experts": "4", "topk": "2", "bm": "16", "mask": "no"}
pytestmark = pytest.mark.usefixtures("one_thread")


def kernel(name: str) -> Kernel:
    return kernels(name, ["legacy"])[0]


@needs_tilelang
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16", "int8smooth", "int4", "int4_bf16_g32"])
def test_both_stages_are_right_end_to_end(dtype: str) -> None:
    judge = Judge(Settings(), "all")
    for mode, out, mask in (("atomic", "f16", "no"), ("reduce", "f16", "yes")):
        case = parse_case(POINT.format("moe_gemm_2stage", dtype, mode, out, mask))
        found = judge.run(case, kernel("moe_gemm_2stage"))
        assert (found.state, found.path) == ("pass", "legacy"), found.message


@needs_tilelang
@pytest.mark.parametrize("doweight", ["after", "gate", "gate_and_up"])
def test_the_routing_weight_of_stage_1(doweight: str) -> None:
    point = POINT.format("moe_gemm1", "fp8", "atomic", "f16", "yes") + f"-doweight:{doweight}"
    found = Judge(Settings()).run(parse_case(point), kernel("moe_gemm1"))
    assert found.state == "pass", found.message


@needs_tilelang
def test_exact_sums_are_exact() -> None:
    point = POINT.format("moe_gemm2", "fp8", "atomic", "f32", "yes") + "-data:coded-launch:graph"
    found = Judge(Settings()).run(parse_case(point), kernel("moe_gemm2"))
    assert (found.state, found.level) == ("pass", "bit-exact"), found.message


@needs_tilelang
def test_every_e4m3_code_is_widened_exactly() -> None:
    import tilelang.language as T

    def program():  # type: ignore[no-untyped-def]
        @T.prim_func
        def widen(raw: T.Tensor((256,), "uint8"), wide: T.Tensor((256,), "float32")):  # type: ignore[no-untyped-def,valid-type]
            with T.Kernel(1) as _:
                for i in T.serial(256):
                    wide[i] = bits.widen("e4m3", raw[i])

        return widen

    compiled = tilelang_build.load("test widen e4m3", "c", program)
    assert compiled is not None
    codes, found = torch.arange(256, dtype=torch.uint8), torch.zeros(256)
    compiled(codes, found)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))


@pytest.mark.parametrize("name", OPERATORS)
def test_fnuz_is_refused_and_order_is_declared(name: str) -> None:
    one = kernel(name)
    assert one.supports is not None and one.route is not None
    params = PARAMS | {"in": "fp8", "mode": "atomic", "out": "f16"}
    assert one.supports(params) is None
    assert "FNUZ" in str(one.supports(params | {"encoding": "fnuz"}))
    with pytest.raises(NotSupported, match="FNUZ"):
        one.route(params | {"encoding": "fnuz"}, arch("gfx942"))
    assert one.repeats(params) and one.repeats(params | {"topk": "9", "mode": "reduce"})
    assert not one.repeats(params | {"topk": "3"})


@pytest.mark.parametrize(("name", "path", "count"), [
    ("cpu", "legacy", 7 * 5), ("gfx1201", "legacy", 7 * 5),  # int8smooth runs int8's code
    ("sm_90", "legacy/tiles", 7 * 5 * 3),  # in three tiles
])
def test_routes_name_what_is_compiled(name: str, path: str, count: int) -> None:
    route = kernel("moe_gemm_2stage").route
    assert route is not None
    found = [route(case.params, arch(name)) for case in official("moe_gemm_2stage")]
    assert {where.path for where in found} == {path} and len({where.config for where in found}) == count


def test_a_forced_program() -> None:
    plain = spec_of("cuda", 2, "bf16", "fp16")
    assert choose(arch("sm_90"), plain, LARGE, "program:loops") is plain
    assert path_of(choose(arch("sm_90"), plain, LARGE, "program:tiles")) == "legacy/tiles"
    assert choose(arch("gfx1201"), plain, LARGE, "program:tiles") is plain
    assert path_of(choose(arch("cpu"), spec_of("c", 2, "bf16", "fp16"), LARGE, "program:tiles")) == "legacy/tiles"
    with pytest.raises(ValueError, match="sets program to 'x'; known: loops, tiles"):
        choose(arch("sm_90"), plain, LARGE, "program:x")


@needs_tilelang
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942", "gfx950"])
def test_generated_code_adds_atomically_in_atomic_mode_only(name: str) -> None:
    one = kernel("moe_gemm2")
    assert one.lower is not None
    for mode, out in (("atomic", "bf16"), ("atomic", "f32"), ("reduce", "f16")):
        lowered = one.lower(PARAMS | {"in": "fp8", "mode": mode, "out": out}, arch(name))
        assert ("AtomicAdd" in lowered.source) == (mode == "atomic")
        tiled = name.startswith("sm")
        assert "int64_t" in lowered.source and lowered.threads == (128 if tiled else 64)
        assert lowered.static_shared == 0 and bool(lowered.dynamic_shared) == tiled
