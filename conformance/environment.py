"""The machine and software a run happens on: architectures here, versions, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from conformance.errors import unknown_name
from conformance.registry import ROOT


@functools.cache
def archs_here() -> dict[str, str]:
    """Architecture name -> torch device, the preferred one first: the GPU that is here, then the CPU."""
    import torch

    found: dict[str, str] = {}
    if torch.cuda.is_available():
        if torch.version.hip:
            found[torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]] = "cuda"
        else:
            major, minor = torch.cuda.get_device_capability(0)
            found[f"sm_{major}{minor}"] = "cuda"
    found["cpu"] = "cpu"
    return found


def chosen_archs(names: tuple[str, ...]) -> dict[str, str]:
    """The architectures asked for (default: the preferred one). Raises ConformanceError for one not here."""
    here = archs_here()
    if not names:
        name = next(iter(here))
        return {name: here[name]}
    if names == ("all",):
        return dict(here)
    for name in names:
        if name not in here:
            raise unknown_name("architecture (only those of this machine can execute)", name, (*here, "all"))
    return {name: here[name] for name in names}


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


def identity(arch: str) -> dict[str, Any]:
    """What a reader must know to believe or repeat a run on ``arch``."""
    import torch

    cuda = archs_here().get(arch) == "cuda"
    return {
        "arch": arch,
        "device": torch.cuda.get_device_name(0) if cuda else _cpu_name(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "tilelang": version("tilelang"),
        "compiler": _output("gcc", "--version"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "dirty": _output("git", "status", "--porcelain") is not None,
        "command": " ".join(["pytest", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"
