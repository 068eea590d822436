"""The tiled kernel of two-stage MoE: the whole program but the matrix instruction on the CPU, where it runs in plain
loops; what it would run elsewhere; and the code that is generated for GPUs."""

from __future__ import annotations

import re

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, official, prepared, verdict

from conformance import Kernel
from conformance.arch import Arch, Fact
from conformance.case import parse_case
from conformance.errors import NotSupported
from conformance.judging.judge import Judge
from conformance.lanes.resources import used
from conformance.registry import arch, archs, kernels
from conformance.result import Settings
from kernels import tilelang_build
from kernels.gemm_2stage import launching
from kernels.gemm_2stage.launching import spec_of
from kernels.gemm_2stage.legacy_template import IN_DTYPES, Spec
from kernels.gemm_2stage.pipelined import choose, path_of
from kernels.gemm_2stage.tiles import DECODE, LARGE, MEDIUM, SMALL, Tiled, class_of, smaller

MISSING = tilelang_build.missing("cpu")
needs_tilelang = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
POINT = "{}/F/tokens:21-hidden:96-inter:64-experts:6-topk:3-bm:16-in:{}-mode:{}-out:{}-mask:{}"
PARAMS = {"tokens": "333", "hidden": "4096", "inter": "2048", "experts": "17", "topk": "9", "bm": "64", "mask": "no"}
pytestmark = pytest.mark.usefixtures("one_thread")


def kernel(name: str) -> Kernel:
    return kernels(name, ["pipelined"])[0]


@needs_tilelang
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16", "int8smooth", "int4", "int4_bf16", "int4_bf16_g32"])
def test_both_stages_are_right_end_to_end(dtype: str) -> None:
    judge = Judge(Settings())
    for mode, out, mask in (("atomic", "f16", "no"), ("reduce", "f16", "yes")):
        case = parse_case(POINT.format("moe_gemm_2stage", dtype, mode, out, mask))
        found = judge.run(case, kernel("moe_gemm_2stage"))
        assert (found.state, found.path) == ("pass", "pipelined/loops"), found.message


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
@pytest.mark.parametrize(("size", "block", "dtype"), [
    (DECODE, 16, "int4"), (MEDIUM, 96, "fp8"), (LARGE, 64, "bf16"), (LARGE, 128, "int4_bf16_g32")])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_tile_is_right_past_its_edges(size: str, block: int, dtype: str, stage: int) -> None:
    """Sums and channels that are no multiple of a step or a tile, padding in every block, tiles that are padding only,
    masked experts; NaN wherever nothing may be read. The C target runs tiles of other sizes when they are given."""
    operator = f"moe_gemm{stage}"
    extents = f"tokens:37-hidden:160-inter:96-experts:5-topk:3-bm:{block}"
    call, reference = prepared(f"{operator}/F/{extents}-in:{dtype}-mode:atomic-out:f16-mask:yes")
    given = call.arguments
    lists = tuple(given[name] for name in ("sorted_token_ids", "sorted_expert_ids", "sorted_weights", "num_valid_ids"))
    out = torch.full(call.output.shape, float("nan"), dtype=torch.float16)
    picked: list[Spec] = []

    def pick(plain: Spec, block: int, slots: int, experts: int) -> Spec:
        picked.append(Tiled("c", plain.stage, plain.in_dtype, plain.result, plain.how, size))
        return picked[-1]

    shape = tuple(given["topk_ids"].shape)
    if stage == 1:
        launching.stage1(pick, given["x"], given["w1"], given["scale_x"], given["scale_w1"], lists, block, shape, dtype,
                         out)
    else:
        rows = given["a2"].view(-1, given["a2"].shape[-1])
        launching.stage2(pick, rows, given["w2"], given["scale_a2"], given["scale_w2"], lists, block, shape, dtype,
                         "atomic", out)
    assert picked == [Tiled("c", stage, dtype, "fp16", "store" if stage == 1 else "add", size)]
    found = verdict(out, call, reference)
    assert found.passed, found


def test_classes_of_shapes() -> None:
    assert class_of(16, 8, 128) == class_of(48, 64, 256) == DECODE  # decode: T 1 and 8, k 8
    assert class_of(16, 128, 4) == class_of(48, 99, 5) == SMALL
    assert class_of(32, 258, 8) == class_of(96, 1, 8) == MEDIUM
    assert {class_of(block, 333 * 9, 17) for block in (64, 128, 192, 256)} == {LARGE}
    for block in range(16, 257, 16):
        for slots in (8, 1000):
            names = smaller(class_of(block, slots, 128))
            assert all(block % Tiled("cuda", 1, "bf16", "fp16", size=name).tile.rows == 0 for name in names)


def test_routes_by_architecture() -> None:
    """Every dtype on every architecture that has a table: the path, and a program that fits."""
    paths: dict[str, set[str]] = {}
    for table in archs().values():
        for dtype in IN_DTYPES:
            for stage in (1, 2):
                found = choose(table, spec_of(table.language, stage, dtype, "fp16", "atomic"), LARGE)
                paths.setdefault(table.name, set()).add(path_of(found))
                room = table.limit("shared_bytes")
                if isinstance(found, Tiled) and room is not None and table.language != "c":
                    assert found.shared_bytes <= room, found
    assert paths.pop("cpu") == {"pipelined/loops"}
    for name in ("gfx90a", "gfx942", "gfx950"):  # vectors of 8-bit zeros do not compile there
        assert paths.pop(name) == {"pipelined", "legacy"}
    for name in ("gfx1201", "gfx1250", "gfx936", "gfx946", "c500"):
        assert paths.pop(name) == {"legacy"}
    assert all(found == {"pipelined"} for found in paths.values()) and len(paths) == 6


def test_a_smaller_tile_where_shared_memory_is_short_and_legacy_where_none_fits() -> None:
    plain = spec_of("cuda", 1, "bf16", "fp16")

    def with_room(size: int) -> Spec:
        facts = {"shared_bytes": Fact(size, "a test"), "mma": Fact({"bf16 16x8x16 f32": True}, "a test")}
        return choose(Arch("some", language="cuda", facts=facts), plain, LARGE)

    sizes = [found.size for found in map(with_room, (100_000, 50_000, 40_000)) if isinstance(found, Tiled)]
    assert sizes == [LARGE, MEDIUM, SMALL]
    assert with_room(30_000) is plain


@pytest.mark.parametrize("name", OPERATORS)
def test_fnuz_is_refused_and_order_is_declared(name: str) -> None:
    one = kernel(name)
    assert one.supports is not None and one.route is not None
    params = PARAMS | {"in": "fp8", "mode": "atomic", "out": "f16"}
    assert one.supports(params) is None
    with pytest.raises(NotSupported, match="FNUZ"):
        one.route(params | {"encoding": "fnuz"}, arch("gfx942"))
    assert one.repeats(params | {"mode": "reduce"}) and one.repeats(params | {"topk": "2"}) and not one.repeats(params)


def test_official_shapes_take_the_tile_of_their_class() -> None:
    route = kernel("moe_gemm_2stage").route
    assert route is not None
    found = {case.params["shape"]: route(case.params, arch("sm_90")) for case in official("moe_gemm_2stage")}
    assert {where.path for where in found.values()} == {"pipelined"}
    tiles = {shape: re.findall(r"tile:(\w+)", where.config)[-1] for shape, where in found.items()}
    assert tiles == {"S": "S", "M": "M", "L": "L", "FP4_S": "M", "FP4_M": "L", "FP4_L": "L"}


@needs_tilelang
@pytest.mark.parametrize(("name", "dtype", "out", "mode", "has"), [
    ("sm_90", "fp8", "bf16", "atomic", {"mma.sync", "cp.async", "ldmatrix", "packed atomic add"}),
    ("sm_80", "int4", "f16", "reduce", {"mma.sync", "cp.async", "ldmatrix"}),
    ("gfx942", "bf16", "f16", "reduce", {"mfma"}),
])
def test_generated_code_uses_tensor_cores(name: str, dtype: str, out: str, mode: str, has: set[str]) -> None:
    one = kernel("moe_gemm2")
    assert one.lower is not None
    lowered = one.lower(PARAMS | {"in": dtype, "mode": mode, "out": out}, arch(name))
    uses = used(lowered)
    assert has <= set(uses["instructions"]) and not {"wgmma", "TMA"} & set(uses["instructions"])
    assert ("AtomicAdd" in lowered.source) == (mode == "atomic") and "int64_t" in lowered.source
    spec = choose(arch(name), spec_of(arch(name).language, 2, dtype, "bf16" if out == "bf16" else "fp16", mode), LARGE)
    assert isinstance(spec, Tiled) and uses["shared_bytes"] == spec.shared_bytes
    assert uses["threads"] == spec.tile.threads
    lines = lowered.source.splitlines()
    adds = [number for number, line in enumerate(lines) if "AtomicAdd" in line]
    assert len(adds) == (mode == "atomic")  # padding and channels past the end are left out, not sent elsewhere
    for number in adds:
        assert re.search(r"if \(\(0 <= .*< out_tiles\)", lines[number - 1]), lines[number - 1]
