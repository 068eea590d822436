"""Assemblers: where they are found, which of them decides, and what they lack is never a pass nor the code's fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import disk_cache
from conformance.lanes import assembly, process_group, search
from conformance.lanes.assembly import Assembled, NotAssembled, assemble
from conformance.route import Failure, Lowered

CODE = Lowered("cuda", "sm_90a", "// code\n", 1024, 0, 128)
HIP = Lowered("hip", "gfx942", "// code\n", 0, 0, 64)
Tool = Callable[..., str]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which makes a library here")

# Stands for NVRTC: takes every kernel but one with the word "refuse", and answers with its options and the source.
NVRTC = r"""
#include <stdio.h>
#include <string.h>
static char source[4096], made[8192], said[256];
int nvrtcCreateProgram(void **p, const char *text, const char *n, int h, void *a, void *b)
{ snprintf(source, sizeof source, "%s", text); *p = source; return 0; }
int nvrtcCompileProgram(void *p, int count, const char **options)
{
  said[0] = 0;
  strcpy(made, ".version 9.0 ");
  for (int i = 0; i < count; i++) { strcat(made, options[i]); strcat(made, " "); }
  strcat(made, source);
  if (strstr(source, "refuse")) { strcpy(said, "kernel.cu(1): error: refused"); return 6; }
  if (strstr(made, "compute_999")) { strcpy(said, "nvrtc: error: invalid value for --gpu-arch"); return 5; }
  return 0;
}
int nvrtcGetProgramLogSize(void *p, unsigned long *n) { *n = strlen(said) + 1; return 0; }
int nvrtcGetProgramLog(void *p, char *text) { strcpy(text, said); return 0; }
int nvrtcGetPTXSize(void *p, unsigned long *n) { *n = strlen(made) + 1; return 0; }
int nvrtcGetPTX(void *p, char *text) { strcpy(text, made); return 0; }
"""


@pytest.fixture(autouse=True)
def nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and a machine on which only what a test puts there is found."""
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    disk_cache.cache_dir.cache_clear()
    for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HIP_PATH", "HIP_CLANG_PATH"):
        monkeypatch.delenv(name, raising=False)
    for place in ("CUDA", "ROCM", "LLVM"):
        monkeypatch.setattr(search, place, tmp_path / place.lower())
    monkeypatch.setattr(search, "package_folders", lambda name: [])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(assembly, "_refused", {})
    yield
    disk_cache.cache_dir.cache_clear()


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Writes a program; a shell script that is told what it reads: $input, and $text, what stands in it."""

    def put(name: str, body: str = "", folder: str = "path") -> str:
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        script = ('PATH=/bin:/usr/bin; [ "$1" = --version ] && { echo "$0"; cat "$0"; exit 0; }\n'
                  'for input in "$@"; do :; done; text=$(cat "$input" 2>/dev/null)\n')
        file.write_text(f"#!/bin/sh\n{script}{body}\n")
        file.chmod(0o755)
        return str(file)

    return put


# A probe is a kernel that does nothing; only what a test is about stands in "// code".
FOR_CODE = 'case "$text" in *"// code"*) {body};; esac'


# ---- what an assembler says -----------------------------------------------------------------------------------------


def test_what_nvcc_says_is_read(tool: Tool) -> None:
    tool("nvcc", 'echo "ptxas info : 8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads" >&2; '
                 'echo "ptxas info : Used 71 registers, 48 bytes smem, 400 bytes cmem[0]" >&2')
    assert assemble(CODE, 30.0) == Assembled({"registers": 71, "spill_bytes": 12, "static_shared": 48}, "nvcc")


def test_the_largest_of_several_kernels_counts(tool: Tool) -> None:
    tool("nvcc", 'echo "Used 71 registers"; echo "Used 128 registers"; echo "Used 9 registers"')
    assert assemble(CODE, 30.0) == Assembled({"registers": 128}, "nvcc")


@pytest.mark.parametrize(("body", "kind", "words"), [
    ('echo "k.cu(3): error: too much shared data" >&2; exit 2', "refused-by-compiler", "too much shared data"),
    ('echo noise; echo "ptxas fatal : no way" >&2; exit 2', "refused-by-compiler", "nvcc: ptxas fatal : no way"),
    ("kill -ABRT $$", "compiler-abort", "signal 6"),
    ("exec sleep 60", "hang", "after 1 s"),
])
def test_code_that_an_assembler_does_not_take(tool: Tool, body: str, kind: str, words: str) -> None:
    tool("nvcc", FOR_CODE.format(body=body))
    found = assemble(CODE, 1.0)
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert words in found.message


def test_the_time_limit_is_that_of_all_steps(tool: Tool) -> None:
    body = 'case "$input" in *.hip) sleep 1; cp "$input" "${input%hip}s";; *) exec sleep 60;; esac'
    tool("clang++", FOR_CODE.replace("{body}", body))
    started = time.monotonic()
    found = assemble(HIP, 2.0)
    assert isinstance(found, Failure)
    assert found.kind == "hang"
    assert time.monotonic() - started < 20


def test_nothing_that_a_compiler_started_outlives_its_time_limit(tool: Tool, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = tool("slow", f"sleep 300 & echo $! > {pid}; wait")
    status, _ = process_group.run([program], 1.0, tmp_path)
    assert status is None
    assert until(lambda: not Path(f"/proc/{int(pid.read_text())}").exists() or zombie(int(pid.read_text())))


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(held: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not held() and time.monotonic() < end:
        time.sleep(0.05)
    return held()


def test_what_was_taken_is_kept_for_one_version(tool: Tool) -> None:
    tool("nvcc", 'echo "Used 10 registers"')
    assert assemble(CODE, 30.0) == Assembled({"registers": 10}, "nvcc")
    assembly._version.cache_clear()
    tool("nvcc", 'echo "Used 20 registers"')  # another version, as it says itself
    assert assemble(CODE, 30.0) == Assembled({"registers": 20}, "nvcc")
    for entry in (disk_cache.cache_dir() / "assembled").glob("*.json"):
        entry.write_text("damaged")
    assert assemble(CODE, 30.0) == Assembled({"registers": 20}, "nvcc")
    for entry in (disk_cache.cache_dir() / "assembled").glob("*.json"):
        entry.write_text(entry.read_text().replace("20", "99"))  # well-formed, and wrong
    assert assemble(CODE, 30.0) == Assembled({"registers": 20}, "nvcc")


# ---- what an assembler lacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "words"), [
    (CODE, "no assembler (nvcc is not found, nor ptxas together with NVRTC)"),
    (HIP, "no assembler (neither hipcc nor clang++ is found)"),
    (replace(CODE, language="maca"), "no assembler is known for maca"),
])
def test_no_assembler_is_no_pass(code: Lowered, words: str) -> None:
    assert assemble(code, 30.0) == NotAssembled(words)


def test_ptxas_alone_takes_no_cuda(tool: Tool) -> None:
    tool("ptxas", 'echo "Used 1 registers"')
    assert assemble(CODE, 30.0) == NotAssembled("no assembler (nvcc is not found, nor ptxas together with NVRTC)")


@pytest.mark.parametrize(("name", "code", "said"), [
    ("nvcc", CODE, "nvcc fatal   : Unsupported gpu architecture 'compute_90a'"),
    ("nvcc", CODE, "nvcc fatal   : Value 'sm_90a' is not defined for option 'gpu-architecture'"),
    ("hipcc", HIP, "clang: error: invalid target ID 'gfx942'; format is a processor name followed by ..."),
    ("hipcc", HIP, "clang++: error: unsupported HIP gpu architecture: gfx942"),
])
def test_a_target_that_an_assembler_does_not_know_is_no_failure(tool: Tool, name: str, code: Lowered, said: str
                                                                ) -> None:
    tool(name, f'echo "{said}" >&2; exit 1')
    assert assemble(code, 30.0) == NotAssembled(f"{name} does not know {code.target}")


def test_an_assembler_that_knows_nothing_is_asked_once_by_a_process(tool: Tool, tmp_path: Path) -> None:
    tool("nvcc", f'echo x >> {tmp_path}/asked; echo "nvcc fatal : Unsupported gpu architecture" >&2; exit 1')
    for text in ("// one\n", "// two\n"):
        assert isinstance(assemble(replace(CODE, source=text), 30.0), NotAssembled)
    assert (tmp_path / "asked").read_text() == "x\n"
    assembly._refused.clear()  # as in the next run, before which it may have been mended
    tool("nvcc", 'echo "Used 10 registers"')
    assert assemble(CODE, 30.0) == Assembled({"registers": 10}, "nvcc")


def test_headers_that_an_assembler_lacks_are_not_the_codes_fault(tool: Tool) -> None:
    tool("nvcc", 'case "$text" in *lacking.h*) echo "k.cu:1: fatal error: lacking.h: No such file" >&2; exit 1;; '
                 '*"// wrong"*) echo "k.cu:2: error: wrong" >&2; exit 1;; esac')
    lacks = replace(CODE, source="#include <lacking.h>\n// wrong\n")
    assert assemble(lacks, 30.0) == NotAssembled(
        "what the code includes: nvcc: k.cu:1: fatal error: lacking.h: No such file")
    for wrong in ("#include <there.h>\n// wrong\n", "// wrong\n"):
        found = assemble(replace(CODE, source=wrong), 30.0)
        assert found == Failure("refused-by-compiler", "nvcc: k.cu:2: error: wrong")


def test_the_next_one_decides_where_the_first_knows_too_little(tool: Tool) -> None:
    tool("hipcc", 'echo "clang: error: invalid target ID" >&2; exit 1')
    tool("clang++", "exit 1", "llvm/llvm-14/bin")  # broken
    tool("clang++", 'echo "VGPRs: 12"; echo "    VGPRs Spill: 3"; echo "LDS Size [bytes/block]: 256"',
         "llvm/llvm-22/bin")
    assert assemble(HIP, 30.0) == Assembled({"registers": 12, "spill_bytes": 3, "static_shared": 256}, "clang++")


def test_a_clang_without_rocm_takes_code_that_needs_none(tool: Tool) -> None:
    tool("clang++", 'case "$*" in *nogpulib*|*assembler*) ;; *) echo "error: cannot find ROCm device library" >&2; '
                    'exit 1;; esac; case "$text" in *hip_runtime*) '
                    "echo \"fatal error: 'hip/hip_runtime.h' file not found\" >&2; exit 1;; esac; echo \"VGPRs: 12\"")
    assert assemble(HIP, 30.0) == Assembled({"registers": 12}, "clang++ without ROCm")
    needs = assemble(replace(HIP, source="#include <hip/hip_runtime.h>\n// code\n"), 30.0)
    assert needs == NotAssembled(
        "for gfx942: clang++: error: cannot find ROCm device library; what the code includes: clang++ without ROCm: "
        "fatal error: 'hip/hip_runtime.h' file not found")


def test_clang_compiles_for_the_target_and_then_assembles(tool: Tool, tmp_path: Path) -> None:
    tool("clang++", f'echo "$*" >> {tmp_path}/asked; echo "VGPRs: 1"')
    assemble(replace(HIP, target="gfx942:xnack-"), 30.0)
    compiled, assembled = (tmp_path / "asked").read_text().splitlines()[-2:]
    assert "-x hip --offload-arch=gfx942:xnack- --offload-device-only" in compiled
    assert compiled.split()[-4] == "-S"
    assert "--target=amdgcn-amd-amdhsa -mcpu=gfx942 -c" in assembled


# ---- NVRTC and ptxas ------------------------------------------------------------------------------------------------


@pytest.fixture
def nvrtc(tmp_path: Path) -> Path:
    """A library as Python packages bring it, beside headers: below tmp_path/nvidia/cu13."""
    home = tmp_path / "nvidia" / "cu13"
    (home / "lib").mkdir(parents=True)
    (home / "include" / "cccl").mkdir(parents=True)
    source = tmp_path / "nvrtc.c"
    source.write_text(NVRTC)
    library = home / "lib" / "libnvrtc.so.13"
    compiler = shutil.which("cc", path="/usr/bin:/bin:/usr/local/bin")
    subprocess.run([str(compiler), "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True,
                   env=os.environ | {"PATH": "/usr/bin:/bin"})
    return library


def packages(monkeypatch: pytest.MonkeyPatch, **folders: Path) -> None:
    monkeypatch.setattr(search, "package_folders", lambda name: [folders[name]] if name in folders else [])


@needs_compiler
def test_nvrtc_makes_the_ptx_that_ptxas_takes(
    tool: Tool, nvrtc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(monkeypatch, nvidia=tmp_path / "nvidia", triton=tmp_path / "triton")
    old = 'echo "ptxas k.ptx, line 9; fatal : Unsupported .version 9.0; current version is 8.8"; exit 1'
    tool("ptxas", old, "triton/backends/nvidia/bin")
    tool("ptxas-blackwell", f'cp "$input" {tmp_path}/made.ptx; echo "Used 33 registers, 16 bytes smem"',
         "triton/backends/nvidia/bin")
    code = replace(CODE, includes=("/some/where",), nvrtc_header="first.h")
    assert assemble(code, 30.0) == Assembled({"registers": 33, "static_shared": 16}, "NVRTC + ptxas")
    made = (tmp_path / "made.ptx").read_text()
    include = tmp_path / "nvidia" / "cu13" / "include"
    assert made.split() == [
        ".version", "9.0", "--gpu-architecture=compute_90a", "-std=c++17", "-default-device", "--pre-include=first.h",
        "-I/some/where", f"-I{include}", f"-I{include / 'cccl'}", "//", "code"]


@needs_compiler
def test_what_nvrtc_does_not_take(tool: Tool, nvrtc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, nvidia=tmp_path / "nvidia")
    tool("ptxas", 'echo "Used 1 registers"')
    assert assemble(replace(CODE, source="refuse"), 30.0) == Failure(
        "refused-by-compiler", "NVRTC + ptxas: kernel.cu(1): error: refused")
    assert assemble(replace(CODE, target="sm_999"), 30.0) == NotAssembled("NVRTC + ptxas does not know sm_999")
    nvrtc.write_text("no library")
    assembly._version.cache_clear()
    found = assemble(CODE, 30.0)
    assert isinstance(found, NotAssembled)
    assert "for sm_90a: NVRTC + ptxas: nvrtc: error:" in found.reason


# ---- where they are found -------------------------------------------------------------------------------------------


def test_the_order_of_places(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [tool(name, folder=folder) for name, folder in (
        ("ptxas", "home/bin"), ("ptxas", "other/bin"), ("ptxas", "path"), ("ptxas", "nvidia/cu13/bin"),
        ("ptxas", "nvidia/cu12/bin"), ("ptxas", "cuda/bin"), ("ptxas", "triton/backends/nvidia/bin"),
        ("ptxas-blackwell", "triton/backends/nvidia/bin"))]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "other"))
    packages(monkeypatch, nvidia=tmp_path / "nvidia", triton=tmp_path / "triton")
    assert search.ptxas() == wanted
    assert search.nvcc() == []


def test_the_order_of_clangs(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [tool(name, folder=folder) for name, folder in (
        ("amdclang++", "home/llvm/bin"), ("clang++", "path"), ("clang++", "rocm/llvm/bin"),
        ("clang++", "llvm/llvm-22/bin"), ("clang++", "llvm/llvm-9/bin"))]
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "home"))
    assert search.clang() == wanted


def test_a_program_that_two_places_name_is_one(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tool("nvcc", folder="home/bin")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "nvcc").symlink_to(real)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert search.nvcc() == [real]


def test_libraries_of_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.12", "libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.9", "libnvrtc.so.12.9.86"):
        (folder / name).write_text(name)
    packages(monkeypatch, nvidia=tmp_path / "nvidia")
    assert search.nvrtc() == [str(folder / "libnvrtc.so.12")]


def test_packages_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for part in ("one", "two"):  # a namespace, as NVIDIA's packages share one
        (tmp_path / part / "shared_namespace").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / part)
    (tmp_path / "one" / "explodes").mkdir()
    (tmp_path / "one" / "explodes" / "__init__.py").write_text("raise SystemExit")
    assert {place.parent.name for place in search.package_folders("shared_namespace")} == {"one", "two"}
    assert search.package_folders("explodes") == [tmp_path / "one" / "explodes"]
    assert "explodes" not in sys.modules
    assert search.package_folders("no_such_package") == []


# ---- the real ones, where they are ----------------------------------------------------------------------------------

KERNEL = """extern "C" __global__ void add(float* out, const float* x, int n) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x]; __syncthreads();
  out[threadIdx.x] = row[(threadIdx.x + 1) % n];
}
"""
REAL_PATH = os.environ.get("PATH", "")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_real_nvcc_and_its_absence(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = replace(CODE, source=KERNEL)
    assert isinstance(assemble(code, 60.0), NotAssembled)  # PATH is hidden
    monkeypatch.setenv("PATH", REAL_PATH)
    found = assemble(code, 60.0)
    assert isinstance(found, Assembled)
    assert found.by == "nvcc"
    assert found.figures["static_shared"] == 256
    assert 1 < found.figures["registers"] < 64
    assert assemble(replace(code, target="sm_35"), 60.0) == NotAssembled("nvcc does not know sm_35")
    # a broken one of the user's own comes first and does not decide
    tool("nvcc", "exit 1", "home/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert assemble(replace(code, target="sm_80"), 60.0) == Assembled(found.figures | {"registers": pytest.approx(
        found.figures["registers"], abs=8)}, "nvcc")
    wrong = assemble(replace(code, source=KERNEL.replace("n];", "m];")), 60.0)
    assert isinstance(wrong, Failure)
    assert "m" in wrong.message


@pytest.mark.parametrize("target", ["gfx90a", "gfx942"])
def test_the_real_clang(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", REAL_PATH)
    monkeypatch.setattr(search, "LLVM", Path("/usr/lib"))
    if not search.clang():
        pytest.skip("no clang++ is found")
    source = ("__attribute__((global)) void f(float* p) { __attribute__((shared)) static float s[64];\n"
              "s[__builtin_amdgcn_workitem_id_x()] = p[0]; __builtin_amdgcn_s_barrier(); p[1] = s[3]; }\n")
    found = assemble(replace(HIP, target=target, source=source), 60.0)
    if isinstance(found, NotAssembled):
        pytest.skip(found.reason)
    assert isinstance(found, Assembled)
    assert found.figures["static_shared"] == 256
