"""Handing generated code to the vendor's assembler: does it take the code, and what does each thread use?

NVIDIA: nvcc (which calls ptxas). AMD: hipcc. A missing assembler, or one that does not know the architecture, is a
reason for "not assembled", never a pass.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from conformance.disk_cache import cache_dir, hold
from conformance.route import Failure, Lowered

_PTXAS = {
    "registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores",
    "static_shared": r"(\d+) bytes smem",
}
_AMDGPU = {
    "registers": r"VGPRs: (\d+)", "spill_bytes": r"VGPRs Spill: (\d+)",
    "static_shared": r"LDS Size \[bytes/block\]: (\d+)",
}
Assembled = dict[str, int]


def assembler(lowered: Lowered) -> tuple[str, str]:
    """(path of the assembler, "") or ("", why there is none for this code)."""
    if lowered.language == "cuda":
        nvcc = _find("nvcc", ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda/bin")
        if not nvcc:
            return "", "no assembler (nvcc is not found)"
        known = lowered.target.rstrip("af") in _nvcc_targets(nvcc)
        return (nvcc, "") if known else ("", f"nvcc does not know {lowered.target}")
    if lowered.language != "hip":
        return "", f"no assembler is known for {lowered.language}"
    hipcc = _find("hipcc", ("ROCM_PATH", "HIP_PATH"), "/opt/rocm/bin")
    return (hipcc, "") if hipcc else ("", "no assembler (hipcc is not found)")


def assemble(lowered: Lowered, program: str, seconds: float) -> Assembled | Failure:
    """Registers of a thread, bytes that it spills, and static shared memory in bytes, as the assembler reports them.

    ``program``: from `assembler`. The answer is kept on disk, keyed by source, target and the assembler's version.
    """
    text = f"{lowered.source}\n{lowered.target}\n{_version(program)}"
    kept = cache_dir() / "assembled" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    with hold(cache_dir() / "locks", kept.stem):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # not there, or damaged
            return {name: int(value) for name, value in json.loads(kept.read_text()).items()}
        found = _run(lowered, program, seconds)
        if not isinstance(found, Failure):
            with contextlib.suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(found))
                os.replace(part, kept)
        return found


def _run(lowered: Lowered, program: str, seconds: float) -> Assembled | Failure:
    cuda = lowered.language == "cuda"
    with tempfile.TemporaryDirectory(prefix="conformance-assemble-") as folder:
        file = Path(folder) / ("kernel.cu" if cuda else "kernel.hip")
        file.write_text(lowered.source, encoding="utf-8")
        flags = (
            ["-cubin", f"-arch={lowered.target}", "-Xptxas", "-v"] if cuda
            else ["--genco", f"--offload-arch={lowered.target}", "-O3", "-Rpass-analysis=kernel-resource-usage"]
        )
        includes = [f"-I{place}" for place in lowered.includes]
        command = [program, *flags, "-std=c++17", *includes, "-o", str(file.with_suffix(".bin")), str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds or None,
                                  check=False)
        except subprocess.TimeoutExpired:
            return Failure("hang", f"{Path(program).name} was still running after {seconds:g} s")
        except OSError as error:
            return Failure("process-exit", f"{program} cannot be run: {error.strerror}")
    said = done.stdout + done.stderr
    if done.returncode < 0:
        return Failure("compiler-abort", f"{Path(program).name} ended by signal {-done.returncode}")
    if done.returncode:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        return Failure("refused-by-compiler", f"{Path(program).name}: {lines[0][:500] if lines else 'no message'}")
    return _numbers(said, _PTXAS if cuda else _AMDGPU)


def _numbers(said: str, patterns: dict[str, str]) -> Assembled:
    """The largest value of each figure over all functions of the code; figures that are not reported are left out."""
    found = {name: [int(text) for text in re.findall(pattern, said)] for name, pattern in patterns.items()}
    return {name: max(values) for name, values in found.items() if values}


def _find(name: str, variables: tuple[str, ...], place: str) -> str:
    homes = [os.path.join(os.environ[variable], "bin") for variable in variables if os.environ.get(variable)]
    return shutil.which(name) or next(filter(None, (shutil.which(os.path.join(p, name)) for p in (*homes, place))), "")


@functools.cache
def _nvcc_targets(nvcc: str) -> frozenset[str]:
    try:
        done = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(done.stdout.split())


@functools.cache
def _version(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
