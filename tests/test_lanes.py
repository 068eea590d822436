"""Lanes without hardware: route, lower and assemble, with compilers that abort, exit, hang, lie, or are missing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import disk_cache
from conformance.arch import Arch, Fact
from conformance.decorator import _REGISTRY
from conformance.disk_cache import hold
from conformance.environment import ABSENT
from conformance.expectations.held import hold as held
from conformance.expectations.rule import Expectation
from conformance.kernel import Kernel
from conformance.lanes import assembly, lowering
from conformance.lanes.resources import beyond, instructions, malformed, unknown_limits, used
from conformance.lanes.take import Lanes
from conformance.registry import ROOT, arch, kernels, matrix
from conformance.result import REJECTED, Result, Settings
from conformance.route import Lowered, Route
from kernels import tilelang_build

OPERATOR = "moe_reduce_fused"
CASES = matrix(OPERATOR).cases("smoke")
needs_tilelang = pytest.mark.skipif(tilelang_build.missing("cpu") is not None, reason="TileLang cannot compile here")
GFX = arch("gfx942")
PRELUDE = """
import os, sys, time
from conformance import NotSupported, kernel
from conformance.route import Lowered, Route

def route(params, arch):
    return Route(params["in"], f"one {params['in']}")
"""
MODULE = """
def lower(params, arch):
    {body}
    return Lowered(arch.language, "gfx942", "__global__ void f() {{}}", {shared}, 16, {threads}, ())

@kernel("moe_reduce_fused", route=route, lower=lower, native=("fp32", "bf16"))
def {name}(x, out):
    raise AssertionError("must not run")
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    disk_cache.cache_dir.cache_clear()
    yield
    disk_cache.cache_dir.cache_clear()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kernel]]:
    """Writes a module of one kernel and imports it; afterwards the kernel is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(_REGISTRY)
    names: list[str] = []

    def make(body: str = "pass", shared: int = 0, threads: int = 64) -> Kernel:
        name = f"lowers_{len(names)}_{tmp_path.name.replace('-', '_')}"
        text = PRELUDE + MODULE.format(body=body, shared=shared, threads=threads, name=name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        names.append(name)
        return kernels(OPERATOR, [name])[0]

    yield make
    _REGISTRY.clear()
    _REGISTRY.update(before)
    for name in names:
        sys.modules.pop(name, None)


def taken(kernel: Kernel, table: Arch = GFX, seconds: float = 60.0, case: int = 0) -> Result:
    return Lanes(Settings(ABSENT, "official", table.name), table, seconds).run(CASES[case], kernel)


# ---- lowering -------------------------------------------------------------------------------------------------------


def test_a_kernel_that_lowers(made: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "toolchains", lambda language: [])
    result = taken(made(shared=1000))
    assert (result.state, result.lane, result.path) == ("pass", "lower", CASES[0].params["in"])
    assert result.stopped == "not assembled: no assembler (neither hipcc nor clang++ is found)"
    assert result.resources is not None
    assert (result.resources["shared_bytes"], result.resources["threads"]) == (1016, 64)


@pytest.mark.parametrize(("body", "kind", "words"), [
    ("os.abort()", "compiler-abort", "SIGABRT"),
    ("print('LLVM ERROR: Cannot select', file=sys.stderr, flush=True); os.abort()", "compiler-abort", "Cannot select"),
    ("os.kill(os.getpid(), 11)", "compiler-abort", "SIGSEGV"),
    ("print('local memory exceeds limit', flush=True); os._exit(1)", "process-exit", "exceeds limit"),
    ("sys.exit(3)", "process-exit", "exit code 3"),
    ("raise RuntimeError('no layout for the fragment')", "refused-by-compiler", "RuntimeError: no layout"),
    ("print('x: error: local memory (131072) exceeds limit (65536)', file=sys.stderr)", "soft-error", "131072"),
])
def test_how_a_compiler_may_end(made: Callable[..., Kernel], body: str, kind: str, words: str) -> None:
    result = taken(made(body))
    assert (result.state, result.kind, result.lane) == ("error", kind, "route")
    assert words in result.message
    assert f"{CASES[0].id} on {result.kernel}: lowering one " in result.message
    assert "gfx942" in result.message


def test_a_compiler_that_hangs_is_ended(made: Callable[..., Kernel]) -> None:
    started = time.monotonic()
    result = taken(made("time.sleep(300)"), seconds=1.0)
    assert (result.state, result.kind) == ("error", "hang")
    assert "after 1 s" in result.message
    assert time.monotonic() - started < 60


def test_a_compiler_ends_with_its_worker(tmp_path: Path) -> None:
    """Also when that is killed: what hangs would run for ever."""
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    (tmp_path / "endless.py").write_text(PRELUDE + MODULE.format(body=body, shared=0, threads=1, name="endless"))
    code = ("from conformance.lanes import lowering; from conformance.registry import kernels; "
            "lowering.lower(kernels('moe_reduce_fused', ['endless'])[0], {'in': 'bf16'}, 'gfx942', 'one', 0)")
    places = os.pathsep.join((str(tmp_path), str(ROOT)))
    worker = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": places})
    try:
        assert until(lambda: pid.exists() and pid.read_text() != "")
    finally:
        worker.kill()
        worker.wait()
    assert until(lambda: not running(int(pid.read_text())))


def until(held: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not held() and time.monotonic() < end:
        time.sleep(0.1)
    return held()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("answer", "words"), [
    ("None", "returned NoneType, a Lowered is required"),
    ("Lowered('hip', 'gfx942', 's', '1', 0, 64)", "dynamic_shared = '1': a whole number"),
    ("Lowered('hip', 'gfx942', 's', 0, -1, 64)", "static_shared = -1"),
    ("Lowered('hip', 'gfx942', 's', 0, 0, float('nan'))", "threads = nan"),
    ("Lowered('hip', 'gfx942', ' ', 0, 0, 64)", "no source"),
    ("Lowered('hip', 'gfx942', chr(0xD800), 0, 0, 64)", "cannot be encoded"),
    ("Lowered('hip', 'gfx942', 's', 0, 0, 64, (3,))", "includes = (3,)"),
    ("Lowered('hip', 'gfx950', 's', 0, 0, 64)", "code for hip 'gfx950', gfx942 takes hip 'gfx942'"),
    ("Lowered('cuda', 'sm_90', 's', 0, 0, 64)", "code for cuda 'sm_90', gfx942 takes hip 'gfx942'"),
])
def test_an_answer_that_is_no_code_for_the_architecture(made: Callable[..., Kernel], answer: str, words: str) -> None:
    result = taken(made(f"return {answer}"))
    assert (result.state, result.kind, result.lane) == ("error", "soft-error", "route")
    assert words in result.message


def test_features_of_a_target_do_not_matter(made: Callable[..., Kernel]) -> None:
    result = taken(made("return Lowered('hip', 'gfx942:xnack-', 's', 0, 0, 64)"))
    assert result.lane != "route", result.message


def test_a_compiler_leaves_nothing_behind(made: Callable[..., Kernel]) -> None:
    taken(made("open('left_behind.txt', 'w').close()"))
    assert not (ROOT / "left_behind.txt").exists()
    assert not Path("left_behind.txt").exists()


def test_a_kernel_that_refuses_while_lowering(made: Callable[..., Kernel]) -> None:
    result = taken(made("raise NotSupported('needs wave 32')"))
    assert (result.state, result.kind) == ("not-run", "refused")
    assert "needs wave 32" in result.message


@pytest.mark.parametrize(("shared", "threads", "words"), [
    (65536 - 16, 1024, ""), (65536 - 15, 64, "65537 bytes of shared memory in a block, gfx942 has 65536"),
    (0, 1025, "1025 threads in a block, gfx942 has 1024"),
])
def test_limits_of_the_architecture(made: Callable[..., Kernel], shared: int, threads: int, words: str) -> None:
    result = taken(made(shared=shared, threads=threads))
    assert (result.state == "pass") == (not words)
    assert words in result.message
    if words:
        assert (result.kind, result.lane) == ("soft-error", "lower")
        assert result.resources is not None  # the page shows them beside the limit


def test_an_unknown_limit_limits_nothing_and_is_named(made: Callable[..., Kernel]) -> None:
    bare = Arch("gfx942", language="hip", target={"kind": "hip", "mcpu": "gfx942"})
    result = taken(made(shared=10**9), bare)
    assert result.state == "pass"
    assert result.resources is not None
    assert result.resources["unknown_limits"] == list(unknown_limits(bare)) == ["shared_bytes", "threads"]


def test_one_configuration_is_lowered_once_and_kept(made: Callable[..., Kernel], tmp_path: Path) -> None:
    log = tmp_path / "log"
    kernel = made(f"open({str(log)!r}, 'a').write('x')")
    lanes = Lanes(Settings(ABSENT, "official", "gfx942"), GFX, 60.0)
    fp32 = [case for case in CASES if case.params["in"] == "fp32"]
    assert {lanes.run(case, kernel).lane for case in fp32[:9]} == {"lower"}
    assert taken(kernel, case=CASES.index(fp32[0])).lane == "lower"  # another process would find it on disk as well
    assert log.read_text() == "x"


def test_a_damaged_entry_of_the_cache_is_made_again(made: Callable[..., Kernel]) -> None:
    kernel = made()
    assert taken(kernel).lane == "lower"
    (entry,) = (disk_cache.cache_dir() / "lowered").glob("*.json")
    whole = entry.read_text()
    for damage in ("", whole[:40], whole[:80], "{}", "[1]", '{"source": "x"}', '{"kind": 5, "message": null}',
                   whole.replace('"threads": 64', '"threads": "64"'), whole.replace('"threads": 64', '"threads": 96')):
        assert damage != whole
        entry.write_text(damage)
        assert taken(kernel).lane == "lower"
        assert entry.read_text() == whole


def test_an_abort_is_not_kept(made: Callable[..., Kernel], tmp_path: Path) -> None:
    flag = tmp_path / "worse"
    kernel = made(f"os.path.exists({str(flag)!r}) and os.abort()")
    flag.touch()
    assert taken(kernel).kind == "compiler-abort"
    flag.unlink()
    assert taken(kernel).lane == "lower"


def test_configurations_ahead(made: Callable[..., Kernel]) -> None:
    kernel = made()
    lanes = Lanes(Settings(ABSENT, "official", "gfx942"), GFX, 60.0)
    steps = lanes.ahead((case, kernel) for case in CASES)
    assert len(steps) == 2  # one for each dtype of x
    with hold(disk_cache.cache_dir() / "locks", f"ahead {OPERATOR} {kernel.name} one fp32 gfx942"):
        for step in steps:
            step()
    assert len(list((disk_cache.cache_dir() / "lowered").glob("*.json"))) == 1  # the other one is another worker's


# ---- no further than it goes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "words"), [
    ("raise RuntimeError('boom')", "RuntimeError: boom"), ("sys.exit(3)", "SystemExit: 3"),
    ("return None", "returned None: a Route is required"), ("return Route(None)", "returned Route(path=None"),
    ("return Route('fp32', ['one'])", "config=['one']"), ("return Route('rejected')", "nor 'rejected'"),
])
def test_a_route_that_goes_wrong_is_the_error_of_its_cases(made: Callable[..., Kernel], body: str, words: str) -> None:
    def route(params: object, table: Arch) -> object:
        names: dict[str, object] = {"Route": Route, "sys": sys}
        exec(f"def answer():\n    {body}", names)
        return names["answer"]()  # type: ignore[operator]

    kernel = replace(made(), route=route)  # type: ignore[arg-type]
    result = taken(kernel)
    assert (result.state, result.kind, result.lane, result.path) == ("error", "exception", "route", None)
    assert words in result.message
    assert Lanes(Settings(ABSENT, "official", "gfx942"), GFX, 60.0).ahead([(CASES[0], kernel)]) == []


def test_a_kernel_without_a_route_is_not_run_and_says_so() -> None:
    silent = Kernel("silent", OPERATOR, lambda x, out: None, "published")
    result = taken(silent)
    assert (result.state, result.lane) == ("not-run", "route")
    assert "says nothing" in result.message and "route=" in result.message


def test_an_architecture_without_a_target_is_routed_only(made: Callable[..., Kernel]) -> None:
    result = taken(made(), arch("c500"))
    assert (result.state, result.lane, result.stopped) == (
        "pass", "route", "not lowered: TileLang has no target for c500")


def test_plain_pytorch_has_nothing_to_lower() -> None:
    result = taken(kernels(OPERATOR, ["vectorised"])[0])
    assert (result.state, result.lane) == ("pass", "route")
    assert result.stopped.startswith("nothing to lower")


def test_what_runs_on_the_cpu_only_is_not_routed_to_a_gpu() -> None:
    result = taken(Kernel("local", OPERATOR, lambda x, out: None, "published", devices=("cpu",)))
    assert (result.state, result.message) == ("not-run", "local runs on cpu")


# ---- the state of a failure that was declared -----------------------------------------------------------------------

DECLARED = Expectation("known-failure", failure="compiler-abort", signature="SIGABRT", lane="lower", match={},
                       reason="the intrinsic is missing", where="f.toml:1")


def test_a_declared_abort_is_expected_and_its_absence_fails(made: Callable[..., Kernel]) -> None:
    bad, good = made("os.abort()"), made()
    result = held(taken(bad), bad, GFX, [DECLARED])
    assert (result.state, result.kind) == ("expected", "compiler-abort")
    assert "the intrinsic is missing" in result.message
    result = held(taken(good), good, GFX, [DECLARED])
    assert (result.state, result.kind) == ("fail", "unexpected-pass")
    assert "f.toml:1" in result.message
    exits = made("os._exit(1)")
    result = held(taken(exits), exits, GFX, [DECLARED])
    assert (result.state, result.kind) == ("error", "other-failure")


def test_the_word_for_a_permitted_refusal_is_no_path_to_hide_behind(made: Callable[..., Kernel]) -> None:
    kernel = made()
    ran = replace(taken(kernel), lane="execute", path=REJECTED)
    assert held(ran, kernel, GFX, ()).kind == "silent-fallback"
    refused = replace(ran, message="rejected, as the contract allows: strides")
    assert held(refused, kernel, GFX, ()) == refused


def test_a_fallback_that_nothing_declares(made: Callable[..., Kernel]) -> None:
    kernel = made()
    result = taken(kernel)
    strict = Kernel(kernel.name, OPERATOR, kernel.function, "published", route=kernel.route, lower=kernel.lower)
    found = held(result, strict, GFX, ())
    assert (found.state, found.kind) == ("fail", "silent-fallback")
    assert "@kernel(native=...)" in found.message
    assert held(result, kernel, GFX, ()).state == "pass"


# ---- what code uses -------------------------------------------------------------------------------------------------


def lowered_gemm(name: str) -> Lowered:
    """A small TileLang GEMM with a pipeline and an atomic epilogue, lowered here and now."""
    from lowered_gemm import program

    from kernels import tilelang_lower

    return tilelang_lower.lower(program, arch(name))


@needs_tilelang
@pytest.mark.parametrize(("name", "found", "missing"), [
    ("sm_80", {"mma.sync", "cp.async", "ldmatrix"}, {"wgmma", "TMA", "mfma"}),
    ("sm_90", {"wgmma", "TMA"}, {"mma.sync", "mfma", "cp.async"}),
    ("gfx942", {"mfma"}, {"wgmma", "TMA", "mma.sync"}),
])
def test_instructions_of_real_code(name: str, found: set[str], missing: set[str]) -> None:
    code = lowered_gemm(name)
    names = set(instructions(code.source))
    assert found <= names
    assert not missing & names
    assert "atomic add" in names or "packed atomic add" in names
    uses = used(code)
    assert uses["shared_bytes"] >= 2 * 2 * 64 * 32  # two tiles of bf16
    assert uses["threads"] in (128, 256)
    assert beyond(uses, arch(name)) is None


@needs_tilelang
@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_our_kernels_lower_for_every_architecture(name: str) -> None:
    e4m3 = next(case for case in CASES if case.params["out"] == "e4m3")
    for kernel in kernels(OPERATOR, ["h_tiled", "per_token"]):
        assert kernel.lower is not None and kernel.route is not None
        code = kernel.lower(e4m3.params, arch(name))
        converted = "fp8 conversion" in instructions(code.source)
        assert converted == (not kernel.route(e4m3.params, arch(name)).path.endswith("/bits"))
        assert "fused multiply-add" in instructions(code.source)


def test_the_lowest_of_all_is_enough_for_a_fact() -> None:
    table = Arch("x", facts={"shared_bytes": Fact(100, "s"), "threads": Fact(32, "s")})
    both = beyond({"shared_bytes": 101, "threads": 33}, table)
    assert both is not None and "shared memory" in both and "threads" in both
    assert lowering._first_line(ValueError("\n\n  what it is\nmore")) == "what it is"


def test_a_cache_that_cannot_be_used_costs_time_only(made: Callable[..., Kernel], tmp_path: Path) -> None:
    disk_cache.cache_dir().joinpath("locks").write_text("")
    assert taken(made()).state == "pass"


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file"))
    disk_cache.cache_dir.cache_clear()
    assert disk_cache.cache_dir().is_dir()


def test_a_lock_is_free_again_after_its_holder(tmp_path: Path) -> None:
    with hold(tmp_path, "one") as first, hold(tmp_path, "one", wait=False) as second:
        assert (first, second) == (True, False)
    with hold(tmp_path, "one", wait=False) as third:
        assert third is True


def test_results_carry_their_lane_into_the_records() -> None:
    fields = taken(kernels(OPERATOR, ["vectorised"])[0]).record()
    assert {"lane", "stopped", "expected", "resources", "path"} <= set(fields)


@pytest.mark.parametrize(("source", "said"), [
    ("a = make_uint4(z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z);", "make_uint4(...) is given 16 elements"),
    ("a = make_uint4(f(x, y), make_uint2(1, 2).x, b[i, j], c); d = make_float2(1, {1, 2});", None),
    ("a = make_bfloat162(x);", "make_bfloat162(...) is given 1 elements"),
    ("make_coord4(1, 2)", None),
    ("a = make_uint4(x, y", "is given 2 elements"),
])
def test_code_that_no_compiler_takes(source: str, said: str | None) -> None:
    found = malformed(source)
    assert found is None if said is None else said in str(found)
