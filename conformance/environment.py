"""The machine and software a run happens on: architectures here, versions, commit."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.errors import unknown_name
from conformance.registry import ROOT, archs
from conformance.registry import arch as table_of

ABSENT = "absent"  # the device of an architecture that this machine does not have


@dataclass(frozen=True)
class Gpu:
    """The first visible GPU: architecture ("sm_90", "gfx942"), product name and driver version."""

    arch: str
    name: str
    driver: str | None


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, or every NVIDIA device by number where it is not set; needs no torch."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    nodes = os.listdir("/dev") if os.path.isdir("/dev") else []
    return sorted((name[6:] for name in nodes if name.startswith("nvidia") and name[6:].isdigit()), key=int)


@functools.cache
def gpu() -> Gpu | None:
    """The GPU that torch would use, None when there is none. NVIDIA's tool answers without importing torch, which
    takes seconds; torch is asked where that tool or a CUDA build of torch is not found."""
    if not _torch_libraries() or not visible_gpus():
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap,name,driver_version", "--format=csv,noheader"]
    answer = _output(*query, "-i", visible_gpus()[0])
    fields = [field.strip() for field in (answer or "").split(",")]
    if len(fields) == 3 and "libtorch_cuda.so" in _torch_libraries():
        return Gpu("sm_" + fields[0].replace(".", ""), fields[1], fields[2])
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(arch_name(properties), properties.name, torch.version.hip)


def arch_name(properties: Any) -> str:
    """The architecture of a GPU from torch's properties of the device: "sm_90", "gfx942"."""
    amd = str(getattr(properties, "gcnArchName", ""))
    return amd.split(":")[0] if amd.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def _torch_libraries() -> set[str]:
    """The GPU libraries of the installed torch, empty for a CPU build."""
    spec = importlib.util.find_spec("torch")
    places = [Path(place) / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    return {name for name in ("libtorch_cuda.so", "libtorch_hip.so") if any((p / name).exists() for p in places)}


def archs_here() -> dict[str, str]:
    """Architecture name -> torch device, the preferred one first: the GPU that is here, then the CPU."""
    here = gpu()
    return {**({here.arch: "cuda"} if here else {}), "cpu": "cpu"}


def chosen_archs(names: tuple[str, ...]) -> dict[str, str]:
    """Architecture -> torch device, ABSENT for those that are not here; the default is the preferred one here.

    Raises ConformanceError for one that is neither here nor in ``matrices/archs``.
    """
    here = archs_here()
    if not names:
        name = next(iter(here))
        return {name: here[name]}
    known = dict.fromkeys((*here, *archs()))
    if "all" in names:
        names = tuple(known)
    for name in names:
        if name not in known:
            raise unknown_name("architecture", name, (*known, "all"))
    return {name: here.get(name, ABSENT) for name in names}


@functools.cache
def python_here() -> str:
    """What starts this process's Python in a shell whose directory is the checkout: the shortest that does."""
    own = Path(sys.executable)
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found) == own:
            return name
    return shlex.quote(str(own.relative_to(ROOT) if own.is_relative_to(ROOT) else own))


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """First line of a command's output, or None when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def uncommitted() -> str | None:
    """What uncommitted changes of the code that decides results are known by: a digest; None when there are none."""
    folders = ("conformance", "references", "kernels", "matrices")
    names: set[str] = set()
    for command in (["diff", "HEAD", "--name-only", "-z"], ["ls-files", "-z", "--others", "--exclude-standard"]):
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", *command, "--", *folders], capture_output=True, text=True, cwd=ROOT, check=False)
        names |= set(done.stdout.split("\0")) - {""}
    digest = hashlib.sha256()
    for name in sorted(names):
        file = ROOT / name
        digest.update(f"{name}\0".encode() + (file.read_bytes() if file.is_file() else b"gone"))
    return digest.hexdigest()[:16] if names else None


def identity(arch: str) -> dict[str, Any]:
    """What a reader must know to believe or repeat a run on ``arch``."""
    device = archs_here().get(arch, ABSENT)
    here = gpu() if device == "cuda" else None
    names = {"cuda": here.name if here else "", "cpu": _cpu_name(), ABSENT: f"none here ({table_of(arch).about})"}
    return {
        "arch": arch,
        "here": device != ABSENT,
        "device": names[device],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": here.driver if here else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": version("torch") or importlib.import_module("torch").__version__,
        "tilelang": version("tilelang"),
        "compiler": _output("gcc", "--version"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "dirty": _output("git", "status", "--porcelain") is not None,
        "changes": uncommitted(),
        "command": " ".join(["pytest", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"
