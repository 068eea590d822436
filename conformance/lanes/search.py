"""Where people have compilers and assemblers: the variables that name a toolkit, PATH, Python packages, and the
vendors' own places, in this order."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

CUDA, ROCM, LLVM = Path("/usr/local/cuda"), Path("/opt/rocm"), Path("/usr/lib")
_CUDA_VARIABLES, _ROCM_VARIABLES = ("CUDA_HOME", "CUDA_PATH"), ("ROCM_PATH", "HIP_PATH")
_NVRTC = re.compile(r"libnvrtc\.so\.\d+")  # not its "alt" build, nor links without or with a longer version


def nvcc() -> list[str]:
    """Every nvcc."""
    return _programs(("nvcc",), _cuda_folders("bin"))


def ptxas() -> list[str]:
    """Every ptxas. Triton brings two of them, one of which is newer than the other."""
    own = [place / "backends" / "nvidia" / "bin" for place in package_folders("triton")]
    return _programs(("ptxas", "ptxas-blackwell"), [*_cuda_folders("bin"), *own])


def nvrtc() -> list[str]:
    """Every NVRTC library: part of torch's CUDA builds, not of every toolkit."""
    folders = [place for name in ("lib64", "lib") for place in _cuda_folders(name) if place is not None]
    found = [str(file) for place in folders for file in sorted(place.glob("libnvrtc.so.*"), reverse=True)
             if _NVRTC.fullmatch(file.name)]
    return list({os.path.realpath(file): file for file in reversed(found)}.values())[::-1]


def cuda_includes(library: str) -> list[str]:
    """Folders of CUDA's headers for an NVRTC library, its own toolkit's first. CCCL's are a level below in CUDA 13."""
    homes = [Path(library).parents[1], *(place.parent for place in _cuda_folders("include") if place is not None)]
    folders = [home / "include" / below for home in homes for below in ("", "cccl")]
    return list(dict.fromkeys(str(folder) for folder in folders if folder.is_dir()))


def hipcc() -> list[str]:
    """Every hipcc."""
    return _programs(("hipcc",), _rocm_folders("bin"))


def clang() -> list[str]:
    """Every clang++: ROCm's own, that on PATH, then the system's, the newest first."""
    versions = sorted(LLVM.glob("llvm-*/bin"), key=lambda place: _number(place.parent.name), reverse=True)
    return _programs(("amdclang++", "clang++"), [*_named(("HIP_CLANG_PATH",)), *_rocm_folders("llvm/bin"), *versions])


def package_folders(name: str) -> list[Path]:
    """The folders of a Python package that could be imported here; it is not imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # half installed, or replaced by something odd
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _cuda_folders(below: str) -> list[Path | None]:
    """Folders ``below`` the roots of toolkits; None stands for PATH."""
    packages = [home for place in package_folders("nvidia") for home in sorted(place.glob("*"), reverse=True)]
    homes = [*_named(_CUDA_VARIABLES), None, *packages, CUDA]
    return [None if home is None else home / below for home in homes]


def _rocm_folders(below: str) -> list[Path | None]:
    return [None if home is None else home / below for home in (*_named(_ROCM_VARIABLES), None, ROCM)]


def _named(variables: Iterable[str]) -> list[Path]:
    return [Path(os.environ[variable]) for variable in variables if os.environ.get(variable)]


def _programs(names: tuple[str, ...], folders: Iterable[Path | None]) -> list[str]:
    """The programs of these names in the folders (None: those of PATH), each once."""
    found: dict[str, str] = {}
    for folder in folders:
        for name in names:
            program = shutil.which(name, path=None if folder is None else str(folder))
            if program:
                found.setdefault(os.path.realpath(program), program)
    return list(found.values())


def _number(name: str) -> int:
    digits = re.search(r"\d+", name)
    return int(digits.group()) if digits else 0
