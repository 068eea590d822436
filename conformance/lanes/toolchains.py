"""The ways to assemble generated code that this machine has, by language, the best first.

NVIDIA: nvcc, which calls ptxas; or NVRTC, which turns CUDA C++ into PTX, and ptxas, which takes nothing else. AMD:
hipcc; or a clang++, with ROCm's headers and libraries where it finds them, and without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.lanes import nvrtc, search
from conformance.route import Lowered

Commands = list[list[str]]
_PTXAS = {
    "registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores",
    "static_shared": r"(\d+) bytes smem",
}
_AMDGPU = {
    "registers": r"VGPRs: (\d+)", "spill_bytes": r"VGPRs Spill: (\d+)",
    "static_shared": r"LDS Size \[bytes/block\]: (\d+)",
}
_RESOURCES = "-Rpass-analysis=kernel-resource-usage"
# What is missing where a language has no toolchain.
WANTED = {"cuda": "nvcc is not found, nor ptxas together with NVRTC", "hip": "neither hipcc nor clang++ is found"}
PROBES = {"cuda": 'extern "C" __global__ void conformance_probe() {}\n',
          "hip": 'extern "C" __attribute__((global)) void conformance_probe() {}\n'}  # needs no header


@dataclass(frozen=True)
class Toolchain:
    """One way to assemble.

    name: as it is told. files: programs and libraries, whose versions the answer depends on. commands(code, source):
    what to run one after another on the file that holds the code; each may write beside it. figures: what the
    commands say of registers and the like, as patterns.
    """

    name: str
    files: tuple[str, ...]
    commands: Callable[[Lowered, Path], Commands]
    figures: Mapping[str, str]


def toolchains(language: str) -> list[Toolchain]:
    """Those of a language, which `WANTED` lists; any of them may know only some targets."""
    if language == "cuda":
        pairs = [(library, program) for library in search.nvrtc() for program in search.ptxas()]
        return [*map(_nvcc, search.nvcc()), *(_nvrtc_and_ptxas(*pair) for pair in pairs)]
    bare = [_clang(program, bare=True) for program in search.clang()]
    return [*map(_hipcc, search.hipcc()), *(_clang(program, bare=False) for program in search.clang()), *bare]


def _nvcc(program: str) -> Toolchain:
    def commands(code: Lowered, source: Path) -> Commands:
        return [[program, "-cubin", f"-arch={code.target}", "-Xptxas", "-v", "-std=c++17", *_includes(code),
                 "-o", str(source.with_suffix(".bin")), str(source)]]

    return Toolchain("nvcc", (program,), commands, _PTXAS)


def _nvrtc_and_ptxas(library: str, program: str) -> Toolchain:
    def commands(code: Lowered, source: Path) -> Commands:
        made = source.with_suffix(".ptx")
        first = [f"--pre-include={code.nvrtc_header}"] if code.nvrtc_header else []
        places = [f"-I{place}" for place in search.cuda_includes(library)]
        options = [f"--gpu-architecture={code.target.replace('sm_', 'compute_')}", "-std=c++17", "-default-device",
                   *first, *_includes(code), *places]
        return [[sys.executable, str(nvrtc.__file__), library, str(source), str(made), *options],
                [program, "-v", f"-arch={code.target}", "-o", str(source.with_suffix(".bin")), str(made)]]

    return Toolchain("NVRTC + ptxas", (library, program), commands, _PTXAS)


def _hipcc(program: str) -> Toolchain:
    def commands(code: Lowered, source: Path) -> Commands:
        return [[program, "--genco", f"--offload-arch={code.target}", "-O3", _RESOURCES, "-std=c++17",
                 *_includes(code), "-o", str(source.with_suffix(".bin")), str(source)]]

    return Toolchain("hipcc", (program,), commands, _AMDGPU)


def _clang(program: str, bare: bool) -> Toolchain:
    """In two steps, compiling and assembling: to link and bundle it would call programs that clang need not bring."""

    def commands(code: Lowered, source: Path) -> Commands:
        made = source.with_suffix(".s")
        without = ["-nogpuinc", "-nogpulib"] if bare else []
        return [[program, "-x", "hip", f"--offload-arch={code.target}", "--offload-device-only", "-O3", _RESOURCES,
                 "-std=c++17", *without, *_includes(code), "-S", "-o", str(made), str(source)],
                [program, "-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={code.target.partition(':')[0]}",
                 "-c", "-o", str(source.with_suffix(".bin")), str(made)]]

    return Toolchain("clang++ without ROCm" if bare else "clang++", (program,), commands, _AMDGPU)


def _includes(code: Lowered) -> list[str]:
    return [f"-I{place}" for place in code.includes]
