"""Compiles TileLang kernels: each specialisation once for all processes and runs, on top of TileLang's disk cache.

TileLang keeps compiled kernels under ``TILELANG_CACHE_DIR`` (default ~/.tilelang/cache), keyed by the traced
program, target, backend, flags and version; it publishes an entry with one rename and checks it against a manifest
of hashes before loading, so a truncated entry is rebuilt. Added here: an in-process table; a file lock per
specialisation, so that workers do not compile the same kernel at the same time (the operating system releases it
when its holder dies); a note of what was compiled, so that compiling ahead neither traces nor loads it again; the
compiler's and processor's identity in the key, because ``-march=native`` code must not travel to another machine
through a shared home directory; and one clear exception.

tilelang is imported on first use: importing this module costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.disk_cache import hold, keep, kept
from conformance.environment import arch_name, version

BACKEND_VARIABLE = "CONFORMANCE_TILELANG_BACKEND"
BACKENDS = ("auto", "tvm_ffi", "nvrtc", "cython")
_C_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing")
PASSES = {"tl.disable_safe_memory_legalize": True}  # the kernels' own conditions keep every access in range
# TileLang 0.1.15 fences shared memory for wgmma behind the barrier, in the thread that reads, and not before it in the
# one that wrote: without TMA nothing then orders the two. Programs that multiply what plain copies bring use mma.
WITHOUT_WGMMA = PASSES | {"tl.disable_wgmma": True}

_ready: dict[tuple[str, str], Callable[..., Any]] = {}
_tracing = threading.Lock()


class KernelBuildError(RuntimeError):
    """A kernel could not be compiled. Names the kernel, its specialisation and the target; the cause is chained."""


def missing(device_type: str | None = None) -> str | None:
    """None, or why TileLang kernels cannot run on ``device_type`` ("cpu", "cuda"; None: whichever is there)."""
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed"
    if device_type is None:
        import torch

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and _rocm():
        return None if _find_hipcc() else "no HIP compiler (put hipcc on PATH)"
    if device_type == "cuda":
        if _find_nvcc() or importlib.util.find_spec("cuda") is not None:
            return None
        return "no CUDA compiler (put nvcc on PATH, or install cuda-python for nvrtc)"
    if _find_cxx():
        return None
    if shutil.which("gcc") or shutil.which("cc"):
        return "no C++ compiler (gcc is here, but TileLang's C code needs g++: install g++)"
    return "no C compiler (install gcc)"


def load(label: str, target: str, trace: Callable[[], Any], wait: bool = True, passes: Mapping[str, bool] = PASSES
         ) -> Callable[..., Any] | None:
    """The compiled kernel of one specialisation, from memory, disk, or compiled now.

    label: names kernel and specialisation, unique per traced program. target: "c", or "cuda" or "hip" (the current
    device's architecture). trace: builds the TileLang program; called only when the kernel is not in memory. passes:
    settings of TileLang's passes, always the same ones for a label. With ``wait`` false this compiles ahead: the answer
    is None if another process is compiling the kernel at the moment, or if it was compiled before, from the same
    sources; it is loaded when a call needs it. Raises KernelBuildError.
    """
    where = target if target == "c" else f"{target} {gpu_arch()}"
    kernel = _ready.get((label, where))
    if kernel is not None:
        return kernel
    note = _note(label, target, where, trace)
    if not wait and kept(note) is not None:
        _import_meanwhile()
        return None
    with hold(cache_dir() / "conformance-locks", f"{label} {where}", wait) as held:
        if not held:
            return None
        kernel = _ready.get((label, where))
        if kernel is None:
            kernel = _ready[label, where] = _compile(label, target, where, trace, passes)
            keep(note, label)
        return kernel


def backend(target: str) -> str:
    """TileLang's execution backend: "cython" for C, TileLang's default for HIP; for CUDA what
    ``CONFORMANCE_TILELANG_BACKEND`` says.

    "auto" is TileLang's default (tvm_ffi, which calls nvcc). nvrtc compiles faster, but with TileLang 0.1.15 it
    launches on the default stream whatever stream is current: edge family F29 fails with it on an H200.
    """
    if target != "cuda":
        return "cython" if target == "c" else "auto"
    wanted = os.environ.get(BACKEND_VARIABLE, "auto")
    if wanted not in BACKENDS:
        raise KernelBuildError(f"{BACKEND_VARIABLE} is {wanted!r}; known: {', '.join(BACKENDS)}")
    return wanted


def cache_dir() -> Path:
    """Where compiled kernels are kept: TileLang's own directory, or a temporary one when that is not writable."""
    directory = Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        directory = Path(tempfile.gettempdir()) / f"tilelang-cache-{os.getuid()}"
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TILELANG_CACHE_DIR"] = str(directory)
    return directory


@functools.cache
def tilelang_module() -> Any:
    """Import tilelang once, without its progress messages and its dumps of programs that do not trace."""
    cache_dir()  # may redirect TileLang's cache, which it reads when it is imported
    import tilelang

    logging.getLogger("tilelang").setLevel(logging.WARNING)
    builder = logging.getLogger("tilelang.language.eager.builder")
    builder.addFilter(lambda record: record.levelno < logging.CRITICAL)  # the exception says the same
    return tilelang


@functools.cache
def _import_meanwhile() -> None:
    """tilelang takes seconds to import; nothing is to be compiled, so that the first call would wait for it."""
    from conformance.launching.restore import import_meanwhile

    import_meanwhile(tilelang_module)


def _compile(label: str, target: str, where: str, trace: Callable[[], Any], passes: Mapping[str, bool]
             ) -> Callable[..., Any]:
    try:
        tilelang = tilelang_module()
        with _tracing:  # the tracer keeps global state
            program = trace()
        flags = [f"-DCONFORMANCE_TOOLCHAIN={_toolchain(target)}", *(_C_FLAGS if target == "c" else ())]
        kernel = tilelang.compile(program, target=target, execution_backend=backend(target),
                                  compile_flags=flags, pass_configs=dict(passes))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise KernelBuildError(
            f"kernel {label} did not compile for {where} with backend {backend(target)}: "
            f"{type(error).__name__}: {lines[0][:300]}"
        ) from error
    _remove_intermediates(kernel)
    return kernel


def _remove_intermediates(kernel: Any) -> None:
    """TileLang's library generator leaves source and library of a fresh compilation in the temporary directory;
    the library is loaded and cached by now."""
    generator: Any = getattr(kernel.adapter, "lib_generator", None)
    if getattr(generator, "srcpath", None):  # unset when the kernel came from the cache
        for path in (generator.srcpath, generator.libpath):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _note(label: str, target: str, where: str, trace: Callable[[], Any]) -> Path:
    """The file that says that a program was compiled from the sources and by the tools of today. If what it speaks of
    has been deleted from TileLang's cache since, the first call compiles it."""
    facts = [label, where, backend(target), _toolchain(target), _sources(_file_of(trace)), version("tilelang") or ""]
    return cache_dir() / "conformance-made" / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _file_of(trace: Callable[[], Any]) -> str | None:
    with contextlib.suppress(TypeError):  # an object that can be called has no file
        return inspect.getsourcefile(getattr(trace, "func", trace))
    return None


@functools.cache
def _sources(tracer: str | None) -> str:
    """A digest of the kernels here, and of the file that traces a program if that is another."""
    files = {*Path(__file__).parent.rglob("*.py"), *([Path(tracer)] if tracer else [])}
    digest = hashlib.sha256()
    for file in sorted(files):
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _toolchain(target: str) -> str:
    """A short hash of what the flags do not say: compiler version and, for C, the processor's model and features."""
    compiler = {"cuda": _find_nvcc, "hip": _find_hipcc, "c": _find_cxx}[target]()
    facts = [platform.machine(), platform.platform() if compiler is None else _first_output([compiler, "--version"])]
    if target == "c":
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            facts += sorted({line for line in lines if line.startswith(("model", "flags", "Features", "CPU part"))})
    return "h" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _first_output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _find_cxx() -> str | None:
    """The compiler that TileLang will call."""
    for variable in ("CXX", "CC"):
        if os.environ.get(variable):
            return shutil.which(os.environ[variable])
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def _find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))


def _find_hipcc() -> str | None:
    return shutil.which("hipcc") or shutil.which("/opt/rocm/bin/hipcc")


def _rocm() -> bool:
    import torch

    return torch.version.hip is not None


def gpu_arch() -> str:
    """Name of the current GPU's architecture: "sm_90", "gfx942"."""
    import torch

    return arch_name(torch.cuda.get_device_properties(torch.cuda.current_device()))
